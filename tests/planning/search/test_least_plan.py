"""The least peak that an error names: no plan has a lower one, and as a budget it is met."""

import pytest
from hypothesis import given, note

from tests.helpers import one_in
from tests.planning.chains.test_cut_stages import recurrent
from tests.planning.schedules import plain_schedule
from tests.planning.test_oracles import examples, least_peak, problems
from tests.planning.test_solver import layers
from torchremat.planning.problem.orders import orders_of
from torchremat.planning.problem.problem import Problem
from torchremat.planning.problem.schedule_costs import costs_of
from torchremat.planning.search.solver_options import SolverOptions
from torchremat.planning.solver import solve, solve_orders

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def check_least(problem: Problem) -> set[int]:
    """The figures of all budgets that are refused, each checked against all plans."""
    orders = orders_of(problem)
    plain = costs_of(problem, plain_schedule(problem)).peak
    solutions = [solve_orders(orders, int(share * plain)) for share in SHARES]
    refused = {s.least_peak for s in solutions if s.schedule is None}
    peaks = [s.peak for s in solutions if s.schedule is not None]
    for least in refused:
        met = solve_orders(orders, least)
        assert met.schedule is not None
        assert costs_of(problem, met.schedule).peak == met.peak <= least
        assert least <= min(peaks, default=least)
    return refused


@examples(60)
@given(problem=problems())
def test_no_plan_has_a_lower_peak_than_errors_name(problem):
    note(f"{problem!r}")
    refused = check_least(problem)
    if refused:
        assert min(refused) >= min(map(least_peak, orders_of(problem)))


def test_the_least_peak_of_a_long_chain_needs_little_time():
    """Walks that free values one by one find nothing in it."""
    refused = solve(recurrent(60), 7, SolverOptions(seconds=4.0))
    assert refused.schedule is None
    assert refused.least_peak == 12  # two states, as many on their way, and a step


@pytest.mark.parametrize("depth", one_in(2, [5, 6, 2]))
def test_all_errors_of_one_problem_name_one_peak(depth):
    assert len(check_least(layers(depth))) == 1
