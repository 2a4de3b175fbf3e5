"""One budget for all graphs into which graph breaks divide a model.

    forward     graph 1    graph 2    graph 3
    backward                          graph 3    graph 2    graph 1

While a graph runs, those before it hold what they saved, and there is what passes between graphs.
So the budget of each is that of the step without these. What the graphs save follows one rule: the
values that cost the least time for each byte are recomputed first.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

from torchremat.compile.dynamo.passed_memory import CallSaves, PassedMemory
from torchremat.planning.budget import Budget
from torchremat.planning.planner import Planner
from torchremat.planning.saved_curve import SavedPoint, point_of, trace_saved_curve

Points: TypeAlias = Mapping[Hashable, SavedPoint]
"""The values that each graph saves, by its key."""


@dataclass(frozen=True, eq=False)
class GraphCosts:
    """The bytes and seconds of a graph among others, by the planner of its joint graph."""

    planner: Planner

    def find_saves(self, point: SavedPoint) -> CallSaves:
        """Of the arguments and results; `SavedPoint.saved_bytes` is what lies between."""
        return CallSaves(point.inputs, len(self.planner.joint.inputs), point.reads_outputs)

    @cached_property
    def points(self) -> Sequence[SavedPoint]:
        return tuple(trace_saved_curve(self.planner))

    @cached_property
    def lowest(self) -> SavedPoint:
        """The schedule of least peak."""
        found = self.planner.find_lowest()
        if found.peak_bytes >= self.points[0].peak_bytes:
            return self.points[0]
        return point_of(found)


@dataclass(frozen=True)
class GraphShare:
    """The part of a budget that one graph may take.

    Attributes:
        saved_bytes: the most that it saves; `None` for all that plain autograd saves.
        resident_bytes: what the others hold while it runs.
    """

    saved_bytes: int | None
    resident_bytes: int


@dataclass(frozen=True)
class DividedBudget:
    """The shares of graphs in a budget.

    Attributes:
        limit: the bytes of the budget.
        plain_peak: the peak of the step without rematerialisation.
        least_peak: the least peak that was found, where the shares do not keep within the limit.
        shares: by the keys of the graphs.
    """

    limit: int
    plain_peak: int
    least_peak: int | None
    shares: Mapping[Hashable, GraphShare]


def divide_budget(
    budget: Budget,
    order: Sequence[Hashable],
    graphs: Mapping[Any, GraphCosts],
    passed: PassedMemory,
    *,
    resident: int = 0,
    largest: int = 0,
) -> DividedBudget:
    """Divide `budget` over the `graphs`, called in the forward pass in this `order` of their keys.

    `passed` is of the same calls. `resident` bytes are there before the step. A fraction is of the
    plain peak, or of `largest`, that of a larger step, if that is more.
    """
    step = _Step(order, graphs, passed, resident)
    plain = step.peak(step.points(0))
    if budget.is_least:
        points = {key: graphs[key].lowest for key in step.calls}
        limit = step.peak(points)
    elif budget.added is not None:
        allowed = budget.added * step.plain_seconds
        tried = map(step.points, range(len(step.downs) + 1))
        points = max(
            (p for p in tried if step.count_added_seconds(p) <= allowed),
            key=step.count_added_seconds,
        )
        limit = step.peak(points)
    else:
        limit = budget.bytes_of(max(plain, largest))
        points = step.points(step.find_fewest_downs(limit))
        if not step.fits(points, limit):
            points = {key: graphs[key].lowest for key in step.calls}
    least = step.peak(points)
    is_met = least <= limit or step.fits(points, limit)
    return DividedBudget(limit, plain, None if is_met else least, step.shares(points))


class _Step:
    """The calls of a step, and the steps down from saving all values to saving none.

    Attributes:
        downs: the key of the graph that goes down its curve, for each step down in order.
    """

    def __init__(
        self,
        order: Sequence[Hashable],
        graphs: Mapping[Any, GraphCosts],
        passed: PassedMemory,
        resident: int,
    ) -> None:
        self.order, self.graphs, self.resident = order, graphs, resident
        self.passed = passed
        self.calls = Counter(order)
        self.downs = [key for _, key in sorted(self._slopes(), key=lambda pair: pair[0])]

    def _slopes(self) -> Iterator[tuple[float, Hashable]]:
        for key in self.calls:
            for a, b in pairwise(self.graphs[key].points):
                yield (b.added_seconds - a.added_seconds) / (a.saved_bytes - b.saved_bytes), key

    @property
    def plain_seconds(self) -> float:
        seconds = {key: self.graphs[key].planner.plain_seconds for key in self.calls}
        return sum(count * seconds[key] for key, count in self.calls.items())

    def count_added_seconds(self, points: Points) -> float:
        return sum(count * points[key].added_seconds for key, count in self.calls.items())

    def points(self, done: int) -> dict[Hashable, SavedPoint]:
        """The values that each graph saves after so many steps down."""
        downs = Counter(self.downs[:done])
        return {key: self.graphs[key].points[downs[key]] for key in self.calls}

    def peak(self, points: Points) -> int:
        """The most bytes alive at one time, if each graph recomputes what it does not save."""
        residents = self._residents(points)
        return max(residents[k] + points[k].peak_bytes for k in self.calls)

    def fits(self, points: Points, limit: int) -> bool:
        """Whether a plan of each graph that saves so much keeps the step within `limit`."""
        residents = self._residents(points)
        return all(self._has_plan(k, points[k], limit - residents[k]) for k in self.calls)

    def _has_plan(self, key: Hashable, point: SavedPoint, room: int) -> bool:
        if point.peak_bytes <= room:
            return True
        if room <= 0:
            return False
        graph = self.graphs[key]
        saved = None if point is graph.points[0] else point.saved_bytes
        return graph.planner.search(Budget(nbytes=room), saved, is_prompt=True).error is None

    def find_fewest_downs(self, limit: int) -> int:
        """The fewest steps down that fit, by halving; all of them if none do."""
        low, high = 0, len(self.downs)
        while low < high:
            middle = (low + high) // 2
            if self.fits(self.points(middle), limit):
                high = middle
            else:
                low = middle + 1
        return low

    def shares(self, points: Points) -> dict[Hashable, GraphShare]:
        residents = self._residents(points)
        found = {}
        for key, point in points.items():
            is_plain = point is self.graphs[key].points[0]
            found[key] = GraphShare(None if is_plain else point.saved_bytes, residents[key])
        return found

    def _residents(self, points: Points) -> dict[Hashable, int]:
        """The most that others hold while each graph runs."""
        before, found = self.resident, dict.fromkeys(self.calls, 0)
        saves = [self.graphs[key].find_saves(points[key]) for key in self.order]
        each = self.passed.count_bytes(saves)
        for key, passed in zip(self.order, each, strict=True):
            found[key] = max(found[key], before + passed)
            before += points[key].saved_bytes
        return found
