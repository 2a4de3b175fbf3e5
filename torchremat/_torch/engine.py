"""The engine of autograd: which edges run, saved tensors, dual levels, calls of functions."""

import dis
import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import DispatchKey
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import _engine_run_backward


def edges_that_run(edges: Sequence[tuple[Any, int]]) -> tuple[bool, ...]:
    """For each edge of the node whose backward runs, whether anybody waits for a gradient there.

    `ctx.needs_input_grad` says what requires a gradient, not what `torch.autograd.grad` computes.
    """
    return tuple(node is not None and _will_run(node) for node, _ in edges)


def run_backward(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    *,
    create_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad`, in which function modes stay on for what Python runs in the backward.

    The public function sets the innermost mode aside, so that a recomputation of
    `torch.utils.checkpoint` would run without it.
    """
    return _engine_run_backward(
        outputs, cotangents, create_graph, create_graph, inputs, True, accumulate_grad=False
    )


keeps_graph_after_backward: Callable[[], bool] = (
    torch._C._autograd._get_current_graph_task_keep_graph
)
"""Whether what the running backward pass reads may be read again (`retain_graph`)."""


backward_pass_id: Callable[[], int] = torch._C._current_graph_task_id
"""A number of the backward pass that runs, -1 outside of any."""


next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of the node that this thread's autograd makes next; the engine runs them downwards."""


def node_number_of(node: Any) -> int:
    """The number that `node` of autograd's graph was made with; a huge one for those of leaves."""
    return int(node._sequence_nr())


def cotangents_of(node: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shape and dtype of each cotangent that `node` takes; none for one that is undefined."""
    return [(tuple(taken.shape), taken.dtype) for taken in node._input_metadata]


def call_after_backward(function: Callable[[], Any]) -> None:
    """Call `function` when the backward pass that runs is over."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:  # for a leaf among the inputs of torch.autograd.grad
        if "leaf node" not in str(error):
            raise
        return True


@contextmanager
def set_saved_tensors_hooks_aside() -> Iterator[None]:
    """Without the `saved_tensors_hooks` of the surroundings, which expect real tensors.

    Hooks may be set in the block, also inside of `torch.func.grad`, which does not support them.
    """
    aside = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        aside.append(torch.autograd.graph.saved_tensors_hooks(*hooks))
        aside[-1].__exit__()
    disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    torch._C._autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        if disabled is not None:
            torch._C._autograd._saved_tensors_hooks_disable(disabled)
        for hooks in reversed(aside):
            hooks.__enter__()


def has_saved_tensors_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_function_of_user(cls: type) -> bool:
    """Whether `cls` is an `autograd.Function` with rules that no operator of a graph knows.

    Not those of PyTorch's own higher-order operators and custom operators, which are nodes with
    derivatives, nor those that `torch.func` makes for each of its levels.
    """
    internal = cls.__module__.startswith(("torchremat.", "torch._"))
    holds_rule = getattr(cls, "holds_rule_of_user", False)
    return issubclass(cls, torch.autograd.Function) and (holds_rule or not internal)


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` that is never traced, nor passed on to levels of `torch.func`.

    It is that of a twin of the class, which has all its members, and is no `autograd.Function` of
    a user. Up to PyTorch 2.13 it saves a Python prologue of 3 us a call, too.
    """
    return super(_SingleLevelFunction, _twin_of(function)).apply  # type: ignore[no-any-return]


def node_class_of(function: type[torch.autograd.Function]) -> type:
    """The class of the nodes that `direct_apply(function)` puts into autograd's graph."""
    return _twin_of(function)._backward_cls  # type: ignore[no-any-return]


def wrap_tensor_hooks(
    node_class: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Have hooks that are put on tensors made by nodes of `node_class` be `wrap(hook)`."""

    class WrappedHooks(OrderedDict[int, Callable[..., Any]]):
        def __setitem__(self, number: int, hook: Callable[..., Any]) -> None:
            super().__setitem__(number, wrap(hook))

    register = node_class._register_hook_dict

    def register_wrapped(node: Any, tensor: torch.Tensor) -> None:
        tensor._backward_hooks = WrappedHooks()  # for the empty dict of `Tensor.register_hook`
        register(node, tensor)

    node_class._register_hook_dict = register_wrapped


@cache
def _twin_of(function: type[torch.autograd.Function]) -> Any:
    bases = function.__mro__[: function.__mro__.index(torch.autograd.Function)]
    members = {name: value for base in reversed(bases) for name, value in vars(base).items()}
    for name in ("_backward_cls", "__dict__", "__weakref__"):
        members.pop(name, None)
    make: Any = type(function)
    return make(function.__name__, (_SingleLevelFunction,), members)


below_autograd = torch._C._AutoDispatchBelowADInplaceOrView
"""A context in which autograd records nothing and notes no views; half the price of `no_grad`."""


# A function that has the attribute takes its cotangents in a list, out of which it may free each
# after its last reader. Before PyTorch had it, they were alive until the function returned.
FREES_COTANGENTS = hasattr(torch.autograd.Function, "boxed_grads_call")


def is_below_autograd() -> bool:
    key = DispatchKey.AutogradFunctionality  # what those of all devices have in common
    excluded: bool = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    return excluded


def in_dual_level() -> bool:
    return forward_ad._current_level >= 0


def forward_hooks_of(module: torch.nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks that run after and before the forward of `module`, by handle."""
    return module._forward_hooks, module._forward_pre_hooks


def backward_hooks_of(module: torch.nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks that run after and before the backward of `module`, by handle."""
    return module._backward_hooks, module._backward_pre_hooks


def attributes_of(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """The dicts in which `module` has its attributes, buffers and parameters, to write to."""
    return module.__dict__, module._buffers, module._parameters


# --- calls of functions --------------------------------------------------------------------------

FunctionHandler = Callable[[type, tuple[Any, ...], Callable[..., Any]], Any]
"""Is called in place of `cls.apply(*args)`, with the class, arguments and PyTorch's `apply`."""

_Handlers = Callable[[], list[FunctionHandler]]

APPLIES_IN_C = not isinstance(vars(torch.autograd.Function)["apply"], classmethod)
"""Whether `apply` is a function in C, which nothing can replace for those who hold a bound one."""


def handle_apply(_: Any, handlers: _Handlers) -> Any:
    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        plain = _bind_plain_apply(cls, kwargs)
        entered = handlers()
        return entered[-1](cls, args, plain) if entered else plain(*args)

    return classmethod(apply)


def _bind_plain_apply(cls: type, kwargs: dict[str, Any]) -> Callable[..., Any]:
    apply = super(_SingleLevelFunction, cls).apply  # type: ignore[misc]
    return lambda *args: apply(*args, **kwargs)


class _ApplyInC(threading.local):
    """How far this thread is with an `apply` in C.

    `apply` reads `cls.setup_context` first. Unless it is that of `_SingleLevelFunction`, it calls
    `_bind_default_args`. Then, if levels of `torch.func` are active, it returns what
    `_call_custom_function_call` does: a call is diverted there by a level that only seems active.
    """

    is_plain = False
    """Whether the next call is to go on as PyTorch has it."""
    undefined: type | None = None
    """The class whose missing `setup_context` was read last."""
    diverted: bool | None = None
    """Whether levels were active where a call was diverted, until it arrives."""


_apply_in_c = _ApplyInC()
_LEVELS_ARE_ACTIVE = DispatchKey.FuncTorchDynamicLayerFrontMode


def appear_defined(plain: Callable[..., Any], handlers: _Handlers) -> Any:
    """Make a `setup_context` that C code takes for another one than `plain`."""

    class SetupContext:
        def __call__(self, *args: Any) -> Any:
            return plain(*args)

        def __eq__(self, other: object) -> bool:  # Python code takes it for `plain`
            return other is plain or other is self

        def __hash__(self) -> int:
            return hash(plain)

    class Attribute:
        def __get__(self, _: Any, cls: type) -> Any:
            if not handlers() or not issubclass(cls, torch.autograd.Function):
                return plain
            if _reads_attribute(sys._getframe(1)):
                return plain
            if _apply_in_c.is_plain:
                _apply_in_c.is_plain = False
                return plain
            _apply_in_c.undefined = cls
            return seemingly_defined

    seemingly_defined = SetupContext()
    return Attribute()


def _reads_attribute(frame: FrameType) -> bool:
    """Whether Python code reads an attribute now, and has not called a function in C that does."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("LOAD_")


def bind_and_divert(plain: Callable[..., Any], handlers: _Handlers) -> Any:
    def bind(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        undefined, _apply_in_c.undefined = _apply_in_c.undefined, None
        if not handlers() or _apply_in_c.is_plain:
            _apply_in_c.is_plain = False
            return plain(forward, args, kwargs)
        if undefined is None or undefined.forward is not forward:  # type: ignore[attr-defined]
            bound = plain(forward, args, kwargs)
        else:
            bound = _bind_after_ctx(forward, args, kwargs or {})
        _apply_in_c.diverted = torch._C._dispatch_tls_is_dispatch_key_included(_LEVELS_ARE_ACTIVE)
        torch._C._dispatch_tls_set_dispatch_key_included(_LEVELS_ARE_ACTIVE, True)
        return bound

    return bind


def _bind_after_ctx(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not kwargs:
        return args, kwargs
    try:
        bound = inspect.signature(forward).bind(None, *args, **kwargs)
    except (TypeError, ValueError):
        return args, kwargs  # PyTorch's own message tells
    return bound.args[1:], bound.kwargs


def receive_diverted(plain: Callable[..., Any], handlers: _Handlers) -> Any:
    def call(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        has_levels, _apply_in_c.diverted = _apply_in_c.diverted, None
        if has_levels is None:
            return plain(cls, args, kwargs)
        torch._C._dispatch_tls_set_dispatch_key_included(_LEVELS_ARE_ACTIVE, has_levels)
        apply = _bind_plain_apply(cls, kwargs or {})

        def go_on(*args: Any) -> Any:
            _apply_in_c.is_plain = True
            try:
                return apply(*args)
            finally:
                _apply_in_c.is_plain = False

        # below the levels `cls` is called once more, and then as itself
        return handlers()[-1](_SingleLevelFunction if has_levels else cls, args, go_on)

    return call


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """The `step` that the class of `optimizer` defines, without the hooks around it."""
    step = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)
