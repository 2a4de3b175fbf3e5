"""From the incumbent of a search to its answer."""

from torchremat.planning.problem.backward_order import floor_of
from torchremat.planning.problem.problem import Problem
from torchremat.planning.problem.schedule_costs import costs_of
from torchremat.planning.search.incumbent import Incumbent
from torchremat.planning.search.solver_options import Solution

# A gap that a plan explains: the bound says little then.
_WIDE_GAP = 0.05
# Times the floor of the order. Below, most bytes are those of single operators.
_NEAR_FLOOR = 1.1
# HiGHS answers to within 1e-7. A bound is lowered by it, to claim no more than was proved.
_SAFETY = 1 - 1e-7


def build_solution(problem: Problem, incumbent: Incumbent, budget: int) -> Solution:
    """The answer of a search: its best schedule, and the least peak that it found."""
    assert incumbent.lowest is not None
    lowest, least = incumbent.lowest.replay.schedule, incumbent.lowest.costs.peak
    if incumbent.best is None:
        return Solution(None, float("inf"), least, incumbent.bound, least, lowest)
    schedule = incumbent.best.replay.schedule
    costs = costs_of(problem, schedule)
    bound = min(incumbent.bound * _SAFETY, costs.added_seconds)
    reason = ""
    if bound < (1 - _WIDE_GAP) * costs.added_seconds:
        reason = _explain_gap(problem, incumbent, budget)
    return Solution(schedule, costs.added_seconds, costs.peak, bound, least, lowest, reason)


def _explain_gap(problem: Problem, incumbent: Incumbent, budget: int) -> str:
    if budget < _NEAR_FLOOR * floor_of(problem):
        return "so near the least peak, recomputation takes memory that the bound counts in part"
    if incumbent.clock.elapsed_fraction >= 1:
        return "the search for a better plan, and for a proof, ended at its limit"
    return "the bound is that of decisions in fractions, and whole ones cost more"
