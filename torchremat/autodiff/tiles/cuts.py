"""Rows: the dims of a tensor along which it is cut into tiles."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, fx

from torchremat import _torch


@dataclass(frozen=True, slots=True)
class Rows:
    """Dims in rising order, which a tile has as one dim in the place of the first of them.

    The rows of `f32[4,8,64]` with `Rows.at(0, 1)` are 32, and a tile of 16 is `f32[16,64]`. With
    `Rows.at(0, 2)` they are 256, and a tile of 16 is `f32[16,8]`.
    """

    dims: tuple[int, ...]

    @classmethod
    def at(cls, *dims: int) -> "Rows":
        return cls(dims)

    @property
    def start(self) -> int:
        return self.dims[0]

    @property
    def are_neighbours(self) -> bool:
        return self.dims[-1] - self.dims[0] == len(self.dims) - 1

    def shift(self, by: int) -> "Rows":
        return Rows(tuple(d + by for d in self.dims))

    def sizes_in(self, shape: Sequence[Any]) -> list[Any]:
        return [shape[d] for d in self.dims]

    def find_runs(self) -> list["Rows"]:
        """The dims in parts, each of neighbours."""
        runs: list[list[int]] = []
        for d in self.dims:
            if runs and runs[-1][-1] == d - 1:
                runs[-1].append(d)
            else:
                runs.append([d])
        return [Rows(tuple(run)) for run in runs]


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
    return product(rows.sizes_in(shape_of(node)))


def merge_rows(shape: Sequence[Any], rows: Rows, size: Any) -> list[Any]:
    """The shape of a tile of `size` rows.

    >>> merge_rows([4, 8, 64], Rows.at(0, 1), 16)
    [16, 64]
    >>> merge_rows([4, 8, 64], Rows.at(0, 2), 16)
    [16, 8]
    """
    merged = [size if d == rows.start else own for d, own in enumerate(shape)]
    return [own for d, own in enumerate(merged) if d not in rows.dims[1:]]


def merge_dims(dims: Iterable[int], num_dims: int, rows: Rows) -> list[int]:
    """The dims of a tile that are `dims` of the whole value: no rows, or the first of them."""
    positive = (dim % num_dims for dim in dims)
    return [dim - sum(d < dim for d in rows.dims[1:]) for dim in positive]


def broadcast_cut(source: Sequence[Any], result: Sequence[Any], rows: Rows) -> Cut | None:
    """How an operand lies in tiles if the elementwise result does so; `None` if it cannot.

    A whole operand has no rows, or one in each of their dims: `fit_operand` leaves them out.

    >>> broadcast_cut([4, 8, 64], [4, 8, 64], Rows.at(0, 1))
    Rows(dims=(0, 1))
    >>> broadcast_cut([64], [4, 8, 64], Rows.at(0, 1)).name
    'WHOLE'
    """
    own = rows.shift(len(source) - len(result))
    if own.start >= 0 and have_equal(own.sizes_in(source), rows.sizes_in(result)):
        return own
    return WHOLE if all(d < 0 or is_equal(source[d], 1) for d in own.dims) else None


def result_rows(source: Sequence[Any], result: Sequence[Any], rows: Rows) -> Rows | None:
    """The rows of an elementwise result of an operand with these rows."""
    found = rows.shift(len(result) - len(source))
    is_same = have_equal(rows.sizes_in(source), found.sizes_in(result))
    return found if is_same else None


def find_rows(known: Cuts, nodes: Iterable[fx.Node]) -> tuple[fx.Node, Rows] | None:
    """The first of `nodes` that is known to have rows, with them."""
    for node in nodes:
        rows = known.get(node)
        if isinstance(rows, Rows):
            return node, rows
    return None
