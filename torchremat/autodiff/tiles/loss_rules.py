"""Rules of cross-entropy: a tile adds up its losses, which are divided by the weights of all rows.

The sum of the weights needs the targets alone. So it is computed before, and the derivative of a
tile can follow its losses at once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchremat.autodiff.rewrites.loss_gradient_op import loss_gradient
from torchremat.autodiff.tiles.cuts import (
    SUM,
    WHOLE,
    Assignment,
    Cut,
    Cuts,
    Rows,
    broadcast_cut,
    find_rows,
    have_equal,
    product,
    shape_of,
)
from torchremat.autodiff.tiles.tile_rule import TileRule, ToBody, fit_operand
from torchremat.autodiff.tiles.tile_rules import RULES
from torchremat.graph.nodes import is_item
from torchremat.graph.notes import notes_of, set_notes
from torchremat.graph.symbolic_sizes import literal_size

aten = torch.ops.aten

_NONE, _MEAN, _SUM = range(3)
"""The ways to reduce, as ATen numbers them."""


def _find_loss_rows(
    known: Cuts, scored: Sequence[fx.Node], targeted: Sequence[fx.Node]
) -> dict[fx.Node, Rows] | None:
    """The rows of values with a score for each class, in their second dim, and of those without.

    Each target is a row. Or the first dim alone is, of images say, with a target for each pixel.
    """
    num_dims = {x: len(shape_of(x)) for x in (*scored, *targeted)}
    if any(num_dims[x] < 2 for x in scored):  # one target for all
        return None
    flat = {x: Rows((0, *range(2, num_dims[x]))) for x in scored}
    flat |= {x: Rows(tuple(range(num_dims[x]))) for x in targeted}
    for found in flat, dict.fromkeys(flat, Rows.at(0)):
        if any(known.get(x) == rows for x, rows in found.items()):
            return found
    return None


class LossOfRows(TileRule):
    """`nll_loss_forward` and `nll_loss2d_forward`."""

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        scores, target, weight, reduction, _ = node.args
        assert isinstance(scores, fx.Node) and isinstance(target, fx.Node)
        rows = _find_loss_rows(known, [scores], [target])
        if rows is None:
            return None
        pairs: list[tuple[fx.Node, Cut]] = [*rows.items()]
        if isinstance(weight, fx.Node):
            pairs.append((weight, WHOLE))
        for item in node.users:
            is_loss = is_item(item) and item.args[1] == 0
            if not is_loss:  # the sum of the weights is read after all
                return None
            pairs.append((item, rows[target] if reduction == _NONE else SUM))
        return pairs

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        scores, target, weight, reduction, ignore_index = node.args
        way = _SUM if reduction == _MEAN else reduction
        op = aten.nll_loss_forward.default if _is_flat(scores, cuts) else node.target
        return op, (*to_body((scores, target, weight)), way, ignore_index), {}

    def finish(self, node: fx.Node, total: fx.Node) -> tuple[Any, Any] | None:
        if node.args[3] != _MEAN:
            return None
        return aten.div.Tensor, (total, _insert_weight_sum(node, total))


def _is_flat(scores: Any, cuts: Cuts) -> bool:
    """Whether a tile of scores has no dims but that of rows and that of classes."""
    rows = cuts[scores]
    return isinstance(rows, Rows) and len(rows.dims) == len(shape_of(scores)) - 1


class LossGradient(TileRule):
    """The derivatives of these, and the operator that also goes through `_log_softmax`."""

    def __init__(self, linear_in: Sequence[int]) -> None:
        self.linear_in = tuple(linear_in)

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        given: tuple[Any, ...] = node.args
        slope, scores, target, weight, reduction, _, weight_sum, *others = given
        *tensors, dim = others or (1,)
        if dim % len(shape_of(node)) != 1:
            return None
        scored = [x for x in (node, scores, *tensors) if isinstance(x, fx.Node)]
        targeted = [target, slope] if reduction == _NONE else [target]
        rows = _find_loss_rows(known, scored, targeted)
        if rows is None:
            return None
        whole = [weight, weight_sum] if reduction == _NONE else [weight, weight_sum, slope]
        return [*rows.items(), *((x, WHOLE) for x in whole if isinstance(x, fx.Node))]

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        is_2d = node.target is aten.nll_loss2d_backward.default and _is_flat(node.args[1], cuts)
        op = aten.nll_loss_backward.default if is_2d else node.target
        if node.target is not loss_gradient:
            return op, to_body(node.args), {}
        *given, _ = node.args
        return op, (*to_body(tuple(given)), 1), {}  # the dim of classes, also where it was -1

    def _is_linear_in_all(self, node: fx.Node, late: Sequence[fx.Node]) -> bool:
        given = [node.args[i] for i in self.linear_in]
        return all(a in late for a in given if isinstance(a, fx.Node))


class LossOfElements(TileRule):
    """`mse_loss` and `binary_cross_entropy_with_logits`, whose reduction is their last argument."""

    def __init__(self, num_tensors: int) -> None:
        self._num_tensors = num_tensors

    def _find_arguments(self, node: fx.Node) -> tuple[Any, ...]:
        """The arguments, with those that a call may leave out."""
        defaults = (*[None] * self._num_tensors, _MEAN)
        return (*node.args, *defaults[len(node.args) :])

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        *tensors, reduction = self._find_arguments(node)
        scores, *others = tensors
        assert isinstance(scores, fx.Node)
        rows = known.get(scores)
        if not isinstance(rows, Rows):
            return None
        pairs: list[tuple[fx.Node, Cut]] = [(scores, rows)]
        pairs.append((node, rows if reduction == _NONE else SUM))
        for operand in (x for x in others if isinstance(x, fx.Node)):
            cut = broadcast_cut(shape_of(operand), shape_of(scores), rows)
            if cut is None:
                return None
            pairs.append((operand, cut))
        return pairs

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        *tensors, reduction = self._find_arguments(node)
        scores = tensors[0]
        rows = cuts[scores]
        assert isinstance(rows, Rows)
        fitted = fx.node.map_arg(tensors, lambda x: fit_operand(to_body, x, cuts, scores, rows))
        return node.target, (*fitted, _SUM if reduction == _MEAN else reduction), {}

    def finish(self, node: fx.Node, total: fx.Node) -> tuple[Any, Any] | None:
        if self._find_arguments(node)[-1] != _MEAN:
            return None
        return aten.div.Scalar, (total, literal_size(product(shape_of(node.args[0]))))


class SlopeOfSquares(TileRule):
    """`mse_loss_backward`, which divides by the number of elements that it is given."""

    linear_in = (0,)

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        slope, *operands, reduction = node.args
        found = find_rows(known, [node, *(x for x in operands if isinstance(x, fx.Node))])
        same = [x for x in (node, *operands) if isinstance(x, fx.Node)]
        if found is None or not all(have_equal(shape_of(x), shape_of(node)) for x in same):
            return None
        assert isinstance(slope, fx.Node)
        rest = found[1] if reduction == _NONE else WHOLE
        return [*((x, found[1]) for x in same), (slope, rest)]

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        slope, *operands, reduction = node.args
        given = to_body(slope)
        if reduction == _MEAN:
            count = literal_size(product(shape_of(node)))
            given = to_body.insert(aten.div.Scalar, (given, count), given.meta["val"])
            reduction = _SUM
        return node.target, (given, *to_body(tuple(operands)), reduction), {}


RULES[aten.mse_loss.default] = LossOfElements(2)
RULES[aten.mse_loss_backward.default] = SlopeOfSquares()
RULES[aten.binary_cross_entropy_with_logits.default] = LossOfElements(4)
_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
RULES.update(dict.fromkeys(_LOSSES, LossOfRows()))
_GRADIENTS = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
RULES.update(dict.fromkeys(_GRADIENTS, LossGradient((0,))))
RULES[loss_gradient] = LossGradient((0, 7))


def compute_weight_sums(graph: fx.Graph) -> None:
    """Let the sum of the weights of a loss be computed of its targets, without the scores."""
    for node in [n for op in _LOSSES for n in graph.find_nodes(op="call_function", target=op)]:
        for item in list(node.users):
            if is_item(item) and item.args[1] == 1:
                item.replace_all_uses_with(_insert_weight_sum(node, node))
                graph.erase_node(item)


def _insert_weight_sum(loss: fx.Node, before: fx.Node) -> fx.Node:
    _, target, weight, _, ignore_index = loss.args
    assert isinstance(target, fx.Node)
    graph = loss.graph
    dtype = loss.meta["val"][1].dtype
    known = None if weight is not None else _find_count(target, ignore_index, dtype)
    if known is not None:
        return known

    def call(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(op, args, kwargs)
        values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        made.meta["val"] = op(*values[0], **values[1])
        set_notes(made, notes_of(loss))
        return made

    with graph.inserting_before(before):
        counted = call(aten.ne.Scalar, target, ignore_index)
        if weight is None:
            return call(aten._to_copy.default, call(aten.sum.default, counted), dtype=dtype)
        zeros = call(aten.zeros_like.default, target)
        rows = call(aten.index.Tensor, weight, [call(aten.where.self, counted, target, zeros)])
        kept = call(aten.mul.Tensor, rows, call(aten._to_copy.default, counted, dtype=dtype))
        return call(aten.sum.default, kept)


def _find_count(target: fx.Node, ignore_index: Any, dtype: torch.dtype) -> fx.Node | None:
    """The number of rows that are not ignored, if it has been inserted before."""
    counted = [n for n in target.users if n.target is aten.ne.Scalar and n.args[1] == ignore_index]
    sums = [n for c in counted for n in c.users if n.target is aten.sum.default]
    casts = [n for s in sums for n in s.users if n.target is aten._to_copy.default]
    return next((n for n in casts if n.meta["val"].dtype is dtype), None)
