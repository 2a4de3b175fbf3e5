"""Replacements that stand in PyTorch while a patch is entered; `patches.py` says where and why.

A maker takes the plain attribute, and a function that returns what *this* thread has entered of the
patch, innermost last. Where that is nothing, the replacement does what the plain attribute does.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._guards import CompileContext
from torch.fx.experimental.proxy_tensor import _MakefxTracer

Values = Callable[[], list[Any]]
"""Returns what this thread has entered of a patch, innermost last."""

Maker = Callable[[Any, Values], Any]
"""Makes a replacement of the plain attribute."""

GLOBAL_MODULE_HOOKS = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)
"""Hooks that run on every module, by handle."""


def lift_first(plain: Callable[..., Any], lifts: Values) -> Any:
    def wrap(tensor: torch.Tensor, *rest: Any) -> Any:
        entered = lifts()
        return plain(entered[-1](tensor) if entered else tensor, *rest)

    wrap._torchdynamo_inline = plain  # type: ignore[attr-defined]  # Dynamo traces this instead
    return wrap


_OWN_OPTIONS = (
    "use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop",
    "respect_saved_tensors_hooks",
)  # fmt: skip


def check_unless_standing_in(plain: Callable[..., None], stands_in: Values) -> Any:
    def check(*tensors: torch.Tensor) -> None:
        if not stands_in():
            plain(*tensors)

    return check


def autocast_on_cpu(plain: Callable[..., None], stands_in: Values) -> Any:
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if stands_in() and device_type == "cuda":
            dtype, device_type = dtype or torch.get_autocast_dtype("cuda"), "cpu"
        plain(self, device_type, dtype, *args, **kwargs)

    return init


def handle_checkpoint(plain: Any, handlers: Values) -> Any:
    if plain is None:  # as PyTorch makes it at the first call
        checkpoint: Any = torch.utils.checkpoint.checkpoint
        plain = torch.compiler.disable(checkpoint.__wrapped__)

    def run(*args: Any, **kwargs: Any) -> Any:
        entered = handlers()
        if not entered or not args:  # without a function it is a decorator, in PyTorch 2.15
            return plain(*args, **kwargs)
        context_fn = kwargs.pop("context_fn", None)
        named = {name: value for name, value in kwargs.items() if name not in _OWN_OPTIONS}
        return entered[-1](args[0], args[1:], named, context_fn)

    return run


HAS_CONTEXT_FOR_COMPILED = not hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag")
"""Whether Dynamo has a context in which what it compiled runs as the function it was made of.

PyTorch 2.14 has it, and has made of the flag a value of each thread.
"""


def run_compiled_functions_eagerly() -> AbstractContextManager[Any]:
    import torch._dynamo

    dynamo: Any = torch._dynamo
    context: AbstractContextManager[Any]
    if HAS_CONTEXT_FOR_COMPILED:
        context = dynamo.eval_frame._use_eager_on_nested_compile()
    else:
        context = dynamo.config.patch(error_on_nested_fx_trace=False)
    return context


class TracingFlag:
    """A flag that is true in threads that trace, and only where Dynamo reads it.

    Others who read it, through `is_fx_tracing`, would refuse to run.
    """

    def __init__(self, plain: Any, traces: Values) -> None:
        self.plain = plain
        self.traces = traces

    def __bool__(self) -> bool:
        entered = self.traces()
        if not entered:
            return bool(self.plain)
        read_by = sys._getframe(1).f_code
        return entered[-1] and read_by is torch.fx._symbolic_trace.is_fx_symbolic_tracing.__code__


def share_flag(plain: type, traces: Values) -> Any:
    """Make a module class that keeps writes to the flag in the thread that writes.

    `_set_compilation_env` of torch/_higher_order_ops/utils.py writes `False` while Dynamo captures
    the bodies of `torch.cond` and its kin, and then writes what it had read.
    """
    name = "_is_fx_tracing_flag"

    def read(module: ModuleType) -> Any:
        entered, flag = traces(), vars(module)[name]
        if entered:
            return entered[-1]
        return flag.plain if isinstance(flag, TracingFlag) else flag

    def write(module: ModuleType, value: Any) -> None:
        entered, flag = traces(), vars(module)[name]
        if entered:
            entered[-1] = value
        elif isinstance(flag, TracingFlag):
            flag.plain = value
        else:
            vars(module)[name] = value

    return type(plain.__name__, (plain,), {name: property(read, write)})


def ignore_own_hooks(plain: Callable[[], Any], traces: Values) -> Any:
    """Make a function that tells whether modules have global hooks which are not the library's."""

    def has_any_global_hook() -> bool:
        hooks = [hook for place in GLOBAL_MODULE_HOOKS for hook in list(place.values())]
        others = [hook for hook in hooks if not is_own_hook(hook)]
        return not traces() and bool(others or (plain() and not hooks))

    return has_any_global_hook


def is_own_hook(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torchremat.")


def ignore_module(*_: Any) -> None:
    """Do nothing: what Dynamo traces in place of a hook of the library."""


def skip_if(aside: Values, hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None if aside() else hook(*args, **kwargs)


def wrap_trackers(aside: Values) -> Callable[[], None]:
    """Let the hooks of PyTorch's trackers do nothing where this thread has set them aside."""
    wrapped = []
    for place in GLOBAL_MODULE_HOOKS:
        for key, hook in list(place.items()):
            if type(getattr(hook, "__self__", None)).__module__ in _MODULES_OF_TRACKERS:
                wrapped.append((place, key, hook))
                place[key] = skip_if(aside, hook)

    def undo() -> None:
        for place, key, hook in wrapped:
            if key in place:  # the tracker may have removed it
                place[key] = hook

    return undo


_MODULES_OF_TRACKERS = (
    "torch.utils.module_tracker",
    "torch.distributed._tools.mod_tracker",
    "torch.distributed.tensor.debug._comm_mode",
)


class AttributeReader:
    """Reads an attribute of a module. It is not a function, which Dynamo would refuse."""

    def __init__(self, plain: Callable[[Any, str], Any], notes: Values) -> None:
        self._plain = plain
        self._notes = notes

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else partial(self, instance)

    def __call__(self, module: Any, name: str) -> Any:
        for note in self._notes():
            note(module, name)
        return self._plain(module, name)


Session = tuple[_MakefxTracer, CompileContext | None]
"""A tracer, and what Dynamo compiled in its thread when it began."""


def begin_session(tracer: _MakefxTracer) -> Session:
    """Pair `tracer` with what Dynamo compiles in this thread now, if anything."""
    return tracer, CompileContext.try_get()


def read_own_tracer(plain: type, sessions: Values) -> Any:
    """Make a module class whose tracer is that of this thread, but `None` while Dynamo compiles.

    Dynamo, which captures the bodies of `scan` and its kin, would trace for the session. It would
    use the fake tensors of two modes together (seen in PyTorch 2.13 also with `make_fx`).
    """
    name = "_CURRENT_MAKE_FX_TRACER"

    def read(module: ModuleType) -> Any:
        entered = sessions()
        if not entered:
            return vars(module)[name]
        tracer, compilation = entered[-1]
        return tracer if CompileContext.try_get() is compilation else None

    def write(module: ModuleType, value: Any) -> None:
        vars(module)[name] = value

    return type(plain.__name__, (plain,), {name: property(read, write)})


class NoTensor:
    """A class without instances, in the place of `FakeTensor`."""


_FILES_OF_TORCH = str(Path(torch.__file__).parent)


def hide_class_of_fakes(plain: type, traces: Values) -> Any:
    """Make a module class in which only PyTorch finds `FakeTensor`, while this thread traces.

    What the thread has entered is a list for the files that ask, or `None` where all find it.
    """
    name = "FakeTensor"

    def read(module: ModuleType) -> Any:
        entered = traces()
        file = sys._getframe(1).f_code.co_filename
        if not entered or entered[-1] is None or file.startswith(_FILES_OF_TORCH):
            return vars(module)[name]
        entered[-1].append(file)
        return NoTensor

    def write(module: ModuleType, value: Any) -> None:
        vars(module)[name] = value

    return type(plain.__name__, (plain,), {name: property(read, write)})


def set_own_tracer(plain: Callable[..., Any], sessions: Values) -> Any:
    @contextmanager
    def set_tracer(tracer: _MakefxTracer) -> Iterator[None]:
        entered = sessions()
        if not entered:
            with plain(tracer):
                yield
            return
        entered.append(begin_session(tracer))
        try:
            yield
        finally:
            entered.pop()

    return set_tracer


def map_known(plain: Callable[..., type], knowers: Values) -> Any:
    """Make a function that maps what each of `knowers` returns for an `autograd.Function`."""

    def vmapify(function: type, *args: Any) -> type:
        for know in knowers():
            function = know(function)
        return plain(function, *args)

    return vmapify


class Nesting:
    """How many levels of `jvp` are active, as `torch._functorch.eager_transforms` counts them.

    A thread in a block counts one more, so that its first level enters no dual level.
    """

    def __init__(self, plain: int, blocks: Values) -> None:
        self.plain = plain
        self.blocks = blocks

    def __add__(self, number: int) -> "Nesting":
        return Nesting(self.plain + number, self.blocks)

    def __sub__(self, number: int) -> "Nesting":
        return self + -number

    def __eq__(self, other: object) -> bool:
        return self.plain + len(self.blocks()) == other

    __hash__ = None  # type: ignore[assignment]


def read_length(plain: Callable[[Any], int], blocks: Values) -> Any:
    def length(value: Any, /) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and blocks():
            size = value.shape[0]
            if isinstance(size, torch.SymInt):
                return size
        return plain(value)

    return length
