"""`Checkpointed`: a call under `checkpoint`, on the fast path and on the slow one.

The fast path reuses the trace of the last call if every guard of it holds. Else the traces of the
function are searched, and the function is traced if none fits.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch, config
from torchremat.api_util import StaticArguments, WrapHashably
from torchremat.autodiff.joint import TraceOptions
from torchremat.core.interrupts import hold_interrupts
from torchremat.core.source import warn_user
from torchremat.core.trees import Structure
from torchremat.errors import ArgumentValueError, RetraceWarning
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.policies.foreign import read_contexts
from torchremat.policies.policy import Policy
from torchremat.remat.dynamo import checkpoint_in_compiler, outside_compiler
from torchremat.remat.escapes.read_watch import has_stand_ins
from torchremat.remat.op.autograd_functions import apply_program
from torchremat.remat.op.make_graph import call_in_graph, is_opened, is_traced_whole
from torchremat.remat.program.compilers import Compiler
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.tape.tape import TapeSummary
from torchremat.remat.tape_fallback import TapeFallback
from torchremat.remat.tracing.calls import (
    Call,
    prevent_cse_of,
    read_call,
    wrap_statics,
)
from torchremat.remat.tracing.guards.variables import variables_of
from torchremat.remat.tracing.new_trace import Subject, trace_call
from torchremat.remat.tracing.trace_cache import (
    PolicyKey,
    Trace,
    Traces,
    TracesByFunction,
    current_state,
)
from torchremat.remat.values.residual_log import log_residuals
from torchremat.remat.verify import VerifyingProgram
from torchremat.tracing.ambient_state import stands_in, switches
from torchremat.tracing.axes.named_axes import axis_environment
from torchremat.tracing.dtensors import unwrap_inputs
from torchremat.tracing.dynamic_inputs import DynamicInputs
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.reached_code import note_code
from torchremat.tracing.outer_arguments import call_lifted, pause_replacing
from torchremat.tracing.tracing import has_symbols, trace_lock

_traces = TracesByFunction()
Found = tuple[Trace, FunctionProgram, list[Tensor], Sizes | None]
"""A trace for a call, with its program, tensors and the values of its symbols."""


class Checkpointed(TapeFallback):
    """A function under `checkpoint`. Call it as the function itself."""

    may_check = True
    """Whether a call whose checks fail can run anew, as it is."""

    may_share = False
    """Whether alike functions of other modules may share the traces."""

    counts_calls = False
    """Whether a counter that the function does not read counts calls; else it counts traces."""

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
        traces: Traces | None = None,
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
        self._trace_cache = _traces.of(fun, self._cache_key()) if traces is None else traces
        self.last_call: tuple[FunctionProgram, Sizes | None] | TapeSummary | None = None
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
        if not isinstance(self.last_call, tuple):
            return None
        program, sizes = self.last_call
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
        is_compiling = torch.compiler.is_dynamo_compiling()
        if _torch.is_exporting() or (is_compiling and not self.policy.applies_to_nested):
            return self.fun(*args, **kwargs)  # `jit` leaves it to the compiler around
        if is_compiling:
            if self._uncompiled is not None:
                return self._uncompiled(self, args, kwargs)
            return checkpoint_in_compiler(self.fun, self.policy, *args, **kwargs)
        call = read_call(args, kwargs, self.statics, lenient=self.lenient)
        if not isinstance(call, Call):
            try:
                return self._call_refused(call, args, kwargs)
            finally:
                del call  # its traceback refers to this frame, and to the arguments
        trace = self._trace_cache.recent
        if trace is not None and trace.key == call.key:
            captured, sizes = trace.captured.current(), None
            tensors = [*call.tensors, *(captured or ())]
            program = trace.program_of(self._current_key)
            if (
                captured is not None
                and program is not None
                and (program.is_logged or not config.log_checkpoint_residuals)
                and (not program.is_warned_of or program in self._warned_programs)
                and trace.state[0] is torch.is_grad_enabled()
                and trace.state[1].default_dtype is torch.get_default_dtype()
                and trace.state[1].switches == switches()
                and trace.state[1].caches_casts is torch.is_autocast_cache_enabled()
                and trace.state[1].axes == axis_environment()
                and trace.state[1].stands_in == stands_in()
                and trace.tensor_guard.check(*tensors)
                and (trace.dynamic is None or (sizes := trace.dynamic.sizes(tensors)) is not None)
                and trace.has_offsets_of(tensors)
                and trace.still_holds()
                and trace.value_guards_hold(tensors)
                and (not trace.escapes or trace.has_escapes_of(call, self.fun))
                and (program := program.at(sizes)) is not None
            ):
                return self._run_trace((trace, program, tensors, sizes), call, args, kwargs)
        return self._slow_call(call, args, kwargs)

    def _slow_call(self, call: Call, args: Any, kwargs: Any) -> Any:
        if self.policy.applies_to_nested and is_opened():  # the policy around decides on everything
            return self.fun(*args, **kwargs)
        if is_traced_whole():
            return self._call_in_graph(args, kwargs)
        kind = (call.key, *current_state())
        if self._is_untraceable(kind) or self._stops_tracing(call):
            return self._call_taped(args, kwargs)
        refusal: Exception | None = None
        with hold_interrupts():  # around `except`, which would take an interrupt for a refusal
            try:
                trace, program = self.prepare(call, args, kwargs)
            except Exception as error:
                refusal = error
        if refusal is not None:
            try:
                return self._call_refused(refusal, args, kwargs, kind)
            finally:
                del refusal  # as above
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
        return self._run_trace((trace, program, tensors, sizes), call, args, kwargs)

    def _call_in_graph(self, args: Any, kwargs: Any) -> Any:
        return call_in_graph(
            self.fun,
            args,
            kwargs,
            self.statics,
            policy=self.policy,
            lenient=self.lenient,
            module_prefix=self.module_prefix,
        )

    def _run_trace(self, found: Found, call: Call, args: Any, kwargs: Any) -> Any:
        trace, program, tensors, sizes = found
        if trace.records:
            self.last_call = (program, sizes)
        inputs = list(tensors) if trace.escapes else ()
        if trace.num_checks:
            outputs = trace.run_checked(lambda: self._apply(*found))
            if outputs is None:
                around = self.around
                return around(self.fun, *args, **kwargs) if around else self.fun(*args, **kwargs)
        else:
            outputs = self._apply(*found)
        return trace.deliver(outputs, inputs, call, self.fun, sizes)

    def _apply(
        self, trace: Trace, program: FunctionProgram, tensors: list[Tensor], sizes: Sizes | None
    ) -> tuple[Any, ...]:
        def apply(inputs: Sequence[Tensor]) -> tuple[Any, ...]:
            return apply_program(program, self.fun, inputs, sizes)

        if trace.records is trace.state[0]:
            return call_lifted(apply, tensors)
        with torch.enable_grad():  # as the function itself does inside a `no_grad`
            return call_lifted(apply, tensors)

    def prepare(self, call: Call, args: Any, kwargs: Any) -> tuple[Trace, FunctionProgram]:
        with hold_interrupts(), trace_lock, pause_replacing():
            trace = self.trace_of(call, args, kwargs)
            key = self._current_key
            program = trace.program_of(key)
            sizes = None if trace.dynamic is None else trace.dynamic.sizes(call.tensors)
            if program is None:
                program = self._new_program(trace, key, sizes, args, kwargs)
                program.warn_of_policy()
                trace.programs[key] = program
                log_residuals(program, self.fun, trace, args, kwargs, call)
            else:
                # it has warned for another checkpoint of the same function
                if program.is_warned_of and program not in self._warned_programs:
                    program.warn_of_policy()
                if config.log_checkpoint_residuals and not program.is_logged:
                    log_residuals(program, self.fun, trace, args, kwargs, call)
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
        with hold_interrupts(), trace_lock:
            trace = self._find(call) or self._trace(call, args, kwargs)
            note_code(trace.code.globals_of)
            return trace

    def trace_usual(
        self,
        call: Call,
        specs: tuple[InputSpec, ...] | None = None,
        dynamic: DynamicInputs | None = None,
    ) -> Trace:
        """A trace with cotangents of `usual_outputs`, for `specs` in place of the tensors."""
        self.statics.refuse_tensors(*call.arguments)
        specs = specs or tuple(InputSpec.of(t, any_level=True) for t in call.tensors)
        with trace_lock, _torch.dispatch_restored() if dynamic else nullcontext():
            return self._trace_with(call, *call.arguments, specs, dynamic, only_usual=True)

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

    def _trace(self, call: Call, args: Any, kwargs: Any) -> Trace:
        self.statics.refuse_tensors(args, kwargs)
        specs = tuple(InputSpec.of(t, any_level=True) for t in call.tensors)
        if has_symbols(specs):
            return self._trace_with(call, args, kwargs, specs, None)
        cache = self._trace_cache
        why = self._find_why_retraced(call)
        if why:
            cache.warned = True
            warn_user(why, RetraceWarning)
        trace = None
        dynamic = None
        numbers = cache.varying_numbers(call)
        if self._may_be_dynamic() and not any(spec.sharding for spec in specs):
            dynamic = DynamicInputs.of(specs, cache.varying(call, specs))
        if dynamic is not None:
            with _torch.dispatch_restored():
                try:
                    trace = self._trace_with(call, args, kwargs, specs, dynamic, numbers)
                except Exception as error:  # an operator that knows no symbols, or the user's fault
                    cache.fix(dynamic.places, error)
        trace = trace or self._trace_with(call, args, kwargs, specs, None, numbers)
        if not has_stand_ins():
            cache.note_numbers(numbers, trace)
            cache.add(trace)
        return trace

    def _trace_with(
        self,
        call: Call,
        args: Any,
        kwargs: Any,
        specs: tuple[InputSpec, ...],
        dynamic: DynamicInputs | None,
        numbers: frozenset[int] = frozenset(),
        *,
        only_usual: bool = False,
    ) -> Trace:
        structure = Structure.of(wrap_statics(args, kwargs, self.statics))
        grad_enabled = torch.is_grad_enabled()
        options = functools.partial(
            _trace_options, self.policy, grad_enabled=grad_enabled, only_usual=only_usual
        )
        return trace_call(self._new_subject(), call, structure, specs, dynamic, options, numbers)

    def _new_subject(self) -> Subject:
        return Subject(
            self.fun,
            variables_of(self.fun),
            self.around,
            self.may_check,
            self.module_prefix,
            self._trace_cache.read_spots,
            self.counts_calls,
            self.may_share,
        )


def _trace_options(
    policy: Policy, with_gradients: bool, *, grad_enabled: bool, only_usual: bool
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
