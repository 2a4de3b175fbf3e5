"""The rule of repeated values: what repeats entries of a smaller tensor is never written out.

    g = expand(ct, [8, 512])       the gradient of a mean      g = div(ct, 4096)
    s = div(g, 4096)               8 x 512 entries         ->  s = expand(g, [8, 512])     a view
    dx = mul(s, x)                                             dx = mul(s, x)

    p = pow(x, 1.0)                of a square             ->  dx = mul(s, x)
    dx = mul(s, p)

The bits are those of PyTorch, since only operators that round each entry exactly are concerned: the
result does not depend on where an entry lies, nor on the entries beside it. IEEE 754 asks this of
sums, products and quotients. `pow` copies its argument where the exponent is 1.

Readers of the view are such operators, too. A sum or a matrix product could add in another order.
"""

from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.rewrites.added_calls import add_call, run_on_fakes
from torchremat.graph.nodes import is_forward, is_view

aten = torch.ops.aten

LEAST_NBYTES = 1 << 20
"""Of smaller values the memory is not worth the rule."""

_BY_NUMBER = frozenset({
    aten.neg.default, aten.div.Scalar, aten.mul.Scalar, aten.div.Tensor, aten.mul.Tensor,
    aten._to_copy.default,
})  # fmt: skip
"""Operators of one tensor, and perhaps a number, that round each entry exactly."""

_READERS = _BY_NUMBER | {aten.where.self}
"""Operators that may read a view in which entries are repeated."""

_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
"""They multiply by `alpha` besides, which is exact if it is 1."""


def repeat_by_views(graph: fx.Graph) -> None:
    """Let the backward pass of `graph` read views in place of repeated and of copied values."""
    (output,) = graph.find_nodes(op="output")
    with _torch.isolate():  # a trace in progress would record what runs on fake tensors
        for node in list(graph.nodes):
            if node.op != "call_function" or is_forward(node) or output in node.users:
                continue
            if not _is_worth_it(node.meta.get("val")):
                continue
            if node.target is aten.pow.Tensor_Scalar and node.args[1] == 1:
                _read_argument(node)
            elif _is_of_repeated(node) and all(map(_may_read, node.users)):
                _expand_late(node)


def _is_worth_it(value: Any) -> bool:
    if not _torch.is_fake(value):
        return False
    return bool(_torch.hint_of(value.numel()) * value.element_size() >= LEAST_NBYTES)


def _read_argument(node: fx.Node) -> None:
    """Let readers of the copy `node` read the original, unless a view of it may be returned."""
    source: Any = node.args[0]
    is_alike = _layout_of(source.meta["val"]) == _layout_of(node.meta["val"])
    if is_alike and not any(map(is_view, node.users)):
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)


def _layout_of(value: Tensor) -> tuple[Any, ...]:
    # as text: to compare symbols would settle them
    return value.dtype, str(value.shape), str(value.stride())


def _is_of_repeated(node: fx.Node) -> bool:
    """Whether `node` computes, of each entry, the same for all its repetitions."""
    if node.target not in _BY_NUMBER or not node.users:
        return False
    source, *others = node.args
    if not isinstance(source, fx.Node) or any(isinstance(a, fx.Node) for a in others):
        return False
    return source.target is aten.expand.default


def _may_read(reader: fx.Node) -> bool:
    if reader.op != "call_function" or is_view(reader):
        return False
    if reader.target in _SUMS:
        return bool(reader.kwargs.get("alpha", 1) == 1)
    return reader.target in _READERS


def _expand_late(node: fx.Node) -> None:
    """Let `node` compute of what is expanded, and a view of its result be expanded."""
    source: Any = node.args[0]
    original, *sizes = source.args
    graph = node.graph
    with graph.inserting_before(node):
        small = add_call(node, node.target, (original, *node.args[1:]), node.kwargs)
        repeated = add_call(node, aten.expand.default, (small, *sizes))
    layouts = [_layout_of(reader.meta["val"]) for reader in node.users]
    if layouts == [_layout_of(_run_with(reader, node, repeated)) for reader in node.users]:
        node.replace_all_uses_with(repeated)
        graph.erase_node(node)
    else:
        graph.erase_node(repeated)
        graph.erase_node(small)


def _run_with(reader: fx.Node, node: fx.Node, other: fx.Node) -> Any:
    """The fake result of `reader` if it reads `other` in the place of `node`."""
    args = fx.node.map_arg(reader.args, lambda n: other if n is node else n)
    return run_on_fakes(reader.target, args, reader.kwargs)
