"""The curve of added time against saved bytes, for one part of a step among many."""

from collections.abc import Iterator
from dataclasses import dataclass

from torchremat.planning.planner import Planner
from torchremat.planning.problem.problem import Schedule
from torchremat.planning.problem.replay import Decisions
from torchremat.planning.problem.schedule_costs import costs_unchecked
from torchremat.planning.problem.trial import Evaluator
from torchremat.planning.search.min_cut import cut_saved_sets
from torchremat.planning.step.planned_step import PlannedStep
from torchremat.planning.step.problem_builder import NumericStep


@dataclass(frozen=True)
class SavedPoint:
    """A corner of the curve.

    Attributes:
        saved_bytes: without outputs.
        peak_bytes: of the part alone.
        inputs: the positions of the inputs that the backward pass reads.
        reads_outputs: whether it reads outputs.
    """

    saved_bytes: int
    added_seconds: float
    peak_bytes: int = 0
    inputs: frozenset[int] = frozenset()
    reads_outputs: bool = False


def point_of(planned: PlannedStep) -> SavedPoint:
    """The point of a schedule."""
    added = planned.costs.added_seconds
    return _point_of(planned.step, planned.schedule, planned.saved_bytes, added, planned.peak_bytes)


def _point_of(
    step: NumericStep, schedule: Schedule, saved_bytes: int, added: float, peak: int
) -> SavedPoint:
    outputs = step.problem.outputs
    reads = (step.problem.operators[o].reads for o in schedule.backward)
    return SavedPoint(
        saved_bytes,
        max(0.0, added),
        peak,
        step.find_inputs_read(schedule.backward),
        any(not outputs.isdisjoint(values) for values in reads),
    )


def trace_saved_curve(planner: Planner) -> Iterator[SavedPoint]:
    """The corners of the lower hull, from what plain autograd saves to nothing, each with less."""
    plain, step = planner.plain, planner.step
    problem = step.problem
    evaluator = Evaluator(problem, 1 << 62)
    points = [point_of(plain)]
    for saved in (*cut_saved_sets(problem), evaluator.fixed):
        trial = evaluator(Decisions(saved | evaluator.fixed))
        if trial.is_allowed:
            kept = trial.decisions.saved - problem.outputs
            nbytes = sum(problem.nbytes[v] for v in kept) + step.copied_nbytes
            if nbytes >= plain.saved_bytes:
                continue
            schedule = trial.replay.schedule
            costs = costs_unchecked(problem, schedule)
            peak = costs.peak + step.copied_nbytes
            points.append(_point_of(step, schedule, nbytes, costs.added_seconds, peak))
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
