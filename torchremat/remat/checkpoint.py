"""`checkpoint`: a function that keeps what a policy says and computes the rest again."""

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, overload

import torch
from torch import Tensor, nn

from torchremat import _torch, config
from torchremat.api_util import StaticArguments, WrapHashably
from torchremat.autodiff.bodies import FunctionBody
from torchremat.autodiff.joint import TraceOptions
from torchremat.errors import RetraceWarning, TraceError
from torchremat.graph.modules import ModulePaths
from torchremat.graph.sources import warn_user
from torchremat.graph.tracing import InputSpec
from torchremat.remat.calls import Call, Result, Skeleton, flatten_call
from torchremat.remat.function import apply_program
from torchremat.remat.guards import (
    CapturedTensors,
    ModuleGuard,
    Variable,
    VariableGuard,
    modules_in,
    variables_of,
)
from torchremat.remat.policies import Policy, PolicyLike, as_policy
from torchremat.remat.program import FunctionProgram, Region

log = logging.getLogger("torchremat")


@dataclass(eq=False)
class Trace:
    """One cached trace of a function: for which calls it holds, and its programs by policy."""

    key: tuple[Any, ...]
    specs: tuple[InputSpec, ...]
    surroundings: tuple[Any, ...]
    region: Region
    result: Result
    captured: CapturedTensors
    modules: ModuleGuard
    variables: VariableGuard
    labels: tuple[str, ...]
    tensors: Any = None
    programs: dict[Any, FunctionProgram] = field(default_factory=dict)

    def still_holds(self) -> bool:
        """Whether what the trace took for granted, besides the arguments, is as it was."""
        return self.modules.holds() and self.variables.holds()

    def fits(self, key: tuple[Any, ...], specs: tuple[InputSpec, ...], state: Any) -> bool:
        """Whether the trace is of such a call."""
        if self.key != key or self.specs != specs or self.surroundings != state:
            return False
        if not self.still_holds():
            return False
        captured = self.captured.current()
        recorded = self.region.specs[len(specs) :]
        return all(
            isinstance(t, Tensor) and InputSpec.of(t, any_level=True) == spec
            for t, spec in zip(captured, recorded, strict=True)
        )


def _surroundings() -> tuple[Any, ...]:
    """The state of PyTorch that changes what a function computes."""
    autocast = tuple(
        (device, torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    )
    return (torch.is_grad_enabled(), autocast, torch.get_default_dtype())


class _Traces:
    """The traces of one function, newest first."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.traces: list[Trace] = []
        self.warned = False


class _TracesByFunction:
    """Traces under weak references to functions: dropping a function frees them."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, ...], tuple[weakref.ref[Any], _Traces]] = {}

    def of(self, fun: Callable[..., Any], statics: tuple[Any, ...]) -> _Traces:
        """The traces of `fun`, which may be a bound method."""
        if isinstance(fun, MethodType):
            owner, key = fun.__self__, (id(fun.__self__), id(fun.__func__), statics)
        else:
            owner, key = fun, (id(fun), statics)
        entry = self._entries.get(key)
        if entry is None or entry[0]() is not owner:
            try:
                reference = weakref.ref(owner, lambda _: self._entries.pop(key, None))
            except TypeError:  # some callables cannot be referred to weakly
                return _Traces()
            entry = (reference, _Traces())
            self._entries[key] = entry
        return entry[1]


_traces = _TracesByFunction()


class Checkpointed:
    """A function under `checkpoint`. Call it as the function itself."""

    def __init__(
        self,
        fun: Callable[..., Any],
        policy: Policy,
        prevent_cse: Any,
        statics: StaticArguments,
        *,
        lenient: bool = False,
        module_prefix: str = "",
    ) -> None:
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.policy = policy
        self.prevent_cse = prevent_cse
        self.statics = statics
        self.lenient = lenient
        self.module_prefix = module_prefix
        self._own = _traces.of(fun, (statics.argnums, statics.all_names, lenient, module_prefix))
        self._recent: Trace | None = None
        self.last_program: FunctionProgram | None = None
        """That of the last call that could be differentiated."""

    def __repr__(self) -> str:
        return f"checkpoint({self.fun!r}, policy={self.policy!r})"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = flatten_call(args, kwargs, self.statics, lenient=self.lenient)
        trace = self._recent
        if trace is not None and trace.key == call.key and trace.tensors is not None:
            captured = trace.captured.current()
            tensors = [*call.tensors, *captured]
            if (
                trace.surroundings[0] is torch.is_grad_enabled()
                and trace.tensors.check(*tensors)
                and trace.still_holds()
            ):
                program = trace.programs[self.policy]
                if trace.surroundings[0]:
                    self.last_program = program
                return trace.result.rebuild(apply_program(program, self.fun, tensors))
        return self._slow_call(call, args, kwargs)

    def _slow_call(self, call: Call, args: Any, kwargs: Any) -> Any:
        trace, program = self.prepare(call, args, kwargs)
        tensors = [*call.tensors, *trace.captured.current()]
        if not trace.surroundings[1] and not _torch.functorch_is_active():
            trace.tensors = _torch.TensorGuards(
                *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
            )
            self._recent = trace
        if trace.surroundings[0]:
            self.last_program = program
        return trace.result.rebuild(apply_program(program, self.fun, tensors))

    def prepare(self, call: Call, args: Any, kwargs: Any) -> tuple[Trace, FunctionProgram]:
        """The trace of such a call and its program, made now if there is none."""
        with self._own.lock:
            trace = self._find(call) or self._trace(call, args, kwargs)
            program = trace.programs.get(self.policy)
            if program is None:
                program = FunctionProgram(
                    trace.region, self.policy, module_prefix=self.module_prefix
                )
                program.choices.warn_of_unmatched()
                trace.programs[self.policy] = program
            return trace, program

    def _find(self, call: Call) -> Trace | None:
        specs = tuple(InputSpec.of(t, any_level=True) for t in call.tensors)
        state = _surroundings()
        for trace in self._own.traces:
            if trace.fits(call.key, specs, state):
                return trace
        return None

    def _trace(self, call: Call, args: Any, kwargs: Any) -> Trace:
        self._warn_of_changing_number(call)
        skeleton = Skeleton.of_call(args, kwargs, self.statics)
        variables = self._variables()
        roots = _roots(self.fun, variables, self.module_prefix)
        paths = ModulePaths({id(module): name for name, module in roots})
        results: list[Result] = []
        get_function = _weakly(self.fun)

        def flat(tensors: list[Tensor]) -> list[Any]:
            fun = get_function()
            filled, named = skeleton.filled(tensors)
            result = Result(fun(*filled, **named), lambda: f"{_name_of(fun)}")
            results.append(result)
            return list(result.tensors)

        specs = tuple(InputSpec.of(t, any_level=True) for t in call.tensors)
        body = FunctionBody(lambda: flat, len(specs))
        state = _surroundings()
        options = TraceOptions(with_gradients=state[0], grad_enabled=state[0])
        names = [f"arg{i}" for i in range(len(specs))]
        region = Region.traced(body, specs, names, paths, options)
        assert body.captured is not None
        modules = {id(m): m for _, root in roots for m in root.modules()} | paths.seen
        named_modules = [(paths.name_of(m) or "", m) for m in modules.values()]
        trace = Trace(
            key=tuple(k.frozen() if isinstance(k, WrapHashably) else k for k in call.key),
            specs=specs,
            surroundings=state,
            region=region,
            result=results[0],
            captured=CapturedTensors(body.captured, variables, named_modules),
            modules=ModuleGuard(modules.values()),
            variables=VariableGuard(variables),
            labels=(),
        )
        self._own.traces.insert(0, trace)
        return trace

    def _variables(self) -> list[Variable]:
        return variables_of(self.fun)

    def _warn_of_changing_number(self, call: Call) -> None:
        """Say so when a number among the arguments makes for a new trace each time."""
        alike = [t for t in self._own.traces if _apart_from_numbers(t.key, call.key)]
        if len(alike) >= _MANY_TRACES and not self._own.warned:
            self._own.warned = True
            warn_user(
                f"{_name_of(self.fun)} has been traced {len(alike)} times for different Python "
                "numbers among its arguments. Each new number costs a trace: pass a tensor "
                "instead (torch.tensor(value)), if the function only computes with it.",
                RetraceWarning,
            )


_MANY_TRACES = 8


def _apart_from_numbers(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(
        x == y or (type(x) is tuple and type(y) is tuple and x[0] is y[0] in (int, float))
        for x, y in zip(a, b, strict=True)
    )


def _name_of(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__qualname__", None) or type(fun).__name__


def _weakly(fun: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """A way to get at `fun` that does not keep it alive."""
    try:
        reference = weakref.WeakMethod(fun) if isinstance(fun, MethodType) else weakref.ref(fun)
    except TypeError:
        return lambda: fun

    def get() -> Callable[..., Any]:
        found = reference()
        assert found is not None, "the function of a checkpoint is gone"
        return found

    return get


def _roots(fun: Any, variables: Any, prefix: str) -> list[tuple[str, nn.Module]]:
    """The modules that `fun` starts from, by name: itself or its object, then its variables."""
    owner = getattr(fun, "__self__", fun)
    own = [(prefix, owner)] if isinstance(owner, nn.Module) else []
    return own + list(modules_in(variables))


def checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    policy: PolicyLike | None = None,
    prevent_cse: Any = True,
    static_argnums: int | tuple[int, ...] = (),
    static_argnames: str | Sequence[str] = (),
    concrete: bool = False,
) -> Any:
    if concrete:
        raise NotImplementedError("x")
    if fun is None:
        return functools.partial(checkpoint, policy=policy, prevent_cse=prevent_cse,
            static_argnums=static_argnums, static_argnames=static_argnames)
    return Checkpointed(fun, as_policy(policy), prevent_cse, StaticArguments(fun, static_argnums, static_argnames))
