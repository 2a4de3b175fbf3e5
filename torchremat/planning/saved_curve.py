"""The curve of added time against saved bytes, for one part of a step among many."""

from collections.abc import Iterator
from dataclasses import dataclass

from torchremat.planning.planner import Planner
from torchremat.planning.problem.problem import costs_unchecked
from torchremat.planning.problem.replay import Decisions
from torchremat.planning.problem.trial import Evaluator
from torchremat.planning.search.min_cut import cut_saved_sets


@dataclass(frozen=True)
class SavedPoint:
    """A corner of the curve; `saved_bytes` are without outputs, `peak_bytes` of the part alone."""

    saved_bytes: int
    added_seconds: float
    peak_bytes: int = 0


def trace_saved_curve(planner: Planner) -> Iterator[SavedPoint]:
    """The corners of the lower hull, from what plain autograd saves to nothing, each with less."""
    plain, step = planner.plain, planner.step
    problem = step.problem
    evaluator = Evaluator(problem, 1 << 62)
    points = [SavedPoint(plain.saved_bytes, 0.0, plain.peak_bytes)]
    for saved in (*cut_saved_sets(problem), evaluator.fixed):
        trial = evaluator(Decisions(saved | evaluator.fixed))
        if trial.is_allowed:
            kept = trial.decisions.saved - problem.outputs
            nbytes = sum(problem.nbytes[v] for v in kept) + step.copied_nbytes
            costs = costs_unchecked(problem, trial.replay.schedule)
            peak = costs.peak + step.copied_nbytes
            points.append(SavedPoint(nbytes, max(0.0, costs.added_seconds), peak))
    yield from _hull(points)


def _hull(points: list[SavedPoint]) -> list[SavedPoint]:
    """The lower convex hull, from the most bytes to the least.

    >>> [p.saved_bytes for p in _hull([SavedPoint(*p) for p in [(4, 0), (3, 9), (2, 2), (0, 9)]])]
    [4, 2, 0]
    """
    hull: list[SavedPoint] = []
    for point in sorted(points, key=lambda p: (-p.saved_bytes, p.added_seconds)):
        if hull and hull[-1].saved_bytes == point.saved_bytes:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(a: SavedPoint, b: SavedPoint) -> float:
    return (b.added_seconds - a.added_seconds) / (a.saved_bytes - b.saved_bytes)
