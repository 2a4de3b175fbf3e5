"""Moments of the backward pass, the intervals between them, and when operators may run.

moments        step 3          step 7          step 9
intervals   0           1               2              3
steps       0 .. 3      4 .. 7          8, 9           10 ..
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from torchremat.planning.milp.problem_index import ProblemIndex


@dataclass(frozen=True, order=True)
class PeakPoint:
    """A moment of the backward pass.

    Attributes:
        step: the step of an operator that needs cotangents.
        operator: one that is recomputed for this step and runs just now. Larger than all operators
            it stands for the step's own, which runs last.
    """

    step: int
    operator: int = 1 << 60

    @property
    def is_recompute(self) -> bool:
        return self.operator != 1 << 60


class Intervals:
    """The intervals that `moments` cut the backward pass into.

    Args:
        window: operators of the forward pass that lie further than this before what the backward
            pass has reached do not run yet.
        outer: the first interval of each operator stands for all before it.

    Attributes:
        last_direct: the last interval in which an operator that needs cotangents reads each value.
        last_value: the last in which each value is of use.
        first: the first in which each operator may run.
        last: the last in which it is of use.
    """

    def __init__(
        self, index: ProblemIndex, moments: Sequence[PeakPoint], window: int | None, *, outer: bool
    ) -> None:
        self.index = index
        self.moments = moments
        self.window = window
        self.outer = outer
        self.interval = [
            bisect_left(self.moments, PeakPoint(step)) for step in range(len(index.direct))
        ]
        self.last_step = [*(m.step for m in self.moments), len(index.direct) - 1]
        self.last_direct: dict[int, int] = {}
        first_direct: dict[int, int] = {}
        for v, steps in index.direct_steps.items():
            self.last_direct[v] = self.interval[steps[-1]]
            first_direct[v] = self.interval[steps[0]]
        self.last_value = dict(self.last_direct)
        self.last: dict[int, int] = {}
        for o in reversed(index.operators):
            self.last[o] = max(self.last_value.get(v, -1) for v in index.writes[o])
            for u in index.reads[o]:
                self.last_value[u] = max(self.last_value.get(u, -1), self.last[o])
        for number, moment in enumerate(self.moments, 1):
            if (
                moment.is_recompute
            ):  # what is read then is alive, though it may be for the last time
                for v in self.busy(moment):
                    self.last_value[v] = max(self.last_value.get(v, -1), number)
        self.first = self._first_intervals(first_direct)

    def busy(self, moment: PeakPoint) -> tuple[int, ...]:
        """The values that the recomputed operator of a moment reads and writes."""
        return (*self.index.reads[moment.operator], *self.index.writes[moment.operator])

    def _first_intervals(self, first_direct: dict[int, int]) -> dict[int, int]:
        index, window = self.index, self.window
        if window is None:
            return dict.fromkeys(index.operators, 0)
        reached = [index.front[m.step] - window for m in self.moments]  # it only falls
        falling = [-rank for rank in reached]
        first = {}
        for o in index.operators:
            near = bisect_left(falling, -index.rank[o])
            first[o] = min([near, *(first_direct.get(v, near) for v in index.writes[o])])
        producers = self.index.problem.producers
        for p in reversed(index.operators):
            for u in index.reads[p]:
                o = producers[u]
                if index.rank[p] - index.rank[o] > window:
                    first[o] = min(first[o], first[p])
        if self.outer:  # the one before stands for all earlier ones
            return {o: max(j - 1, 0) for o, j in first.items()}
        return first

    def is_allowed(self, o: int, interval: int) -> bool:
        before = self.moments[interval - 1] if interval else PeakPoint(-1)
        if interval < len(self.moments):
            after = self.moments[interval]
            if after.is_recompute and before.step >= after.step - 1 and o > after.operator:
                return False
            if before.is_recompute and after.step == before.step and o <= before.operator:
                return False
        return True
