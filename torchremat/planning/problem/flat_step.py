"""The operators of a step in arrays, so that lifetimes of all values are found at once."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class FlatRows:
    """Rows of numbers, of different lengths, one after the other.

    >>> rows = FlatRows.of([(7, 8), (), (9,)])
    >>> where, numbers = rows.pick(np.array([2, 0]))
    >>> where.tolist(), numbers.tolist()
    ([0, 1, 1], [9, 7, 8])
    """

    numbers: Ints
    starts: Ints
    lengths: Ints

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "FlatRows":
        lengths = np.array([len(row) for row in rows], np.int64)
        numbers = np.array([number for row in rows for number in row], np.int64)
        return cls(numbers, np.cumsum(lengths) - lengths, lengths)

    def pick(self, order: Ints) -> tuple[Ints, Ints]:
        """The numbers of the rows of `order`, with the position in it that each belongs to."""
        lengths = self.lengths[order]
        where = np.repeat(np.arange(len(order)), lengths)
        ahead = np.cumsum(lengths) - lengths
        return where, self.numbers[np.arange(len(where)) + (self.starts[order] - ahead)[where]]


@dataclass(frozen=True)
class FlatStep:
    """The operators and values of a `Problem`.

    Attributes:
        reads: the values that each operator reads.
        writes: those that it writes.
        nbytes_inside: the bytes that it needs besides.
        nbytes: of each value.
        is_lasting: whether each value is alive to the end: an output, or a gradient.
    """

    reads: FlatRows
    writes: FlatRows
    nbytes_inside: Ints
    nbytes: Ints
    is_lasting: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        reads: Sequence[Sequence[int]],
        writes: Sequence[Sequence[int]],
        nbytes_inside: Sequence[int],
        nbytes: Sequence[int],
        lasting: Collection[int],
    ) -> "FlatStep":
        is_lasting = np.zeros(len(nbytes), np.bool_)
        is_lasting[list(lasting)] = True
        inside, sizes = np.array(nbytes_inside, np.int64), np.array(nbytes, np.int64)
        return cls(FlatRows.of(reads), FlatRows.of(writes), inside, sizes, is_lasting)
