"""Rules of operators: how rows go through them, and what they are in a tile.

A rule infers how all tensors of a call lie in tiles from what is known of some. So a region grows
from a value to those that read it, and to those that it is computed from. An operator without a
rule ends a region: it reads the whole of a value.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
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
    merge_dims,
    product,
    result_rows,
    shape_of,
)
from torchremat.autodiff.tiles.shape_rules import (
    AlongDim,
    Expand,
    Padding,
    Permutation,
    Reshape,
    order_of_permute,
    order_of_transpose,
)
from torchremat.autodiff.tiles.tile_rule import TileRule, ToBody, fit_operand
from torchremat.graph.symbolic_sizes import literal_size

aten = torch.ops.aten


class Elementwise(TileRule):
    """An elementwise operator: its rows are those of its operands, which may be broadcast."""

    def __init__(self, linear_in: Sequence[int] = (), *, any_of: bool = False) -> None:
        self.linear_in = tuple(linear_in)
        self.any_of = any_of

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        shape = shape_of(node)
        found = find_rows(known, [node, *node.all_input_nodes])
        if found is None:
            return None
        source, rows = found
        own = rows if source is node else result_rows(shape_of(source), shape, rows)
        if own is None:
            return None
        pairs: list[tuple[fx.Node, Cut]] = [(node, own)]
        for operand in node.all_input_nodes:
            cut = broadcast_cut(shape_of(operand), shape, own)
            if cut is None:
                return None
            pairs.append((operand, cut))
        return pairs

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        rows = cuts[node]
        assert isinstance(rows, Rows)
        args = fx.node.map_arg(node.args, lambda x: fit_operand(to_body, x, cuts, node, rows))
        return node.target, args, to_body(node.kwargs)


class Sum(Elementwise):
    """An elementwise operator that is linear where all of its terms depend on a cotangent."""

    def _is_linear_in_all(self, node: fx.Node, late: Sequence[fx.Node]) -> bool:
        terms = [node.args[i] for i in self.linear_in]
        return all(isinstance(t, fx.Node) and t in late for t in terms)


class Select(Elementwise):
    """`where` and `masked_fill`, linear where what is chosen otherwise is zero."""

    def _is_linear_in_all(self, node: fx.Node, late: Sequence[fx.Node]) -> bool:
        if node.target is aten.masked_fill.Scalar:
            return _is_zero(node.args[2])
        return all(a in late or _is_zero(a) for a in node.args[1:3])


def _is_zero(value: Any) -> bool:
    if not isinstance(value, fx.Node):
        return bool(value == 0)
    fills = (aten.full.default, aten.scalar_tensor.default)
    if value.target in fills:
        return bool(value.args[-1] == 0)
    return value.target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


class MatrixProduct(TileRule):
    """`mm` and `bmm`, whose batch may be rows too."""

    linear_in = (0, 1)
    any_of = True

    def __init__(self, num_batch_dims: int) -> None:
        n = num_batch_dims
        self._forms = [
            *[(Rows.at(d), Rows.at(d), Rows.at(d)) for d in range(n)],
            (Rows.at(n), Rows.at(n), WHOLE),
            (Rows.at(n + 1), WHOLE, Rows.at(n + 1)),
            (SUM, Rows.at(n + 1), Rows.at(n)),
        ]

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        a, b = node.args
        operands = (node, a, b)
        for form in self._forms:
            fits = [known[x] == cut for x, cut in zip(operands, form, strict=True) if x in known]  # type: ignore[index]
            if fits and all(fits):
                return list(zip(operands, form, strict=True))  # type: ignore[arg-type]
        return None


class AddedProduct(TileRule):
    """`addmm`, a linear layer with a bias."""

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        bias, a, b = node.args
        assert isinstance(bias, fx.Node) and isinstance(a, fx.Node) and isinstance(b, fx.Node)
        first, second = Rows.at(0), Rows.at(1)
        for rows, cut_a, cut_b in ((first, first, WHOLE), (second, WHOLE, second)):
            wanted = [(node, rows), (a, cut_a), (b, cut_b)]
            fits = [known[x] == cut for x, cut in wanted if x in known]
            cut = broadcast_cut(shape_of(bias), shape_of(node), rows)
            if fits and all(fits) and cut is not None:
                return [*wanted, (bias, cut)]
        return None


class ByRow(TileRule):
    """An operator along a dim that is not a row: a softmax, or its derivative."""

    def __init__(self, dim_position: int, linear_in: Sequence[int] = ()) -> None:
        self._dim_position = dim_position
        self.linear_in = tuple(linear_in)

    def _dim(self, node: fx.Node) -> int:
        dim = node.args[self._dim_position]
        assert isinstance(dim, int)
        return dim % len(shape_of(node))

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        operands = [node, *node.all_input_nodes]
        found = find_rows(known, operands)
        alike = all(have_equal(shape_of(x), shape_of(node)) for x in operands)
        if found is None or not alike or self._dim(node) in found[1].dims:
            return None
        return [(operand, found[1]) for operand in operands]

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        rows = cuts[node]
        assert isinstance(rows, Rows)
        args = list(to_body(node.args))
        (args[self._dim_position],) = merge_dims([self._dim(node)], len(shape_of(node)), rows)
        return node.target, tuple(args), to_body(node.kwargs)


class Reduction(TileRule):
    """A reduction over dims that are no rows; one that adds may be over all of the rows too."""

    def __init__(self, *, adds: bool = False, is_linear: bool = False) -> None:
        self._adds = adds
        self.linear_in = (0,) if is_linear else ()

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        source = node.args[0]
        rows = known.get(source)  # type: ignore[arg-type]
        if not isinstance(source, fx.Node) or not isinstance(rows, Rows):
            return None
        dims = _find_reduced_dims(node, len(shape_of(source)))
        inside = [d for d in dims if d in rows.dims]
        if inside:
            is_sum = self._adds and len(inside) == len(rows.dims)
            loses_dims = _keeps_dims(node) and len(rows.dims) > 1  # a tile has one dim for them
            return [(node, SUM), (source, rows)] if is_sum and not loses_dims else None
        gone = [] if _keeps_dims(node) else dims
        own = Rows(tuple(d - sum(other < d for other in gone) for d in rows.dims))
        return [(node, own), (source, rows)]

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        rows, num_dims = cuts[source], len(shape_of(source))
        assert isinstance(rows, Rows)
        args = list(to_body(node.args))
        if len(args) > 1 and isinstance(args[1], list | tuple):
            dims = _find_reduced_dims(node, num_dims)
            outside = [d for d in dims if d not in rows.dims]
            merged = merge_dims(outside, num_dims, rows)
            args[1] = merged if len(outside) == len(dims) else [*merged, rows.start]
        return node.target, tuple(args), to_body(node.kwargs)


class Mean(Reduction):
    """The mean of all elements: tiles add up, and the sum is divided at the end."""

    def __init__(self) -> None:
        super().__init__(adds=True, is_linear=True)

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        return aten.sum.default, to_body(node.args), to_body(node.kwargs)

    def finish(self, node: fx.Node, total: fx.Node) -> tuple[Any, Any] | None:
        count = product(shape_of(node.args[0]))
        return aten.div.Scalar, (total, literal_size(count))


def _find_reduced_dims(node: fx.Node, num_dims: int) -> list[int]:
    given = node.args[1] if len(node.args) > 1 else None
    dims = [given] if isinstance(given, int) else given
    if not isinstance(dims, list | tuple) or not dims:
        return list(range(num_dims))
    return [int(d) % num_dims for d in dims]


def _keeps_dims(node: fx.Node) -> bool:
    return bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim"))


class Gather(TileRule):
    """`gather` along a dim that is not a row, with an index of as many rows."""

    linear_in = (0,)

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        source, dim, index = node.args[:3]
        assert isinstance(source, fx.Node) and isinstance(index, fx.Node) and isinstance(dim, int)
        found = find_rows(known, [node, source, index])
        if found is None or dim % len(shape_of(source)) in found[1].dims:
            return None
        rows = found[1]
        if not have_equal(*(rows.sizes_in(shape_of(x)) for x in (source, index))):
            return None
        return [(node, rows), (source, rows), (index, rows)]

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        source, dim, index = node.args[:3]
        rows = cuts[node]
        assert isinstance(rows, Rows) and isinstance(dim, int)
        (own,) = merge_dims([dim], len(shape_of(node)), rows)
        return node.target, (to_body(source), own, to_body(index)), {}


class ScatterAdd(TileRule):
    """`scatter_add` to zeros along a dim that is not a row, as the derivative of `gather`."""

    linear_in = (0, 3)

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        zeros, dim, index, source = node.args
        assert isinstance(index, fx.Node) and isinstance(source, fx.Node) and isinstance(dim, int)
        found = find_rows(known, [node, index, source])
        own = dim % len(shape_of(node))
        if found is None or not _is_zero(zeros) or own in found[1].dims:
            return None
        rows = found[1]
        sizes = [rows.sizes_in(shape_of(x)) for x in (node, index, source)]
        alike = have_equal(sizes[0], sizes[1]) and have_equal(sizes[0], sizes[2])
        return [(node, rows), (index, rows), (source, rows)] if alike else None

    def _is_linear_in_all(self, node: fx.Node, late: Sequence[fx.Node]) -> bool:
        return _is_zero(node.args[0])

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        _, dim, index, source = node.args
        rows, shape = cuts[node], shape_of(node)
        assert isinstance(rows, Rows) and isinstance(dim, int)
        (own,) = merge_dims([dim], len(shape), rows)
        tile = to_body(source)
        column: Tensor = tile.meta["val"].narrow(own, 0, 1)
        first = to_body.insert(aten.slice.Tensor, (tile, own, 0, 1), column)
        zeros = to_body.insert(aten.zeros_like.default, (first,), column.new_empty(column.shape))
        sizes = [-1] * column.dim()
        sizes[own] = shape[dim]
        whole = to_body.insert(aten.expand.default, (zeros, sizes), zeros.meta["val"].expand(sizes))
        return node.target, (whole, own, to_body(index), tile), {}


_LINEAR: Mapping[Any, Elementwise] = {
    **dict.fromkeys(
        (aten.neg.default, aten.clone.default, aten._to_copy.default, aten.div.Tensor,
         aten.div.Scalar, aten.mul.Scalar, aten.alias.default, aten.detach.default),
        Elementwise((0,)),
    ),
    aten.mul.Tensor: Elementwise((0, 1), any_of=True),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), Sum((0, 1))),
    aten.where.self: Select((1, 2)),
    aten.masked_fill.Scalar: Select((0,)),
    # the derivatives of activations, of which some have no tag
    **dict.fromkeys(
        (aten.gelu_backward.default, aten.silu_backward.default, aten.tanh_backward.default,
         aten.threshold_backward.default, aten.sigmoid_backward.default,
         aten.leaky_relu_backward.default, aten.elu_backward.default,
         aten.hardtanh_backward.default, aten.softplus_backward.default),
        Elementwise((0,)),
    ),
}  # fmt: skip

RULES: dict[Any, TileRule] = {
    **_LINEAR,
    aten.mm.default: MatrixProduct(0),
    aten.bmm.default: MatrixProduct(1),
    aten.addmm.default: AddedProduct(),
    aten.t.default: Permutation(order_of_transpose),
    aten.transpose.int: Permutation(order_of_transpose),
    aten.permute.default: Permutation(order_of_permute),
    **dict.fromkeys(
        (aten.view.default, aten._unsafe_view.default, aten.reshape.default,
         aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default),
        Reshape(),
    ),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), ByRow(1)),
    **dict.fromkeys(
        (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default),
        ByRow(2, (0,)),
    ),
    **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default), Reduction(adds=True, is_linear=True)),
    **dict.fromkeys(
        (aten.amax.default, aten.amin.default, aten.logsumexp.default, aten.any.dim), Reduction()
    ),
    aten.mean.dim: Reduction(is_linear=True),
    aten.mean.default: Mean(),
    aten.gather.default: Gather(),
    aten.scatter_add.default: ScatterAdd(),
    aten.expand.default: Expand(),
    **dict.fromkeys((aten.slice.Tensor, aten.cat.default), AlongDim(1, 0)),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), AlongDim(2, 0)),
    aten.slice_backward.default: Padding(),
}  # fmt: skip

_POINTWISE = Elementwise()


def rule_of(node: fx.Node) -> TileRule | None:
    """The rule of the operator of `node`; `None` if it has none, draws or writes."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, _torch.OpOverload):
        return None
    if target in RULES:
        return RULES[target]
    tags = target.tags
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags:
        return None
    if _torch.schema_of(target).is_mutable or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    return _POINTWISE
