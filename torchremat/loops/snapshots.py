"""The states of a loop to save while nobody knows when it ends, and on the way back.

Forward, the rule of Wang, Moin and Iaccarino (Minimal repetition dynamic checkpointing, 2009): each
step is repeated as seldom as if the length were known. Backward, that of Griewank and Walther
(Algorithm 799: revolve, 2000), which is optimal for a known length.
"""

import math
from dataclasses import dataclass, field


@dataclass
class _Snapshot:
    position: int
    level: int


@dataclass
class Snapshots:
    """The positions of saved states; the first state, at position 0, is always there, and not one.

    Args:
        most: how many are saved at most; without it about two for each doubling of the steps.

    >>> snapshots = Snapshots(2)
    >>> dropped = [snapshots.visit(position) for position in range(1, 7)]
    >>> snapshots.positions
    [3, 6]
    """

    most: int | None = None
    _saved: list[_Snapshot] = field(default_factory=list)

    @property
    def positions(self) -> list[int]:
        return [snapshot.position for snapshot in self._saved]

    def visit(self, position: int) -> int | None:
        """Save the state at `position`, the next one. Returns the position that is dropped for it.

        It is `position` itself if nothing may be saved.
        """
        most = num_snapshots(position) if self.most is None else self.most
        if most == 0:
            return position
        if len(self._saved) < most:
            self._saved.append(_Snapshot(position, 0))
            return None
        level = 0
        place = self._find_dispensable()
        if place is None:
            place = len(self._saved) - 1
            level = self._saved[place].level + 1
        dropped = self._saved.pop(place).position
        self._saved.append(_Snapshot(position, level))
        return dropped

    def _find_dispensable(self) -> int | None:
        """The last one with a snapshot of a higher level after it."""
        highest = -1
        for place in range(len(self._saved) - 1, -1, -1):
            if self._saved[place].level < highest:
                return place
            highest = max(highest, self._saved[place].level)
        return None


def num_snapshots(num_steps: int) -> int:
    """How many states of so many steps are saved if nobody says: two for each doubling.

    >>> [num_snapshots(n) for n in (1, 10, 100, 1000, 1_000_000)]
    [2, 8, 14, 20, 40]
    """
    return 2 * num_steps.bit_length()


def choose_next(num_steps: int, most: int) -> int:
    """The state to save next on the way through `num_steps`, if `most` may be saved on it.

    The first state is there already. The choice has the fewest steps in all.

    >>> choose_next(10, 2)
    4
    """
    slots = most + 1  # the first state is one, as Griewank and Walther count
    repeats = 1
    while math.comb(slots + repeats, slots) < num_steps:
        repeats += 1
    low = num_steps - math.comb(slots - 1 + repeats, slots - 1)
    return max(1, low, math.comb(slots + repeats - 2, slots)) if repeats > 1 else 1


def count_steps(num_steps: int, most: int) -> int:
    """How many steps run forward until the last step of `num_steps`, and each before, was reached.

    >>> count_steps(10, 2)
    15
    """
    if num_steps <= 1:
        return 0
    if most == 0:
        return num_steps * (num_steps - 1) // 2
    chosen = choose_next(num_steps, most)
    return chosen + count_steps(num_steps - chosen, most - 1) + count_steps(chosen, most)
