"""Rows: the dims of a tensor along which it is cut into tiles."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, fx

from torchremat import _torch


@dataclass(frozen=True, slots=True)
class Rows:
    """Neighbouring dims, `count` of them from `start`, which a tile has as one dim.

    The rows of `f32[4,8,64]` with `Rows(0, 2)` are 32, and a tile of 16 is `f32[16,64]`.
    """

    start: int
    count: int = 1

    @property
    def end(self) -> int:
        return self.start + self.count

    def shift(self, by: int) -> "Rows":
        return Rows(self.start + by, self.count)


class Untiled(Enum):
    """The kinds of values that have no rows.

    Attributes:
        WHOLE: it is computed before, and every tile reads all of it.
        SUM: it is a sum over the rows, to which each tile adds its part.
    """

    WHOLE = "whole"
    SUM = "sum"


WHOLE, SUM = Untiled.WHOLE, Untiled.SUM

Cut = Rows | Untiled
"""How a value lies in tiles."""

Cuts = Mapping[fx.Node, Cut]

Assignment = Iterable[tuple[fx.Node, Cut]]
"""How the result of an operator and each tensor that it reads lie in tiles."""


def shape_of(node: Any) -> tuple[Any, ...]:
    """The shape of the tensor of a node; none for another argument."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def product(sizes: Iterable[Any]) -> Any:
    """The product of sizes, which may be symbols; 1 of none."""
    found: Any = 1
    for size in sizes:
        found = found * size
    return found


def is_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal, without a new guard."""
    return _torch.are_known_equal(a, b)


def have_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes have as many dims, and equal sizes."""
    return len(a) == len(b) and all(map(is_equal, a, b))


def num_rows(node: fx.Node, rows: Rows) -> Any:
    """How many rows the value of `node` has."""
    return product(shape_of(node)[rows.start : rows.end])


def merge_rows(shape: Sequence[Any], rows: Rows, size: Any) -> list[Any]:
    """The shape of a tile of `size` rows.

    >>> merge_rows([4, 8, 64], Rows(0, 2), 16)
    [16, 64]
    """
    return [*shape[: rows.start], size, *shape[rows.end :]]


def merge_dims(dims: Iterable[int], num_dims: int, rows: Rows) -> list[int]:
    """The dims of a tile that are `dims` of the whole value: no rows, or the first of them."""
    positive = (dim % num_dims for dim in dims)
    return [dim if dim <= rows.start else dim - rows.count + 1 for dim in positive]


def broadcast_cut(source: Sequence[Any], result: Sequence[Any], rows: Rows) -> Cut | None:
    """How an operand lies in tiles if the elementwise result does so; `None` if it cannot.

    >>> broadcast_cut([4, 8, 64], [4, 8, 64], Rows(0, 2))
    Rows(start=0, count=2)
    >>> broadcast_cut([64], [4, 8, 64], Rows(0, 2)).name
    'WHOLE'
    """
    own = rows.shift(len(source) - len(result))
    if own.end <= 0:
        return WHOLE
    if own.start >= 0:
        inside, wanted = source[own.start : own.end], result[rows.start : rows.end]
        if have_equal(inside, wanted):
            return own
    if rows.count == 1 and own.start >= 0 and is_equal(source[own.start], 1):
        return WHOLE
    return None


def result_rows(source: Sequence[Any], result: Sequence[Any], rows: Rows) -> Rows | None:
    """The rows of an elementwise result of an operand with these rows."""
    found = rows.shift(len(result) - len(source))
    wanted = result[found.start : found.end]
    return found if have_equal(source[rows.start : rows.end], wanted) else None


def find_rows(known: Cuts, nodes: Iterable[fx.Node]) -> tuple[fx.Node, Rows] | None:
    """The first of `nodes` that is known to have rows, with them."""
    for node in nodes:
        rows = known.get(node)
        if isinstance(rows, Rows):
            return node, rows
    return None
