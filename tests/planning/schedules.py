"""Schedules and bounds that tests and measurements compare plans with."""

from torchremat.planning.problem.backward_order import floor_of
from torchremat.planning.problem.problem import Part, Problem, Schedule
from torchremat.planning.search.least_peak import is_too_small


def plain_schedule(problem: Problem) -> Schedule:
    """The schedule without rematerialisation: every value that the backward pass reads is saved."""
    late = [o for o, op in enumerate(problem.operators) if op.part is not Part.FORWARD]
    made = {v for o in problem.forward for v in problem.operators[o].writes}
    read = {v for o in late for v in problem.operators[o].reads}
    return Schedule(tuple(sorted(made & read)), problem.forward, tuple(late))


def least_peak_bound(problem: Problem, high: int) -> int:
    """A peak that no schedule of `problem` gets below, as far as `high`; see `is_too_small`."""
    low = floor_of(problem)
    while low < high:
        budget = (low + high) // 2
        if is_too_small(problem, budget):
            low = budget + 1
        else:
            high = budget
    return low
