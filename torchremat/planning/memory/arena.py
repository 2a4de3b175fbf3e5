"""Addresses of all values of a step in one buffer, an arena, that is hardly larger than the peak.

    operator     1    2    3    4
    a  4 KiB     ========              address 0
    b  2 KiB          ============     address 4096
    c  4 KiB               =======     address 0, where a was

Two values that are alive at one time lie apart. To find the least such buffer is hard (the problem
is known as dynamic storage allocation), and it is never smaller than the peak. Values are placed
one after the other, each at the lowest address that is free as long as it lives, in several orders.
Then those that stick out above the peak are placed first, again and again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Arena"]


def __dir__() -> list[str]:
    return sorted(__all__)


ALIGNMENT = 64
"""Addresses are multiples of it: a line of a cache, and as much as any dtype wants."""

# Attempts with what sticks out placed first. Chosen by hand: most models need none or a few.
_ATTEMPTS = 30

Moments: TypeAlias = tuple[int, int, int]
"""The first and the last moment of a value, and its bytes."""

Integers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Arena:
    """A buffer, and where each value lies in it.

    Attributes:
        nbytes: the bytes of the buffer.
        offsets: the address of each value in it, in the order in which they were given.
        peak: the most bytes that are alive at one time, those of each value rounded up to
            `ALIGNMENT`. No buffer is smaller.

    >>> place([(0, 1, 4096), (1, 3, 2048), (2, 3, 4096)])
    Arena(nbytes=6144, offsets=(0, 4096, 0), peak=6144)
    """

    nbytes: int
    offsets: tuple[int, ...]
    peak: int


def place(lifetimes: Sequence[Moments]) -> Arena:
    """Find addresses for values with these lifetimes.

    >>> place([])
    Arena(nbytes=0, offsets=(), peak=0)
    """
    values = _Values(lifetimes)
    best = None
    for attempt in values.attempts():
        if best is None or attempt.nbytes < best.nbytes:
            best = attempt
        if best.nbytes == values.peak:
            break
    assert best is not None
    return best


class _Values:
    def __init__(self, lifetimes: Sequence[Moments]) -> None:
        table: Integers = np.array(lifetimes, dtype=np.int64).reshape(-1, 3)
        self._first, self._last, nbytes = table.T
        self._sizes: Integers = -(-nbytes // ALIGNMENT) * ALIGNMENT
        changes = np.zeros(int(self._last.max(initial=0)) + 2, dtype=np.int64)
        np.add.at(changes, self._first, self._sizes)
        np.add.at(changes, self._last + 1, -self._sizes)
        self._live: Integers = changes.cumsum()
        self.peak = int(self._live.max())

    def attempts(self) -> Iterator[Arena]:
        """Arenas in orders by rules of thumb, and then more, from the best of these on."""
        made = []
        for order in self._orders():
            made.append((self._place(order), order))
            yield made[-1][0]
        arena, order = min(made, key=lambda pair: pair[0].nbytes)
        yield from islice(self._raise_tops(arena, order), _ATTEMPTS)

    def _orders(self) -> Iterator[Integers]:
        lasting = self._last - self._first + 1
        crowds = np.array(
            [self._live[a : b + 1].max() for a, b in zip(self._first, self._last, strict=True)],
            dtype=np.int64,
        )
        yield np.lexsort((self._first, -self._sizes))
        yield np.lexsort((-lasting, -self._sizes))
        yield np.lexsort((self._first, -self._sizes * lasting))
        yield np.lexsort((self._first, -self._sizes, -crowds))

    def _raise_tops(self, arena: Arena, order: Integers) -> Iterator[Arena]:
        while True:
            ends = np.array(arena.offsets, dtype=np.int64) + self._sizes
            sticks_out = ends[order] > self.peak
            order = np.concatenate((order[sticks_out], order[~sticks_out]))
            arena = self._place(order)
            yield arena

    def _place(self, order: Any) -> Arena:
        """Place the values in this order, each at the lowest address that is free."""
        offsets = np.zeros(len(order), dtype=np.int64)
        first, last, begins, ends = (np.empty(len(order), dtype=np.int64) for _ in range(4))
        for count, i in enumerate(order):
            meets = (first[:count] <= self._last[i]) & (last[:count] >= self._first[i])
            offset = _find_gap(begins[:count][meets], ends[:count][meets], self._sizes[i])
            first[count], last[count] = self._first[i], self._last[i]
            begins[count], ends[count] = offset, offset + self._sizes[i]
            offsets[i] = offset
        return Arena(int(ends.max(initial=0)), tuple(offsets.tolist()), self.peak)


def _find_gap(begins: Integers, ends: Integers, size: int) -> int:
    """The lowest address from which `size` bytes are free between blocks."""
    order = begins.argsort()
    starts = np.concatenate(([0], np.maximum.accumulate(ends[order])))
    rooms = begins[order] - starts[:-1]
    fitting = np.flatnonzero(rooms >= size)
    return int(starts[fitting[0] if len(fitting) else -1])
