"""`Checkpointed`: a call under `checkpoint`, on the fast path and on the slow one.

The fast path reuses the trace of the last call if every guard of it holds. Else the traces of the
function are searched, and the function is traced if none fits.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from torchremat import _torch, config
from torchremat.api_util import StaticArguments, WrapHashably
from torchremat.autodiff.joint import TraceOptions, is_differentiated
from torchremat.core.trees import Structure
from torchremat.errors import ArgumentValueError
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.policies.foreign import read_contexts
from torchremat.policies.policy import Policy
from torchremat.remat.dynamo import checkpoint_in_compiler, outside_compiler
from torchremat.remat.escapes.reach import Roots
from torchremat.remat.escapes.read_watch import Spot, has_stand_ins
from torchremat.remat.op.autograd_functions import apply_program
from torchremat.remat.op.make_graph import call_in_graph, is_opened, is_traced_whole
from torchremat.remat.program.compilers import Compiler
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.tracing.calls import Call, flatten_call, prevent_cse_of, wrap_statics
from torchremat.remat.tracing.effects import trace_without_effects
from torchremat.remat.tracing.function_trace import (
    FunctionTrace,
    TraceStart,
    describe_fun,
    trace_function,
)
from torchremat.remat.tracing.guards import (
    CapturedTensors,
    ModuleGuard,
    VariableGuard,
    storage_offsets,
)
from torchremat.remat.tracing.input_labels import BoundCall
from torchremat.remat.tracing.trace_cache import (
    PolicyKey,
    Trace,
    TracesByFunction,
    current_state,
    warn_of_retraces,
)
from torchremat.remat.tracing.unread import forget_unread
from torchremat.remat.tracing.variables import (
    Binding,
    roots_of,
    variables_of,
    variables_of_modules,
)
from torchremat.remat.values.residual_log import log_residuals
from torchremat.remat.verify import VerifyingProgram
from torchremat.tracing.ambient_state import is_meta_as_cpu, switches
from torchremat.tracing.axes.named_axes import axis_environment
from torchremat.tracing.dtensors import unwrap_inputs
from torchremat.tracing.dynamic_inputs import DynamicInputs
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.module_paths import below
from torchremat.tracing.tracing import has_symbols, trace_lock

_traces = TracesByFunction()


class Checkpointed:
    """A function under `checkpoint`. Call it as the function itself."""

    around: Callable[..., Any] | None = None
    """A transformation of `fun`: if set, `around(fun, *args, **kwargs)` is traced."""

    def __init__(
        self,
        fun: Callable[..., Any],
        policy: Policy,
        prevent_cse: Any,
        statics: StaticArguments,
        *,
        lenient: bool = False,
        module_prefix: str = "",
        compiler: Compiler | None = None,
    ) -> None:
        own = dict(self.__dict__)
        functools.update_wrapper(self, fun)
        self.__dict__.update(own)  # `fun` may be of the same class, with attributes of its own
        self.fun = fun
        self.policy = policy
        self.prevent_cse = prevent_cse
        self.statics = statics
        self.lenient = lenient
        self.module_prefix = module_prefix
        self.compiler = compiler
        self._key = PolicyKey(policy)
        self._verified_key = PolicyKey(policy, verified=True)
        self._trace_cache = _traces.of(fun, self._cache_key())
        self._last: tuple[FunctionProgram, Sizes | None] | None = None
        self._warned_programs: weakref.WeakSet[FunctionProgram] = weakref.WeakSet()
        self._uncompiled = outside_compiler() if policy.is_whole_graph else None

    def __repr__(self) -> str:
        return f"checkpoint({self.fun!r}, policy={self.policy!r})"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        bound = copy.copy(self)
        bound.fun = MethodType(self.fun, instance)
        bound.statics = self.statics.without_first()
        bound._trace_cache = _traces.of(bound.fun, self._cache_key())
        return bound

    def _cache_key(self) -> tuple[Any, ...]:
        return (
            self.statics.argnums,
            self.statics.all_names,
            self.lenient,
            self.module_prefix,
            self.compiler,
            WrapHashably(self.prevent_cse),
            self.policy.is_whole_graph,
            self.policy.honours_others,
        )

    @property
    def last_program(self) -> FunctionProgram | None:
        """The program of the last call that could be differentiated."""
        if self._last is None:
            return None
        program, sizes = self._last
        return program.specialize(sizes) if sizes else program

    @property
    def _current_key(self) -> PolicyKey:
        setting = config.verify_recomputation
        if setting is None:
            return self._key
        if setting != "bitwise":
            raise ArgumentValueError(
                f"config.verify_recomputation is None or 'bitwise', but it is {setting!r}"
            )
        return self._verified_key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _torch.is_exporting():
            return self.fun(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            if not self.policy.applies_to_nested:  # `jit` leaves it to the compiler around
                return self.fun(*args, **kwargs)
            if self._uncompiled is not None:
                return self._uncompiled(self, args, kwargs)
            return checkpoint_in_compiler(self.fun, self.policy, *args, **kwargs)
        call = flatten_call(args, kwargs, self.statics, lenient=self.lenient)
        trace = self._trace_cache.recent
        if trace is not None and trace.key == call.key:
            captured = trace.captured.current()
            tensors = [*call.tensors, *(captured or ())]
            program = trace.programs.get(self._current_key)
            sizes = None
            if (
                captured is not None
                and program is not None
                and (program.is_logged or not config.log_checkpoint_residuals)
                and (not program.is_warned_of or program in self._warned_programs)
                and trace.state[0] is torch.is_grad_enabled()
                and trace.state[1].default_dtype is torch.get_default_dtype()
                and trace.state[1].switches == switches()
                and trace.state[1].axes == axis_environment()
                and trace.state[1].meta_as_cpu is is_meta_as_cpu()
                and trace.tensor_guard.check(*tensors)
                and (trace.dynamic is None or (sizes := trace.dynamic.sizes(tensors)) is not None)
                and trace.has_offsets_of(tensors)
                and trace.still_holds()
                and trace.value_guards_hold(tensors)
                and (not trace.escapes or trace.has_escapes_of(call, self.fun))
                and (program := program.at(sizes)) is not None
            ):
                if trace.records:
                    self._last = (program, sizes)
                inputs = list(tensors) if trace.escapes else ()
                outputs = self._apply(trace, program, tensors, sizes)
                return trace.deliver(outputs, inputs, call, self.fun, sizes)
        return self._slow_call(call, args, kwargs)

    def _slow_call(self, call: Call, args: Any, kwargs: Any) -> Any:
        if self.policy.applies_to_nested and is_opened():  # the policy around decides on everything
            return self.fun(*args, **kwargs)
        if is_traced_whole():
            return call_in_graph(
                self.fun,
                args,
                kwargs,
                self.statics,
                policy=self.policy,
                lenient=self.lenient,
                module_prefix=self.module_prefix,
            )
        trace, program = self.prepare(call, args, kwargs)
        captured = trace.captured.current()
        assert captured is not None, "the trace has just been made, or found to fit"
        tensors = [*call.tensors, *captured]
        if trace.is_sharded:
            tensors = unwrap_inputs(tensors, trace.cotangent_placements)
        elif (
            not trace.state[1].autocast
            and not _torch.functorch_is_active()
            and not any(isinstance(t, _torch.FakeTensor) for t in tensors)
        ):
            trace.tensor_guard = _torch.tensor_guard(tensors, trace.dynamic_dims)
            self._trace_cache.recent = trace
        sizes = None if trace.dynamic is None else trace.dynamic.sizes(tensors)
        if trace.records:
            self._last = (program, sizes)
        inputs = list(tensors) if trace.escapes else ()
        outputs = self._apply(trace, program, tensors, sizes)
        return trace.deliver(outputs, inputs, call, self.fun, sizes)

    def _apply(
        self, trace: Trace, program: FunctionProgram, tensors: list[Tensor], sizes: Sizes | None
    ) -> tuple[Any, ...]:
        if trace.records is trace.state[0]:
            return apply_program(program, self.fun, tensors, sizes)
        with torch.enable_grad():  # as the function itself does inside a `no_grad`
            return apply_program(program, self.fun, tensors, sizes)

    def prepare(self, call: Call, args: Any, kwargs: Any) -> tuple[Trace, FunctionProgram]:
        with trace_lock:
            trace = self.trace_of(call, args, kwargs)
            key = self._current_key
            program = trace.programs.get(key)
            sizes = None if trace.dynamic is None else trace.dynamic.sizes(call.tensors)
            if program is None:
                program = self._new_program(trace, key, sizes, args, kwargs)
                program.warn_of_policy()
                trace.programs[key] = program
                self._log(program, trace, args, kwargs, call)
            else:
                # it has warned for another checkpoint of the same function
                if program.is_warned_of and program not in self._warned_programs:
                    program.warn_of_policy()
                if config.log_checkpoint_residuals and not program.is_logged:
                    self._log(program, trace, args, kwargs, call)
            program = program.at(sizes) or program.decide_at(sizes or {})
            if program.is_warned_of:
                self._warned_programs.add(program)
            return trace, program

    def _new_program(
        self, trace: Trace, key: PolicyKey, sizes: Sizes | None, args: Any, kwargs: Any
    ) -> FunctionProgram:
        kind = VerifyingProgram if key.verified else FunctionProgram
        policy = self._trace_cache.job_of(self._key)
        program = kind(
            trace.region,
            policy,
            module_prefix=self.module_prefix,
            compiler=self.compiler,
            sizes=sizes,
        )
        flags = prevent_cse_of(self.prevent_cse, args, kwargs)
        num_captured = len(program.region.specs) - len(flags)
        program.prevent_cse = (*flags, *[True] * num_captured)
        return program

    def trace_of(self, call: Call, args: Any, kwargs: Any) -> Trace:
        with trace_lock:
            return self._find(call) or self._trace(call, args, kwargs)

    def trace_usual(self, call: Call, args: Any, kwargs: Any) -> Trace:
        """A trace of its own, in which those outputs have a cotangent that `usual_outputs` says."""
        self.statics.refuse_tensors(args, kwargs)
        specs = tuple(InputSpec.of(t, any_level=True) for t in call.tensors)
        with trace_lock:
            return self._trace_with(call, args, kwargs, specs, None, only_usual=True)

    def _find(self, call: Call) -> Trace | None:
        specs = tuple(InputSpec.of(t, any_level=True) for t in call.tensors)
        if has_symbols(specs):
            return None
        return self._trace_cache.find(call, specs, self.fun, dynamic=self._may_be_dynamic())

    def _may_be_dynamic(self) -> bool:
        """Whether a graph for many sizes serves."""
        compiles_each = self.compiler is not None and not self.compiler.takes_symbols
        return not (
            compiles_each
            or not self.policy.serves_many_sizes
            or _torch.functorch_is_active()
            or _torch.in_dual_level()
            or _torch.innermost_proxy_mode() is not None
        )

    def _log(
        self, program: FunctionProgram, trace: Trace, args: Any, kwargs: Any, call: Call
    ) -> None:
        loudly = config.log_checkpoint_residuals
        labels = functools.partial(self._labels, trace, args, kwargs, call)
        log_residuals(program, describe_fun(self.fun), labels, loudly=loudly)
        program.is_logged = loudly

    def _labels(self, trace: Trace, args: Any, kwargs: Any, call: Call) -> list[str]:
        bound = BoundCall(self.fun, args, kwargs)
        known = {id(t): str(n) for t, n in zip(bound.tensors, bound.labels, strict=True)}
        arguments = [known.get(id(t), f"argument {i}") for i, t in enumerate(call.tensors)]
        return [*arguments, *(label.removeprefix("the ") for label in trace.captured.labels)]

    def _trace(self, call: Call, args: Any, kwargs: Any) -> Trace:
        self.statics.refuse_tensors(args, kwargs)
        specs = tuple(InputSpec.of(t, any_level=True) for t in call.tensors)
        if has_symbols(specs):
            return self._trace_with(call, args, kwargs, specs, None)
        warn_of_retraces(describe_fun(self.fun), self._trace_cache, call, specs, self.fun)
        trace = None
        dynamic = None
        if self._may_be_dynamic() and not any(spec.sharding for spec in specs):
            dynamic = DynamicInputs.of(specs, self._trace_cache.varying(call, specs))
        if dynamic is not None:
            with _torch.dispatch_restored():
                try:
                    trace = self._trace_with(call, args, kwargs, specs, dynamic)
                except Exception as error:  # an operator that knows no symbols, or the user's fault
                    self._trace_cache.fix(dynamic.places, error)
        trace = trace or self._trace_with(call, args, kwargs, specs, None)
        if not has_stand_ins():
            self._trace_cache.add(trace)
        return trace

    def _trace_with(
        self,
        call: Call,
        args: Any,
        kwargs: Any,
        specs: tuple[InputSpec, ...],
        dynamic: DynamicInputs | None,
        *,
        only_usual: bool = False,
    ) -> Trace:
        structure = Structure.of(wrap_statics(args, kwargs, self.statics))
        variables = self._variables()
        roots = roots_of(self.fun, variables)
        inside = list(dict.fromkeys(m for _, root in roots for m in root.modules()))
        state = current_state()
        unchanged = VariableGuard([*variables, *variables_of_modules(inside)])

        def trace(*, with_gradients: bool) -> FunctionTrace:
            options = _trace_options(self.policy, with_gradients, state[0], only_usual)
            run = functools.partial(trace_once, options)
            return trace_without_effects(describe_fun(self.fun), run, variables, inside)

        def trace_once(options: TraceOptions, watched: Mapping[Spot, Any] = {}) -> FunctionTrace:
            start = TraceStart(roots, watched, self.around)
            return trace_function(self.fun, structure, specs, dynamic, start, options, call.tensors)

        made = trace(with_gradients=state[0])
        if not state[0] and any(map(is_differentiated, made.result.tensors)):
            made = trace(with_gradients=True)  # it enables gradients itself
        again = functools.partial(trace_once, made.region.options)
        forget_unread(made, self._trace_cache.read_spots, again, Roots(self.fun, call.arguments))
        unchanged.forget_changed(made.escapes)
        modules = dict.fromkeys([*inside, *made.paths.seen])
        prefix = self.module_prefix
        named = [(below(prefix, made.paths.name_of(m)), m) for m in modules]
        return _build_trace(made, unchanged, variables, named, call, specs, state, dynamic)

    def _variables(self) -> list[Binding]:
        return variables_of(self.fun)


def _trace_options(
    policy: Policy, with_gradients: bool, grad_enabled: bool, only_usual: bool
) -> TraceOptions:
    return TraceOptions(
        with_gradients,
        grad_enabled=grad_enabled,
        only_usual=only_usual,
        opens_calls=policy.is_whole_graph,
        on_checkpoint=call_foreign if policy.honours_others else None,
    )


def call_foreign(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context_fn: Any
) -> Any:
    """Call `function` under what `torch.utils.checkpoint` would save of it, for a report."""
    policy, context = read_contexts(context_fn)
    if not isinstance(context, nullcontext):
        function = _run_in(context, function)
    statics = StaticArguments(function, (), ())
    return Checkpointed(function, policy, True, statics, lenient=True)(*args, **kwargs)


def _run_in(
    context: AbstractContextManager[Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return function(*args, **kwargs)

    return run


def _build_trace(
    made: FunctionTrace,
    unchanged: VariableGuard,
    variables: Sequence[Binding],
    named_modules: list[tuple[str, nn.Module]],
    call: Call,
    specs: tuple[InputSpec, ...],
    state: Any,
    dynamic: DynamicInputs | None,
) -> Trace:
    captured = CapturedTensors(made.captured, variables, named_modules, made.escapes)
    made.body.captured = captured.current_tensors
    return Trace(
        key=tuple(k.freeze() if isinstance(k, WrapHashably) else k for k in call.key),
        specs=specs,
        state=state,
        records=made.region.options.with_gradients,
        region=made.region,
        result=made.result,
        captured=captured,
        modules=ModuleGuard(named_modules, made.escapes, made.captured),
        variables=unchanged,
        escapes=made.escapes,
        dynamic=dynamic,
        cotangent_placements=made.body.cotangent_placements,
        offsets=storage_offsets(made.region, [*call.tensors, *made.captured]),
        value_guards=tuple(made.body.value_guards.guards) if made.body.value_guards else (),
    )
