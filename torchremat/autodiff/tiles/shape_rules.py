"""Rules of operators that move elements: to other dims, in parts, or beside others."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from torchremat.autodiff.tiles.cuts import (
    Assignment,
    Cuts,
    Rows,
    find_rows,
    is_equal,
    merge_dims,
    merge_rows,
    product,
    shape_of,
)
from torchremat.autodiff.tiles.tile_rule import TileRule, ToBody

aten = torch.ops.aten


class Permutation(TileRule):
    """`t`, `transpose` and `permute`: rows move with their dims, if these stay in their order."""

    linear_in = (0,)

    def __init__(self, order: Callable[[fx.Node, int], Sequence[int]]) -> None:
        self._order = order

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        order = self._order(node, len(shape_of(source)))
        if isinstance(rows := known.get(source), Rows):
            own = _rising(order.index(d) for d in rows.dims)
            return None if own is None else [(node, own), (source, rows)]
        if isinstance(rows := known.get(node), Rows):
            cut = _rising(order[d] for d in rows.dims)
            return None if cut is None else [(node, rows), (source, cut)]
        return None

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        source = node.args[0]
        rows = cuts[source]  # type: ignore[index]
        num_dims = len(shape_of(source))
        order = self._order(node, num_dims)
        assert isinstance(rows, Rows)
        own = [d for d in order if d not in rows.dims[1:]]
        return aten.permute.default, (to_body(source), merge_dims(own, num_dims, rows)), {}


def _rising(dims: Iterable[int]) -> Rows | None:
    found = tuple(dims)
    return Rows(found) if list(found) == sorted(found) else None


def _swap(num_dims: int, a: int, b: int) -> list[int]:
    order = list(range(num_dims))
    order[a], order[b] = order[b], order[a]
    return order


def order_of_transpose(node: fx.Node, num_dims: int) -> list[int]:
    """For each dim of the result of `t` or `transpose`, the dim of the input that it is."""
    if node.target is aten.t.default:
        return list(range(num_dims))[::-1]
    a, b = node.args[1:3]
    assert isinstance(a, int) and isinstance(b, int)
    return _swap(num_dims, a, b)


def order_of_permute(node: fx.Node, num_dims: int) -> list[int]:
    """For each dim of the result of `permute`, the dim of the input that it is."""
    dims = node.args[1]
    assert isinstance(dims, list | tuple)
    return [int(d) % num_dims for d in dims]  # type: ignore[arg-type]


class Reshape(TileRule):
    """`view`: rows are the same elements before and after, whatever dims they are."""

    linear_in = (0,)

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if isinstance(rows := known.get(source), Rows):
            own = _reshape_rows(shape_of(source), shape_of(node), rows)
            return None if own is None else [(node, own), (source, rows)]
        if isinstance(rows := known.get(node), Rows):
            cut = _reshape_rows(shape_of(node), shape_of(source), rows)
            return None if cut is None else [(node, rows), (source, cut)]
        return None

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        rows = cuts[node]
        assert isinstance(rows, Rows)
        merged = merge_rows(shape_of(node), rows, -1)
        return aten.reshape.default, (to_body(node.args[0]), merged), {}


def _reshape_rows(before: Sequence[Any], after: Sequence[Any], rows: Rows) -> Rows | None:
    """The dims of `after` that are these rows of `before`.

    >>> _reshape_rows([4, 8, 64], [32, 64], Rows.at(0, 1))
    Rows(dims=(0,))
    >>> _reshape_rows([4, 64, 8], [4, 64, 1, 8], Rows.at(0, 2))
    Rows(dims=(0, 2, 3))
    """
    found = [_reshape_run(before, after, run) for run in rows.find_runs()]
    return None if None in found else Rows(tuple(d for run in found if run for d in run))


def _reshape_run(before: Sequence[Any], after: Sequence[Any], run: Rows) -> Sequence[int] | None:
    wanted, behind = product(run.sizes_in(before)), product(before[run.dims[-1] + 1 :])
    for start in range(len(after)):
        if not is_equal(product(after[:start]), product(before[: run.start])):
            continue
        for end in range(start + 1, len(after) + 1):
            same = is_equal(product(after[start:end]), wanted)
            if same and is_equal(product(after[end:]), behind):
                return range(start, end)
    return None


class AlongDim(TileRule):
    """An operator that cuts or joins tensors along a dim that is no row: `slice`, `split`, `cat`.

    All that it reads and returns has as many dims, and the same rows.
    """

    linear_in = (0,)

    def __init__(self, dim_position: int, default: int | None = None) -> None:
        self._dim_position = dim_position
        self._default = default

    def _dim(self, node: fx.Node, num_dims: int) -> int:
        given = node.args[self._dim_position : self._dim_position + 1] or (self._default,)
        assert isinstance(given[0], int)
        return given[0] % num_dims

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        is_many = isinstance(node.meta.get("val"), tuple | list)
        values = [*(node.users if is_many else [node]), *node.all_input_nodes]
        found = find_rows(known, values)
        num_dims = len(shape_of(values[-1]))
        if found is None or any(len(shape_of(v)) != num_dims for v in values):
            return None
        rows = found[1]
        if self._dim(node, num_dims) in rows.dims:
            return None
        return [(value, rows) for value in values]

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        (source, *_) = node.all_input_nodes
        rows, num_dims = cuts[source], len(shape_of(source))
        assert isinstance(rows, Rows)
        (own,) = merge_dims([self._dim(node, num_dims)], num_dims, rows)
        before, after = node.args[: self._dim_position], node.args[self._dim_position + 1 :]
        return node.target, (*to_body(before), own, *to_body(after)), to_body(node.kwargs)

    def is_linear(self, node: fx.Node, late: Sequence[fx.Node]) -> bool:
        return len(late) == len(node.all_input_nodes)


class Padding(AlongDim):
    """`slice_backward` along a dim that is no row: zeros before and behind."""

    def __init__(self) -> None:
        super().__init__(2)

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        dim = self._dim(node, len(shape_of(node)))
        sizes = node.args[3], shape_of(node)[dim], shape_of(node.args[0])[dim]
        if node.args[5] != 1 or not all(isinstance(size, int) for size in sizes):
            return None
        return super().infer(node, known)

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        source, start = node.args[0], node.args[3]
        rows, shape = cuts[node], shape_of(node)
        assert isinstance(rows, Rows) and isinstance(start, int)
        dim = self._dim(node, len(shape))
        size = shape[dim]
        before = min(max(start + size, 0) if start < 0 else start, size)
        behind = size - before - shape_of(source)[dim]
        (own,) = merge_dims([dim], len(shape), rows)
        num_dims = len(merge_rows(shape, rows, 1))
        pads = [0, 0] * (num_dims - 1 - own) + [before, behind]
        return aten.constant_pad_nd.default, (to_body(source), pads), {}


class Expand(TileRule):
    """It takes no memory, so that what expands a number ends a region."""

    linear_in = (0,)

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        return None
