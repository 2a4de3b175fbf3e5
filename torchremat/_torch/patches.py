"""Assignments to attributes of PyTorch; no other file makes any."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._functorch import autograd_function, eager_transforms
from torch._functorch import vmap as functorch_vmap
from torch._ops import OpOverload
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import _MakefxTracer

from .engine import in_dual_level


def let_functions_know_axes(known: Callable[[type], type]) -> None:
    """Let `torch.vmap` map `known(function)` in place of each `autograd.Function` without a rule.

    Its forward runs on a level of its own then, and so does its backward, later on.
    """
    plain = autograd_function.vmapify_autograd_function

    def vmapify(function: type, *args: Any) -> type:
        return plain(known(function), *args)

    autograd_function.vmapify_autograd_function = vmapify  # type: ignore[assignment]


@contextmanager
def dual_level_as_functorch_level() -> Iterator[None]:
    """Let `torch.func.jvp` run inside a `dual_level`, of which there can be only one."""
    inside = in_dual_level() and eager_transforms.JVP_NESTING == 0
    eager_transforms.JVP_NESTING += inside
    try:
        yield
    finally:
        eager_transforms.JVP_NESTING -= inside


class _Called:
    """What `torch.utils.checkpoint` applies, as a plain call."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)


def _nothing_around(*args: Any, **kwargs: Any) -> Iterator[None]:
    """What `torch.utils.checkpoint` does around its function: it is called between the steps."""
    yield


@contextmanager
def _checkpoints_of_pytorch_called() -> Iterator[None]:
    """`torch.utils.checkpoint` calls its function: what is kept is decided of the whole graph.

    What it would compute again in the backward pass would draw other random numbers in a trace.
    """
    module = torch.utils.checkpoint
    names = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")
    before = [getattr(module, name) for name in names]
    for name, value in zip(names, (_nothing_around, _Called), strict=True):
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(module, name, value)


@contextmanager
def _compiled_functions_uncompiled() -> Iterator[None]:
    """What `torch.compile` made runs as the function that it was made of: Dynamo has a flag for it.

    It takes the flag back where it captures the bodies of `torch.cond` and its kin.
    """
    import torch._dynamo

    symbolic_trace = torch.fx._symbolic_trace
    before = symbolic_trace._is_fx_tracing_flag, symbolic_trace.is_fx_tracing
    symbolic_trace._is_fx_tracing_flag = True
    symbolic_trace.is_fx_tracing = lambda: False  # what others ask, who would refuse to run
    try:
        with torch._dynamo.config.patch(error_on_nested_fx_trace=False), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Using `torch.compile\\(module\\)` when there are global"
            )
            yield
    finally:
        symbolic_trace._is_fx_tracing_flag, symbolic_trace.is_fx_tracing = before


@contextmanager
def _hidden_from_dynamo(session: _MakefxTracer) -> Iterator[None]:
    """Keep Dynamo, which captures the bodies of `scan` and its kin, from tracing for `session`.

    It would use the fake tensors of two modes together (seen in PyTorch 2.13 also with `make_fx`).
    """
    from torch._dynamo.callback import callback_handler

    def hide(*_: Any) -> None:
        proxy_tensor._CURRENT_MAKE_FX_TRACER = None

    def show(*_: Any) -> None:
        proxy_tensor._CURRENT_MAKE_FX_TRACER = session

    callback_handler.register_start_callback(hide)
    callback_handler.register_end_callback(show)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(hide)
        callback_handler.remove_end_callback(show)


@cache
def let_modes_see_views_of_zeros() -> torch.library.Library:
    """Let `view` of an efficient zero tensor, of which forward mode makes many, reach fake tensors.

    Up to 2.13, PyTorch registers the kernel of dense tensors for it (other views fall through),
    which takes the fake tensor apart, so that `vmap` of `jvp` of `vmap` of `jvp` cannot be traced.
    For zeros that are not fake nothing changes: falling through leads to the same kernel.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl("view", torch.library.fallthrough_kernel, "ZeroTensor")
    return library


_apply_lock = threading.Lock()
FunctionHandler = Callable[[type, tuple[Any, ...], Callable[..., Any]], Any]
"""What is done instead of `cls.apply(*args)`, given the class, arguments and PyTorch's `apply`."""

_apply_handlers: dict[int, list[FunctionHandler]] = {}


@contextmanager
def function_calls_handled(handler: FunctionHandler) -> Iterator[None]:
    """Let `handler` do every `autograd.Function.apply` of this thread while in the block.

    `apply` goes round `__torch_function__`, so that a captured tensor handed to it would be missed
    by a `TorchFunctionMode`. It is looked up on `_SingleLevelFunction` at each call, where one
    attribute catches also those who hold a bound `apply`.
    """
    thread = threading.get_ident()

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        plain = super(_SingleLevelFunction, cls).apply  # type: ignore[misc]
        handlers = _apply_handlers.get(threading.get_ident())
        return handlers[-1](cls, args, plain) if handlers else plain(*args, **kwargs)

    with _apply_lock:
        _apply_handlers.setdefault(thread, []).append(handler)
        _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with _apply_lock:
            _apply_handlers[thread].pop()
            if not _apply_handlers[thread]:
                del _apply_handlers[thread]
            if not _apply_handlers:
                del _SingleLevelFunction.apply  # type: ignore[attr-defined]


_lifts: dict[int, list[Callable[[torch.Tensor], torch.Tensor]]] = {}
_WRAPPERS = (
    (eager_transforms, "_wrap_for_grad", vars(eager_transforms)["_wrap_for_grad"]),
    (functorch_vmap, "_add_batch_dim", vars(functorch_vmap)["_add_batch_dim"]),
)


def _lifting(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    def wrap(tensor: torch.Tensor, *rest: Any) -> Any:
        lifts = _lifts.get(threading.get_ident())
        return wrapper(lifts[-1](tensor) if lifts else tensor, *rest)

    return wrap


@contextmanager
def levels_wrap_lifted(lift: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let levels of `torch.func` that are entered in the block, in this thread, wrap `lift(x)`.

    They wrap out of sight of a `TorchFunctionMode`, so that a captured tensor, handed to `grad` as
    an argument, would be met with its wrapper as another tensor.
    """
    thread = threading.get_ident()
    with _apply_lock:
        _lifts.setdefault(thread, []).append(lift)
        for module, name, wrapper in _WRAPPERS:
            setattr(module, name, _lifting(wrapper))
    try:
        yield
    finally:
        with _apply_lock:
            _lifts[thread].pop()
            if not _lifts[thread]:
                del _lifts[thread]
            if not _lifts:
                for module, name, wrapper in _WRAPPERS:
                    setattr(module, name, wrapper)


GLOBAL_MODULE_HOOKS = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)
"""Hooks that run on every module, by handle."""


@contextmanager
def module_trackers_set_aside() -> Iterator[None]:
    """A block in which PyTorch's own `ModuleTracker`s see no module run.

    `CommDebugMode` has one, which loses count of modules that run on traced tensors.
    """
    kept = [dict(hooks) for hooks in GLOBAL_MODULE_HOOKS]
    for hooks in GLOBAL_MODULE_HOOKS:
        for key, hook in list(hooks.items()):
            if type(getattr(hook, "__self__", None)).__module__ in _MODULES_OF_TRACKERS:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in zip(GLOBAL_MODULE_HOOKS, kept, strict=True):
            added = {key: hook for key, hook in hooks.items() if key not in before}
            hooks.clear()
            hooks.update(before | added)


_MODULES_OF_TRACKERS = (
    "torch.utils.module_tracker",
    "torch.distributed._tools.mod_tracker",
    "torch.distributed.tensor.debug._comm_mode",
)


def replace_batching_rule(op: OpOverload, kernel: Callable[..., Any]) -> torch.library.Library:
    """Have `kernel` called where `op` is mapped by `vmap`, until `restore_batching_rule`.

    It is called with wrapped tensors, at the innermost level, which is a `vmap`.
    """
    library = torch.library.Library(op.namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(op, kernel, "FuncTorchBatched", allow_override=True)
    return library


def restore_batching_rule(library: torch.library.Library) -> None:
    """Undo `replace_batching_rule`."""
    library._destroy()
