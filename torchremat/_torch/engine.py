"""The engine of autograd: which edges run, saved tensors, dual levels, calls of functions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import DispatchKey
from torch.autograd import forward_ad
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
    """`function.apply` without its Python prologue (3 us a call), for use outside `torch.func`."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc,no-any-return]


below_autograd = torch._C._AutoDispatchBelowADInplaceOrView
"""A context in which autograd records nothing and notes no views; half the price of `no_grad`."""


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
