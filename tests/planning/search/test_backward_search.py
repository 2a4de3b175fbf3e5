"""The search from the last step to the first, against brute force: what it finds and proves."""

import math
from dataclasses import replace

from hypothesis import given, note

from tests.planning.schedules import least_peak_bound
from tests.planning.test_oracles import (
    CHAIN,
    cases,
    examples,
    least_peak,
    least_seconds,
    problems,
)
from tests.planning.test_solver import layers, peak
from torchremat.planning.problem.backward_order import floor_of, with_backward
from torchremat.planning.problem.problem import Problem
from torchremat.planning.problem.schedule_costs import costs_of
from torchremat.planning.problem.trial import Evaluator
from torchremat.planning.search.backward_search import (
    BackwardFrontier,
    BackwardSearch,
    Limits,
)
from torchremat.planning.search.clock import NEVER, Deadline, WorkTimer
from torchremat.planning.search.least_peak import find_lowest_by_steps, is_too_small
from torchremat.planning.search.solver_options import SolverOptions
from torchremat.planning.solver import solve_orders

LAYERS = layers(6)
TIGHT = int(1.1 * floor_of(LAYERS))


def least_found(search: BackwardSearch, found: BackwardFrontier, budget: int) -> float:
    """The least time that what was found adds, with the forward pass; the backward pass fits."""
    evaluator, best = Evaluator(search.problem, budget), math.inf
    for decisions in search.decisions(found):
        trial = evaluator(decisions)
        forward = len(trial.replay.schedule.forward)
        assert all(live <= budget for live in trial.costs.live[forward:])
        if trial.fits:
            best = min(best, trial.costs.added_seconds)
    return best


def test_all_that_may_be_saved_of_a_chain_is_found():
    """As in `test_oracles`: within 10 bytes value 0 is computed again, for 5 seconds, and no other.

    That values 1 and 2 are saved while the forward pass needs 0 is for the simulation to see.
    """
    search = BackwardSearch(CHAIN)
    found = search.run(10, Limits())
    assert not found.is_cut
    assert next(search.decisions(found)).saved == {1, 2}
    assert least_found(search, found, 10) == 5
    assert search.run(9, Limits()).is_proof


@examples(150)
@given(problem=problems())
def test_no_schedule_is_below_what_is_proved(problem):
    least, plain = least_peak(problem), peak(problem)
    note(f"{problem!r}\nleast {least}, plain {plain}")
    assert least_peak_bound(problem, plain) <= least
    assert not is_too_small(problem, least)


@examples(150)
@given(case=cases())
def test_what_is_found_keeps_within_the_budget_and_is_not_below_the_optimum(case):
    problem, budget = case
    note(f"{problem!r}\nbudget {budget}")
    search = BackwardSearch(problem)
    best = least_found(search, search.run(budget, Limits()), budget)
    optimum = least_seconds(problem, budget)
    assert best >= optimum - 1e-9


def test_a_narrow_search_near_a_schedule_loses_nothing():
    search, evaluator = BackwardSearch(LAYERS), Evaluator(LAYERS, TIGHT)
    limits = Limits(width=4, prompt=True)
    found = search.run(TIGHT, limits)
    assert found.is_cut
    first = next(t for t in map(evaluator, search.decisions(found)) if t.fits)
    again = search.run(TIGHT, limits, first.replay.schedule)
    assert least_found(search, again, TIGHT) <= first.costs.added_seconds
    assert search.run(TIGHT, replace(limits, states=3)).suffixes == {}


def test_the_lowest_is_where_the_proof_ends():
    lowest = find_lowest_by_steps(LAYERS, peak(LAYERS), NEVER)
    assert lowest is not None
    proved = least_peak_bound(LAYERS, lowest.costs.peak)
    assert proved <= lowest.costs.peak <= 1.01 * proved
    assert find_lowest_by_steps(LAYERS, peak(LAYERS), Deadline(WorkTimer(), -1.0)) is None


def test_the_order_in_which_the_budget_can_be_met_is_taken():
    """Gradients of weights at the end hold what they read; the first order meets no such budget."""
    last = LAYERS.backward[-1]
    weights = [o for o in LAYERS.backward[:-1] if LAYERS.operators[o].writes[0] in LAYERS.gradients]
    late = [o for o in LAYERS.backward[:-1] if o not in weights]
    worse: Problem = with_backward(LAYERS, [*late, *weights, last])
    budget = floor_of(worse) - 1
    assert budget > TIGHT
    solution = solve_orders([worse, LAYERS], budget, SolverOptions(seconds=5.0))
    assert solution.schedule is not None
    assert costs_of(LAYERS, solution.schedule).peak <= budget
