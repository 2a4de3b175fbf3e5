"""The values that a tape saves: of sets that are tried on the simulator, the cheapest that fits.

    cuts        minimum cuts, from nearly all to nearly none: cheap values are recomputed first
    walls       all values that are read across some moments of the forward pass, so that the
                backward pass recomputes the operators between two moments, not all at once
    fill        what the limit leaves is used for the values that take the most time for each byte

A tape recomputes a value when it is first read, and frees it after its last use. So sets alone are
tried, and no other orders.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice

from torchremat.planning.problem.problem import Part, Problem
from torchremat.planning.problem.replay import Decisions
from torchremat.planning.problem.trial import Evaluated, Evaluator
from torchremat.planning.search.min_cut import cut_saved_sets

# The prices of a byte for which cuts are made. Each trial takes milliseconds. Chosen by hand, so
# that a plan takes about a second.
_PRICES = 12
# The cuts among them that are tried with walls, too. Chosen by hand.
_CUTS_WITH_WALLS = 4
# Numbers of walls: more save more bytes, and let the backward pass recompute less at once.
_NUM_WALLS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
# The least way between two walls, as a part of the way that is between them on average. Chosen by
# hand: with less, walls stand side by side, and with 1 they miss the places with few bytes.
_APART = 0.8
# Values that are tried one by one when most room is used.
_MOST_SINGLE = 24
# More bytes than there are.
NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class TapeLimits:
    """Limits of a set: bytes of the peak, bytes saved beside outputs, seconds added."""

    peak: int = NO_LIMIT
    saved: int = NO_LIMIT
    seconds: float = float("inf")
    is_least: bool = False
    """Whether the least peak is looked for, not the least time."""
    room: int = 0
    """Bytes of the peak that the forward pass leaves free where not all is saved."""

    def peak_of(self, trial: Evaluated) -> int:
        """The peak, and the bytes that must be free in the forward pass."""
        peak = trial.costs.peak
        if not trial.costs.added_seconds or not self.room:
            return peak
        forward = trial.costs.live[: len(trial.replay.schedule.forward)]
        return max(peak, max(forward, default=0) + self.room)

    def excess_of(self, trial: Evaluated, problem: Problem) -> float:
        """The bytes above the limits; endless if it takes too long, or is not allowed."""
        if trial.costs.added_seconds > self.seconds or not trial.is_allowed:
            return float("inf")
        saved = sum(problem.nbytes[v] for v in trial.decisions.saved - problem.outputs)
        return max(0, self.peak_of(trial) - self.peak) + max(0, saved - self.saved)

    def rank_of(self, trial: Evaluated, problem: Problem) -> tuple[float, float, float]:
        """Less is better."""
        seconds, peak = trial.costs.added_seconds, self.peak_of(trial)
        costs = (peak, seconds) if self.is_least else (seconds, peak)
        return (self.excess_of(trial, problem), *costs)


class TapePlanner:
    """Searches the sets of one problem; of those that are `available`, if they are given."""

    def __init__(self, problem: Problem, available: frozenset[int] | None = None) -> None:
        self.problem = problem
        self._available = available
        self._evaluator = Evaluator(problem, NO_LIMIT)
        self._fixed = self._evaluator.fixed
        self.plain = self.evaluate(problem.needed)
        """Without rematerialisation: what autograd saves is saved."""
        self.room = max(
            (sum(problem.nbytes[v] for v in problem.operators[o].writes) for o in problem.forward),
            default=0,
        )
        """The most bytes that one operator makes: whatever it does is seen when it has run."""

    def evaluate(self, saved: Iterable[int]) -> Evaluated:
        chosen = frozenset(saved)
        if self._available is not None:
            chosen &= self._available
        return self._evaluator(Decisions(chosen | self._fixed))

    def find(self, limits: TapeLimits) -> Evaluated:
        """The best set that was found, which keeps to the limits if any did."""

        def rank(trial: Evaluated) -> tuple[float, float, float]:
            return limits.rank_of(trial, self.problem)

        if not limits.is_least and not limits.excess_of(self.plain, self.problem):
            return self.plain
        best = min(self._candidates(), key=rank)
        return min(best, self._fill(best, limits), key=rank)

    def _candidates(self) -> Iterator[Evaluated]:
        yield self.plain
        cuts = list(cut_saved_sets(self.problem, _PRICES))
        for cut in (*cuts, frozenset[int]()):
            yield self.evaluate(cut)
        step = max(1, len(cuts) // _CUTS_WITH_WALLS)
        for wall in self._walls():
            yield self.evaluate(wall)
            for cut in islice(cuts, 0, None, step):
                yield self.evaluate(wall | cut)

    def _walls(self) -> Iterator[frozenset[int]]:
        crossing = Crossing(self.problem)
        last: frozenset[int] | None = None
        for count in _NUM_WALLS:
            if count < len(self.problem.forward):
                found = crossing.values_at(crossing.places(count))
                if found != last:
                    yield found
                last = found

    def _fill(self, best: Evaluated, limits: TapeLimits) -> Evaluated:
        """Save more of what is recomputed, or less of what is saved, as far as the limits allow."""
        problem = self.problem
        again = {
            v
            for o in best.replay.schedule.backward
            if problem.operators[o].part is Part.FORWARD
            for v in problem.operators[o].writes
        }
        order = sorted(
            again - best.decisions.saved,
            key=lambda v: (
                -problem.operators[problem.producers[v]].seconds / max(1, problem.nbytes[v])
            ),
        )
        low, high = 0, len(order)
        while low < high:
            middle = (low + high + 1) // 2
            trial = self.evaluate(best.decisions.saved.union(order[:middle]))
            if limits.excess_of(trial, problem):
                high = middle - 1
            else:
                low = middle
        for v in order[low : low + _MOST_SINGLE]:
            trial = self.evaluate(best.decisions.saved.union(order[:low], (v,)))
            if limits.rank_of(trial, problem) < limits.rank_of(best, problem):
                best = trial
        filled = self.evaluate(best.decisions.saved.union(order[:low]))
        return min(best, filled, key=lambda trial: limits.rank_of(trial, problem))


class Crossing:
    """The values that are read across each moment of the forward pass, of those that `may_save`."""

    def __init__(self, problem: Problem, may_save: Callable[[int], bool] | None = None) -> None:
        self.problem = problem
        self.order = problem.forward
        last: dict[int, int] = {}
        for i, o in enumerate(self.order):
            last.update((v, i) for v in problem.operators[o].reads)
        made = {v: i for i, o in enumerate(self.order) for v in problem.operators[o].writes}
        self._spans = [(made[v], end, v) for v, end in last.items() if v in made and end > made[v]]
        self._nbytes = self._count(lambda v: problem.nbytes[v])
        self._closed = [0] * len(self._nbytes)
        """How many values cross that may not be saved: then there is no wall."""
        if may_save is not None:
            self._closed = self._count(lambda v: not may_save(v))

    def _count(self, of: Callable[[int], int]) -> list[int]:
        change = [0] * (len(self.order) + 1)
        for start, end, v in self._spans:
            amount = of(v)
            change[start] += amount
            change[end] -= amount
        return list(accumulate(change[:-1]))

    def places(self, count: int) -> list[int]:
        """The places of at most so many walls, where the fewest bytes cross, some way apart."""
        problem = self.problem
        sizes = (sum(problem.nbytes[v] for v in problem.operators[o].writes) for o in self.order)
        ways = list(accumulate(sizes, initial=0))
        apart = _APART * ways[-1] / (count + 1)
        found: list[int] = []  # sorted by place
        may_stand = [i for i, n in enumerate(self._nbytes) if n and not self._closed[i]]
        for i in sorted(may_stand, key=lambda i: (self._nbytes[i], i)):
            at = bisect(found, i)
            near = found[max(0, at - 1) : at + 1]
            if all(abs(ways[i] - ways[other]) >= apart for other in near):
                found.insert(at, i)
                if len(found) == count:
                    break
        return found

    def values_at(self, places: Iterable[int]) -> frozenset[int]:
        return frozenset(
            v for place in places for start, end, v in self._spans if start <= place < end
        )
