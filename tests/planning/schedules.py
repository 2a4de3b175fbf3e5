"""Schedules and bounds that tests and measurements compare plans with."""

from torchremat.planning.milp.intervals import PeakPoint
from torchremat.planning.milp.problem_index import ProblemIndex
from torchremat.planning.milp.saving_program import SavingProgram
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


def check_outer_programs(problem: Problem, budget: int, window: int | None, optimum: float) -> None:
    """Programs with all moments as rows, or half of them, bound the time of every schedule."""
    steps, positions = range(len(problem.backward)), range(len(problem.forward))
    for some in (1, 2):
        program = SavingProgram(
            ProblemIndex(problem),
            budget,
            [PeakPoint(step) for step in steps[::some]],
            positions[::some],
            window,
            outer=window is not None,
        )
        assert program.linear.solve(seconds=10.0).value <= optimum + 1e-5
        assert program.linear.relax(seconds=10.0).answer.bound <= optimum + 1e-5
