"""Rules of operators that only move dims: the same elements, as other dims or in another order."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from torchremat.autodiff.tiles.cuts import (
    Assignment,
    Cuts,
    Rows,
    is_equal,
    merge_dims,
    product,
    shape_of,
)
from torchremat.autodiff.tiles.tile_rule import TileRule, ToBody

aten = torch.ops.aten


class Permutation(TileRule):
    """`t`, `transpose` and `permute`: rows move with their dims, if these stay neighbours."""

    linear_in = (0,)

    def __init__(self, order: Callable[[fx.Node, int], Sequence[int]]) -> None:
        self._order = order

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        order = self._order(node, len(shape_of(source)))
        found = known.get(source)
        if isinstance(found, Rows):
            dims = [order.index(d) for d in range(found.start, found.end)]
            return self._pairs(node, source, dims, found)
        own = known.get(node)
        if isinstance(own, Rows):
            dims = [order[d] for d in range(own.start, own.end)]
            cut = _neighbours(dims)
            return None if cut is None else [(node, own), (source, cut)]
        return None

    def _pairs(
        self, node: fx.Node, source: fx.Node, dims: Sequence[int], rows: Rows
    ) -> Assignment | None:
        own = _neighbours(dims)
        return None if own is None else [(node, own), (source, rows)]

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        source = node.args[0]
        rows = cuts[source]  # type: ignore[index]
        num_dims = len(shape_of(source))
        order = self._order(node, num_dims)
        assert isinstance(rows, Rows)
        kept = [d for d in order if d == rows.start or not rows.start < d < rows.end]
        return aten.permute.default, (to_body(source), merge_dims(kept, num_dims, rows)), {}


def _neighbours(dims: Sequence[int]) -> Rows | None:
    in_order = all(b == a + 1 for a, b in pairwise(dims))
    return Rows(dims[0], len(dims)) if in_order else None


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
        shape = shape_of(node)
        merged = [*shape[: rows.start], -1, *shape[rows.end :]]
        return aten.reshape.default, (to_body(node.args[0]), merged), {}


def _reshape_rows(before: Sequence[Any], after: Sequence[Any], rows: Rows) -> Rows | None:
    """The dims of `after` that are these rows of `before`.

    >>> _reshape_rows([4, 8, 64], [32, 64], Rows(0, 2))
    Rows(start=0, count=1)
    """
    head, wanted = before[: rows.start], product(before[rows.start : rows.end])
    for start in range(len(after)):
        if not is_equal(product(after[:start]), product(head)):
            continue
        for end in range(start + 1, len(after) + 1):
            same = is_equal(product(after[start:end]), wanted)
            if same and is_equal(product(after[end:]), product(before[rows.end :])):
                return Rows(start, end - start)
    return None


class Expand(TileRule):
    """It takes no memory, so that what expands a number ends a region."""

    linear_in = (0,)

    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        return None
