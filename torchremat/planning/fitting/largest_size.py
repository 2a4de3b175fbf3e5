"""The largest size at which a step fits.

    batch      1 ......... 12 ................. 31 ...... 40 ...........
    fits       as it is    |   with a plan      |    ?    |   no schedule
                         plain                size      most

Plain peaks and floors need no search for a plan. Both are nearly straight lines in the size, so
secants find where they cross the memory. A schedule of least peak at one size is one at others,
too: to evaluate it there is quick. So only a few sizes are searched for such a schedule, each for a
limited time, and all together as well. Sizes are counted in units: a function may take only
multiples of 4.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torchremat.planning.budget import Budget
from torchremat.planning.fitting.sized_steps import MOST_SIZE, SizedSteps, on_step
from torchremat.planning.planner import Planner
from torchremat.planning.search.clock import NEVER, Deadline, WorkTimer
from torchremat.planning.search.solver_options import SolverOptions
from torchremat.planning.step.planned_step import PlannedStep

# The factor by which sizes grow at most while all fit. Chosen by hand.
_MOST_GROWTH = 16
# Secants after which the middle is taken in turn, as a curve may be far from straight. By hand.
_MOST_SECANTS = 6
# Times the time of one plan, for the whole search: most searches end before their time. By hand.
_PLANS = 6
# Of the time of one plan, what a size is reckoned to take: most need far less. Chosen by hand.
_PROBE_SHARE = 0.2
# Each size that is searched is this many times further from the last that fits. Chosen by hand.
_STRIDE_GROWTH = 4
# Times the first size that no schedule can fit: larger ones that are tried, in case memory falls
# where the function does otherwise with large sizes. Chosen by hand.
_FURTHER = (2, 4, 8)


@dataclass(frozen=True)
class LargestSize:
    """The result of a search for the largest size.

    Attributes:
        size: the largest that fits; 0 if none does.
        plain: the largest that fits without a plan; 0 if none does.
        most: the largest that is not proved impossible, where memory grows with the size.
        unit: sizes are multiples of it, since the function refuses others.
        lowest: the schedule of least peak by which `size` fits; `None` if it fits without.
        smallest: the smallest size that the function may take.
        next_bytes: the least memory found for the next size, or a lower bound of it; `None`
            if the function does not take it.
        untried: from this size on, there was no time to try all; `None` if there was.
    """

    size: int
    plain: int
    most: int
    unit: int
    lowest: PlannedStep | None
    smallest: int
    next_bytes: int | None
    untried: int | None


class SizeSearch:
    """A search for the largest size; `seconds` for all of it, each plan gets a part of that."""

    def __init__(
        self,
        steps: SizedSteps,
        memory: int,
        tell: Callable[[float], None],
        seconds: float | None = None,
    ) -> None:
        self.steps = steps
        self.memory = memory
        self.tell = tell
        self.seconds = seconds
        self.unit = 1
        self.given = steps.dimension.size
        self.smallest = 1
        self.size = self.plain = self.most = 0
        self.lowest: PlannedStep | None = None
        self._deadline: Deadline = NEVER
        self._untried: int | None = None
        self._found: dict[int, int] = {}
        """The least peaks that were found of sizes that do not fit."""
        self._num_told = 0

    def run(self) -> LargestSize:
        planner = self.steps.at(self.given)
        assert planner is not None, "the given size raises what the function raises"
        seconds = self.seconds or _PLANS * SolverOptions().seconds_for(planner.step.problem)
        self._deadline = WorkTimer(has_wall=bool(self.seconds)).within(seconds)
        self.unit = self._find_unit()
        self.given //= self.unit
        self._climb(0, self.given)
        self._look_further()
        return LargestSize(
            size=self.size * self.unit,
            plain=self.plain * self.unit,
            most=self.most * self.unit,
            unit=self.unit,
            lowest=self.lowest,
            smallest=self.smallest * self.unit,
            next_bytes=self._find_next_bytes(),
            untried=None if self._untried is None else self._untried * self.unit,
        )

    def _find_unit(self) -> int:
        """The greatest step between sizes that the function takes: 4 where it takes 8, 12, not 9.

        Only the neighbours of the given size are tried. A function that takes no other size at all
        has the given one.
        """
        given = self.given
        if self._takes_step(1):
            return 1
        unit = given
        for prime in _primes_of(given):
            if unit > prime and self._takes_step(unit // prime):
                unit //= prime
        return unit

    def _takes_step(self, unit: int) -> bool:
        sizes = (self.given + unit, self.given - unit)
        return any(size > 0 and self.steps.at(size) is not None for size in sizes)

    def _climb(self, low: int, start: int) -> None:
        """Look for the largest size that fits, from `start`; nothing above `low` is known."""
        plain = self._find_last(_plain_bytes, low, None, start)
        high = 1 + self._find_last(_floor_bytes, plain, None, max(plain, start))
        if low and high == low + 1:
            return
        if plain > low and plain >= self.smallest:
            self.size, self.plain, self.lowest = plain, plain, None
        self.most = high - 1
        low, stride = plain, 1
        if high - low > 2:
            low = self._probe(high - 1, low, high, is_short=True)
        while high - low > 1 and not (self.size and self._is_over(low)):
            size = min(low + stride, high - 1)
            reached = self._probe(size, low, high)
            if reached > low:
                low, stride = reached, _STRIDE_GROWTH * stride
            elif size == low + 1:
                break
            else:
                high, stride = size, 1

    def _probe(self, size: int, low: int, high: int, *, is_short: bool = False) -> int:
        """The last size before `high` that fits by a schedule that is found for `size`."""
        planner = self._at(size)
        if planner is None:
            return low
        self._tell_more()
        if self.seconds is None:
            seconds = SolverOptions().seconds_for(planner.step.problem)
            self._deadline.charge(_PROBE_SHARE * seconds)
        found = planner.find_lowest(self._seconds_of_one)
        if planner.peak_of(found) > self.memory and not is_short:
            found = planner.search(Budget(nbytes=self.memory), seconds=self._seconds_of_one).planned
        if planner.peak_of(found) > self.memory:
            self._found[size] = planner.peak_of(found)
        return self._extend(found, low, high, size)

    def _find_next_bytes(self) -> int | None:
        planner = self._at(self.size + 1)
        if planner is None:
            return None
        return self._found.get(self.size + 1, planner.floor)

    def _extend(self, found: PlannedStep, low: int, high: int, size: int) -> int:
        """The last size at which the schedule `found`, which was made for `size`, fits."""
        planner = self._at(size)
        assert planner is not None, "the schedule is of this size"
        fits = planner.peak_of(found) <= self.memory
        start, end = (size, high) if fits else (low, size)
        reached = self._find_last(_bytes_with(found), start, end, start + 1)
        if reached > low and reached >= self.smallest:
            self.size, self.lowest = reached, found
        return reached

    @property
    def _seconds_of_one(self) -> float | None:
        return self.seconds and self.seconds / _PLANS

    def _look_further(self) -> None:
        """Look at larger sizes, for which the function may have another way that takes less."""
        end = self.most + 1
        if not self.size or end * self.unit in self.steps.refused:
            return
        branch = self.steps.branch_after(self.size * self.unit)
        sizes = [n * end for n in _FURTHER]
        if branch is not None:
            sizes.append(-(-branch // self.unit))
        for size in sorted(sizes):
            if self.most + 1 < size <= MOST_SIZE and not self._deadline.is_over:
                self._climb(size - 1, size)

    def _is_over(self, low: int) -> bool:
        """Whether there is no time left for the sizes above `low`."""
        if self._deadline.is_over:
            self._untried = low + 1
        return self._deadline.is_over

    def _is_below_all(self, size: int, low: int) -> bool:
        """Whether a size that is refused is smaller than all that the function takes."""
        return size < self.given and low < self.smallest

    def _find_last(
        self, nbytes: Callable[[Planner], int], low: int, high: int | None, start: int
    ) -> int:
        """The last size from `low` to before `high` at which `nbytes`, which grows, fits."""
        points: list[tuple[int, int]] = []
        size = start
        while (high is None and low < MOST_SIZE) or (high is not None and high - low > 1):
            if points and self._is_over(low):
                break
            size = max(size, low + 1)
            size = min(size, _MOST_GROWTH * size if high is None else high - 1)
            planner = self._at(size)
            if planner is None and self._is_below_all(size, low):
                low, self.smallest = size, size + 1
            elif planner is None:
                high = size
            else:
                points.append((size, nbytes(planner)))
                if points[-1][1] <= self.memory:
                    low = size
                else:
                    high = size
            size = self._guess(points, low, high)
        return low

    def _guess(self, points: list[tuple[int, int]], low: int, high: int | None) -> int:
        """Where the line through the two points that are nearest to the memory crosses it."""
        if high is not None and len(points) > _MOST_SECANTS and len(points) % 2:
            return (low + high) // 2
        nearest = sorted(points, key=lambda point: abs(point[1] - self.memory))[:2]
        if len(nearest) == 2 and nearest[0][1] != nearest[1][1]:
            (a, at_a), (b, at_b) = nearest
            guess = a + (self.memory - at_a) * (b - a) // (at_b - at_a)
        elif nearest:
            guess = nearest[0][0] * self.memory // max(nearest[0][1], 1)
        else:
            guess = 2 * low
        return min(guess, MOST_SIZE, _MOST_GROWTH * max(low, 1) if high is None else high - 1)

    def _at(self, size: int) -> Planner | None:
        self._tell_more()
        return self.steps.at(size * self.unit)

    def _tell_more(self) -> None:
        """How many sizes there will be is not known: the bar gets on, and never reaches its end."""
        self._num_told += 1
        self.tell(1 - 1 / (1 + 0.1 * self._num_told))


def _plain_bytes(planner: Planner) -> int:
    return planner.peak_of(planner.plain)


def _floor_bytes(planner: Planner) -> int:
    return planner.floor


def _bytes_with(found: PlannedStep) -> Callable[[Planner], int]:
    return lambda planner: planner.peak_of(on_step(planner, found))


def _primes_of(number: int) -> list[int]:
    """The prime factors, with repeats.

    >>> _primes_of(24)
    [2, 2, 2, 3]
    """
    primes, prime = [], 2
    while number > 1:
        while number % prime == 0:
            primes.append(prime)
            number //= prime
        prime += 1
    return primes
