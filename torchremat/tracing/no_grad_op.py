"""`no_grad_p`: in a graph, the border of what ran under `torch.no_grad`.

Operators of ATen do not know what grad mode they ran in. In a graph whose meaning includes its
derivatives, a value that was computed without is marked where it leaves:

    with torch.no_grad():           y = sin(x)
        y = x.sin()                 z = no_grad_p(y)
    return x * y                    return mul(x, z)

As in PyTorch it stops the backward pass and lets tangents through, which become constants to a
backward pass too. `detach`, which stops both, is an operator of ATen already.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.errors import EffectError
from torchremat.graph.inplace import is_mutable
from torchremat.graph.nodes import base_of, is_inexact, is_item
from torchremat.graph.notes import notes_of

aten = torch.ops.aten


class NoGradOp(_torch.HigherOrderOperator):
    """`no_grad_p(x)`: x, a constant to the backward pass. It leaves no trace in what runs."""

    is_identity = True

    def __init__(self) -> None:
        super().__init__("no_grad_p")  # type: ignore[no-untyped-call]

    def __call__(self, x: Tensor, /) -> Tensor:
        if _torch.innermost_proxy_mode() is not None:
            return super().__call__(x)  # type: ignore[no-any-return,no-untyped-call]
        with torch.no_grad():
            return x.view_as(x)


class _NoGrad(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return no_grad_p(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, _: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return no_grad_p(x), in_dims[0]


def _push_forward(x: Tensor) -> Tensor:
    def rule(primals: Any, tangents: Any) -> Any:
        (primal,), (tangent,) = primals, tangents
        return [no_grad_p(primal)], [None if tangent is None else no_grad_p(tangent)]

    return _torch.push_forward_at_current_level(rule, [x])[0]  # type: ignore[no-any-return]


no_grad_p = NoGradOp()
_torch.register_simple_rules(no_grad_p, lambda x: x.detach())
_torch.register_derivative_rules(no_grad_p, _NoGrad.apply, _push_forward)


def mark_no_grad(graph: fx.Graph) -> None:
    """Put `no_grad_p` where a value that was computed without grad mode is used with it."""
    may_have_gradient = _dependent_on(graph.find_nodes(op="placeholder"), graph)
    for node in list(graph.nodes):
        if _ran_with_grad(node) or node not in may_have_gradient or not is_inexact(node):
            continue
        users = [user for user in node.users if _ran_with_grad(user) and not is_item(user)]
        if not users:
            continue
        with graph.inserting_after(node):
            mark = graph.call_function(no_grad_p, (node,))
        mark.meta = dict(node.meta)
        for user in users:
            user.replace_input_with(node, mark)


def refuse_no_grad_writes(graph: fx.Graph, arguments: Sequence[fx.Node]) -> None:
    """Raise where the function writes, without grad mode, to a value that may have a gradient.

    That is one that is computed from `arguments`, and an input that requires one.
    """
    starts = {*arguments, *filter(_requires_grad, graph.find_nodes(op="placeholder"))}
    dependent = _dependent_on(starts, graph)
    for node in graph.nodes:
        if node.op != "call_function" or _ran_with_grad(node) or not is_mutable(node):
            continue
        base = base_of(_first_argument(node))
        may_have_gradient = _requires_grad(base) if base.op == "placeholder" else base in dependent
        if may_have_gradient and _ran_with_grad(base) and is_inexact(base):
            raise EffectError(
                f"{node.target} writes in place, under no_grad, at {notes_of(node).source}, to a "
                "value that may have a gradient: a graph cannot change a value and keep its "
                "gradient. Compute a new value, or write to a buffer without gradient."
            )


def _ran_with_grad(node: fx.Node) -> bool:
    return notes_of(node).grad_enabled is not False


def _dependent_on(starts: Iterable[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    found = set(starts)
    for node in graph.nodes:
        if any(used in found for used in node.all_input_nodes):
            found.add(node)
    return found


def _first_argument(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def _requires_grad(node: fx.Node) -> bool:
    return bool(getattr(node.meta.get("tensor_meta"), "requires_grad", False))
