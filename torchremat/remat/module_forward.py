"""The forward that a wrapped module has: its own, under `checkpoint`.

It is an attribute of the module's own `__dict__`, which hides that of its class. So hooks of the
module run outside the checkpoint, those of its submodules inside.
"""

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from torchremat import _torch
from torchremat.api_util import StaticArguments, WrapHashably
from torchremat.core.trees import Structure
from torchremat.policies.policy import Policy
from torchremat.remat.checkpointed import Checkpointed
from torchremat.remat.dynamo import checkpoint_in_compiler, outside_compiler
from torchremat.remat.program.compilers import compiler_named
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.sharing.adoption import KnownTraces, adopt
from torchremat.remat.tape.tape import TapeSummary
from torchremat.remat.tracing.calls import Call, flatten_call, is_in_plain_step, wrap_statics
from torchremat.remat.tracing.guards.variables import variables_of
from torchremat.remat.tracing.new_trace import Subject
from torchremat.remat.tracing.trace_cache import Trace, Traces
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.tracing import has_symbols


def _is_never_differentiated() -> bool:
    """Whether gradients are off, and no transformation or trace is around."""
    return not (
        torch.is_grad_enabled()
        or _torch.functorch_is_active()
        or _torch.in_dual_level()
        or _torch.innermost_proxy_mode() is not None
    )


class RematForward:
    """The `forward` of a wrapped module: its own forward under `checkpoint`.

    It refers to its module weakly, and nothing that it holds refers to the module, so that dropping
    a wrapped module frees it at once. To `inspect.signature` and other readers of `__wrapped__`,
    `__self__` and `__func__` it looks like the bound method that it hides.

    Attributes:
        name: qualified name of the module in what was given to `wrap`.
        policy: what may be saved.
        prevent_cse: as `checkpoint` takes it.
        compile: the backend that compiles the graphs, if any.
        hidden: the `forward` that the module itself, not its class, had before, if any.
        adapt: makes another function of the forward, to run in its place, if any. Both take the
            module first.
    """

    __slots__ = (
        "__weakref__", "_function", "_kept", "_key", "_module", "_of_class", "_own_run",
        "_uncompiled", "adapt", "compile", "hidden", "name", "policy", "prevent_cse",
    )  # fmt: skip

    name: str
    policy: Policy
    prevent_cse: Any
    compile: str | None
    hidden: tuple[()] | tuple[Any]
    adapt: Callable[[Callable[..., Any]], Callable[..., Any]] | None
    _key: int
    _module: weakref.ref[nn.Module]
    _function: Callable[..., Any]
    _of_class: Any
    """The forward that the class had when `_function` was made."""
    _kept: list[Callable[..., Any]]
    """The hidden forward, once the traces are dropped; before, it would keep the module alive."""
    _own_run: "_CheckpointedForward | None"
    """In place of an entry in `_running`, where a hidden forward is: traces of that may hold the
    module, and are garbage with it."""
    _uncompiled: Callable[..., Any] | None

    def __init__(
        self,
        module: nn.Module,
        name: str,
        policy: Policy,
        prevent_cse: Any,
        compile: str | None = None,
        adapt: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        before = remat_forward_of(module)
        if before is not None:
            before.forget()
            hidden = before.hidden
        else:
            hidden = (vars(module)["forward"],) if "forward" in vars(module) else ()
        self.__setstate__(
            {
                "module": module,
                "name": name,
                "policy": policy,
                "prevent_cse": prevent_cse,
                "compile": compile,
                "hidden": hidden,
                "adapt": adapt,
            }
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self._module():  # a method may have been made of it
            args = args[1:]
        module = self.__self__
        if type(module).forward is not self._of_class:
            _follow_class(self)
        function = functools.partial(self._function, module)
        if _torch.is_exporting():
            return function(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            if self._uncompiled is not None:
                return self._uncompiled(self, args, kwargs)
            return checkpoint_in_compiler(function, self.policy, *args, **kwargs)
        if self.compile is None and _is_never_differentiated():
            return function(*args, **kwargs)  # with PyTorch's fast paths, which give other bits
        return self._find_checkpointed()(*args, **kwargs)

    def _find_checkpointed(self) -> "_CheckpointedForward":
        run = _run_of(self)
        if run is None:
            self._kept.clear()
            run = _CheckpointedForward(self, self._key)
            if self.hidden:
                self._own_run = run
            else:
                run = _running.setdefault(self._key, run)
        return run

    def trace_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace such a call, and let the policy decide on it, without running it."""
        self._find_checkpointed().trace_call(args, kwargs)

    def __repr__(self) -> str:
        return f"<forward of {self.name or 'a module'} under checkpoint, policy={self.policy!r}>"

    @property
    def __self__(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError(
                f"{self!r}: the module is gone. Keep the module and call it; its forward alone "
                "does not keep it"
            )
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        if self.hidden:
            return self.hidden[0]  # type: ignore[no-any-return]
        module = self.__self__
        function = inspect.getattr_static(type(module), "forward")
        bind = getattr(type(function), "__get__", None)
        bound: Callable[..., Any] = bind(function, module, type(module)) if bind else function
        return bound

    @property
    def __func__(self) -> Any:  # what wraps the method of a model, for autocast say, takes it
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not self._module():  # a copy, of a forward that wraps this one
                return type(module).forward(module, *args, **kwargs)
            return self(*args, **kwargs)

        original = self._original
        functools.update_wrapper(run, original)
        run.__wrapped__ = self  # type: ignore[attr-defined]
        if isinstance(original, FunctionType):
            run.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        return run

    @property
    def _original(self) -> Any:
        return getattr(self.__wrapped__, "__func__", self.__wrapped__)

    @property
    def __code__(self) -> Any:  # torch.export reads it
        return self._original.__code__

    @property
    def __name__(self) -> str:
        return getattr(self.__wrapped__, "__name__", "forward")

    @property
    def last_program(self) -> FunctionProgram | TapeSummary | None:
        """The program of the last call with gradients, or the tape that it wrote."""
        run = _run_of(self)
        if run is not None and isinstance(run.last_call, TapeSummary):
            return run.last_call
        return None if run is None else run.last_program

    @property
    def traces(self) -> Traces | None:
        """The traces of the module, once it has been called."""
        run = _run_of(self)
        return None if run is None else run.known_traces

    def install(self) -> None:
        # past the class of the module, whose `__setattr__` may do more
        object.__setattr__(self.__self__, "forward", self)
        if _is_own(vars(self.__self__).get("extra_repr", self.extra_repr)):
            object.__setattr__(self.__self__, "extra_repr", self.extra_repr)

    def take_off(self) -> None:
        """Leave the module as it was before `install`, and keep the traces."""
        object.__delattr__(self.__self__, "forward")
        if _is_own(vars(self.__self__).get("extra_repr")):
            object.__delattr__(self.__self__, "extra_repr")
        if self.hidden:
            object.__setattr__(self.__self__, "forward", self.hidden[0])

    def uninstall(self) -> None:
        self.forget()
        self.take_off()

    def extra_repr(self) -> str:
        """The line of the module in `print(model)`: that of its class, and the policy."""
        module = self.__self__
        own = type(module).extra_repr(module)
        return f"{own}{', ' * bool(own)}checkpoint={str(self.policy)!r}"

    def forget(self) -> None:
        """Drop all traces; a backward pass that is still to come keeps what it needs."""
        run, self._own_run = self._own_run or _running.pop(self._key, None), None
        if run is not None and self.hidden and self._module() is not None:
            self._kept.append(self.__wrapped__)

    # pickling, and with it copying: as a bound method is, together with its object

    def __getstate__(self) -> dict[str, Any]:
        names = ("name", "policy", "prevent_cse", "compile", "hidden", "adapt")
        return {"module": self.__self__, **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self._key = next(_keys)
        self._module = weakref.ref(state.pop("module"))
        for name, value in state.items():
            setattr(self, name, value)
        self._kept, self._own_run = [], None
        _follow_class(self)
        self._uncompiled = outside_compiler() if self.policy.is_whole_graph else None


def _run_of(forward: RematForward) -> "_CheckpointedForward | None":
    return forward._own_run or _running.get(forward._key)


def _is_own(method: Any) -> bool:
    return isinstance(getattr(method, "__self__", None), RematForward)


def remat_forward_of(module: nn.Module) -> RematForward | None:
    forward = vars(module).get("forward")
    return forward if isinstance(forward, RematForward) else None


class _CheckpointedForward(Checkpointed):
    """The checkpoint of a module's forward, which does not keep the module alive."""

    def __init__(self, forward: RematForward, key: int) -> None:
        module, running = forward.__self__, _running

        def forget(_: weakref.ref[nn.Module]) -> None:
            running.pop(key, None)

        self._forward = weakref.ref(forward)
        self._module = weakref.ref(module, forget)
        self._function = forward._function
        fun = self.fun
        statics = StaticArguments(fun, (), ())
        super().__init__(
            fun,
            forward.policy,
            forward.prevent_cse,
            statics,
            lenient=True,
            module_prefix=forward.name,
            compiler=compiler_named(forward.compile),
            traces=Traces() if forward.hidden else None,
        )
        vars(self).pop("__wrapped__", None)

    counts_calls = True

    @property
    def may_share(self) -> bool:  # type: ignore[override]
        """Whether the forward is that of the class, so that other modules have it too."""
        forward = self._forward()
        return forward is not None and not forward.hidden and is_in_plain_step()

    def _trace(self, call: Call, args: Any, kwargs: Any) -> Trace:
        trace = self._adopt(call, args, kwargs) or super()._trace(call, args, kwargs)
        module = self._module()
        if self.may_share and module is not None:
            _known_traces.add(self._function, module, self._kind, trace)
        return trace

    def _adopt(self, call: Call, args: Any, kwargs: Any) -> Trace | None:
        """The trace of an alike module, for this one."""
        module = self._module()
        if not self.may_share or module is None:
            return None
        specs = tuple(InputSpec.of(t, any_level=True) for t in call.tensors)
        if has_symbols(specs):
            return None
        candidates = _known_traces.like(self._function, self._kind)
        if not self._may_be_dynamic():
            candidates = ((m, t) for m, t in candidates if t.dynamic is None)

        def structure() -> Structure:
            return Structure.of(wrap_statics(args, kwargs, self.statics))

        trace = adopt(self._new_subject(), module, candidates, call, structure, specs)
        if trace is not None:
            self._trace_cache.add(trace, is_new=False)
        return trace

    @property
    def _kind(self) -> tuple[Any, ...]:
        """The class and the options that traces depend on, without the name of the module."""
        options = self.policy.is_whole_graph, self.policy.honours_others
        return (type(self._module()), self.compiler, WrapHashably(self.prevent_cse), *options)

    @property
    def fun(self) -> Callable[..., Any]:
        """The original forward, bound to the module. Whoever keeps it keeps the module."""
        return MethodType(self._function, self._module())

    @fun.setter
    def fun(self, value: Callable[..., Any]) -> None:
        """Made anew each time."""

    @property
    def known_traces(self) -> Traces:
        return self._trace_cache

    def trace_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace such a call, and let the policy decide on it, without running it."""
        call = flatten_call(args, kwargs, self.statics, lenient=self.lenient)
        self.prepare(call, args, kwargs)

    def _new_subject(self) -> Subject:
        subject, forward = super()._new_subject(), self._forward()
        if forward is None:
            return subject
        return replace(subject, variables=variables_of(forward.__wrapped__))


def _follow_class(forward: RematForward) -> None:
    """Let `forward` run what the class of its module has now. Guards keep the traces apart."""
    module = forward.__self__
    forward._of_class = type(module).forward
    function = _function_of(module, forward)
    forward._function = function if forward.adapt is None else forward.adapt(function)
    run = _run_of(forward)
    if run is not None:
        run._function = forward._function


def _function_of(module: nn.Module, forward: RematForward) -> Callable[..., Any]:
    """A function of a module and arguments that is its forward, and does not hold the module."""
    if not forward.hidden:
        function = inspect.getattr_static(type(module), "forward")
        if isinstance(function, FunctionType):
            return function
    reference, kept = weakref.ref(forward), forward._kept

    def call_original(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kept:
            return kept[-1](*args, **kwargs)
        forward = reference()
        assert forward is not None, "the module was unwrapped while autograd needed its forward"
        return forward.__wrapped__(*args, **kwargs)

    call_original.__qualname__ = f"{type(module).__qualname__}.forward"
    return call_original


_known_traces = KnownTraces()

_keys: Iterator[int] = itertools.count()
_running: dict[int, _CheckpointedForward] = {}
"""The checkpoint of each `RematForward` that has been called, while its module lives.

Not in the `RematForward`: traces hold the attributes of the module, `forward` among them, and a
reference back to the traces would be a cycle.
"""
