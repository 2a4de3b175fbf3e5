"""Schedules from one walk: within the budget, no better than brute force, low where it can be."""

import pytest
from hypothesis import given, note

from tests.planning.test_oracles import cases, examples, least_peak, least_seconds, problems
from tests.planning.test_solver import layers, peak
from torchremat.planning.problem.backward_order import floor_of, reorder_backward, with_backward
from torchremat.planning.problem.problem import Operator, Part, Problem
from torchremat.planning.problem.schedule_costs import costs_of
from torchremat.planning.problem.trial import Evaluator
from torchremat.planning.search.clock import Deadline, WorkTimer
from torchremat.planning.search.eviction import (
    RULES,
    Evictor,
    try_evictions,
)
from torchremat.planning.search.least_peak import find_lowest_by_eviction
from torchremat.planning.search.solver_options import SolverOptions
from torchremat.planning.solver import solve

FORWARD, BACKWARD = Part.FORWARD, Part.BACKWARD


def residual(depth: int) -> Problem:
    """`x = x + f(x)`, `depth` times, f in two operators with a wide value between.

    The gradient of what leads to the wide value reads x, after the wide cotangent was made.
    """
    operators: list[Operator] = []
    nbytes: list[int] = []

    def add(part: Part, reads: list[int], size: int) -> int:
        operators.append(Operator(tuple(reads), (len(nbytes),), 1.0, part))
        nbytes.append(size)
        return len(nbytes) - 1

    x = add(FORWARD, [], 2)
    read = []
    for _ in range(depth):
        wide = add(FORWARD, [x], 8)
        read.append((x, wide))
        x = add(FORWARD, [x, add(FORWARD, [wide], 2)], 2)
    dx, gradients = add(BACKWARD, [], 2), []
    for x_before, wide in reversed(read):
        wide_ct = add(BACKWARD, [dx], 8)
        wide_ct = add(BACKWARD, [wide_ct, wide], 8)
        inner = add(BACKWARD, [wide_ct], 2)
        gradients.append(add(BACKWARD, [wide_ct, x_before], 1))
        dx = add(BACKWARD, [dx, inner], 2)
    operators.append(Operator((*gradients, dx), (), 0.0, BACKWARD))
    return Problem(tuple(operators), tuple(nbytes), frozenset({x}), frozenset({*gradients, dx}))


@examples(60)
@given(case=cases())
def test_a_walk_costs_no_less_than_the_optimum(case):
    problem, budget = case
    note(f"{problem!r}\nbudget {budget}")
    evaluator, evictor = Evaluator(problem, budget), Evictor(problem)
    for saved in (problem.known, evaluator.fixed):
        for trial in try_evictions(evaluator, evictor, saved):
            costs = costs_of(problem, trial.replay.schedule)  # which it may have: nothing is amiss
            if trial.fits:
                assert costs.peak <= budget
                assert costs.added_seconds >= least_seconds(problem, budget) - 1e-9


@examples(60)
@given(problem=problems())
def test_the_lowest_trial_is_no_lower_than_any_schedule(problem):
    note(f"{problem!r}")
    trial = find_lowest_by_eviction(Evictor(problem), floor_of(problem), peak(problem))
    if trial is not None:
        assert trial.costs.peak >= least_peak(problem)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_what_the_evictor_answers_keeps_within_the_budget(rule, share):
    problem = layers(6)
    budget = int(share * peak(problem))
    decisions = Evictor(problem).decisions(budget, rule, problem.known)
    assert decisions is not None
    assert Evaluator(problem, budget)(decisions).fits


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_layers_are_brought_down_to_the_floor_of_their_order(depth):
    problem = layers(depth)
    trial = find_lowest_by_eviction(Evictor(problem), floor_of(problem), peak(problem))
    assert trial is not None
    assert trial.costs.peak == floor_of(problem)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_lowest_trial_is_that_of_brute_force_where_layers_have_residuals(depth):
    problem = residual(depth)
    trial = find_lowest_by_eviction(Evictor(problem), floor_of(problem), peak(problem))
    assert trial is not None
    assert trial.costs.peak == least_peak(problem)


def test_what_has_no_room_at_its_step_is_computed_a_step_before():
    """b needs 8 bytes inside: beside the 6 of the cotangent there is no room for it."""
    operators = (
        Operator((), (0,), 1.0, FORWARD),
        Operator((0,), (1,), 1.0, FORWARD, nbytes_inside=8),
        Operator((1,), (2,), 1.0, FORWARD, nbytes_inside=4),
        Operator((), (3,), 1.0, BACKWARD),
        Operator((3,), (4,), 1.0, BACKWARD),
        Operator((1, 4), (5,), 1.0, BACKWARD),
        Operator((5,), (), 0.0, BACKWARD),
    )
    problem = Problem(operators, (2, 1, 1, 1, 6, 1), frozenset({2}), frozenset({5}))
    decisions = Evictor(problem).decisions(12, RULES[0], ())
    assert decisions is not None
    assert 1 in {o for operators in decisions.early.values() for o in operators}
    assert Evaluator(problem, 12)(decisions).fits


def test_of_orders_with_one_floor_that_is_taken_which_leaves_more_room():
    """Autograd makes dx before dw, which reads x: dx is there while x is computed again."""
    forward = [Operator((i - 1,) if i else (), (i,), 1.0, FORWARD) for i in range(6)]
    backward = [Operator((), (6,), 1.0, BACKWARD)]
    nbytes, ct, gradients = [4, 4, 4, 4, 4, 1, 4], 6, []
    for i in range(4, -1, -1):
        n = len(nbytes)
        backward.append(Operator((ct, i), (n,), 1.0, BACKWARD))  # through the function
        backward.append(Operator((n,), (n + 1,), 1.0, BACKWARD))  # dx
        backward.append(Operator((n, i - 1) if i else (n,), (n + 2,), 1.0, BACKWARD))  # dw
        nbytes += [4, 4, 1]
        ct = n + 1
        gradients.append(n + 2)
    last = Operator((*gradients, ct), (), 0.0, BACKWARD)
    problem = Problem(
        (*forward, *backward, last), tuple(nbytes), frozenset({5}), frozenset({*gradients, ct})
    )
    better = reorder_backward(problem)
    assert floor_of(better) == floor_of(problem)
    assert better.backward[:4] == (6, 7, 9, 8)  # dw before dx
    budgets = range(least_peak(problem), peak(problem))
    for budget in budgets:
        assert least_seconds(better, budget) <= least_seconds(problem, budget)
    assert sorted(better.backward) == sorted(problem.backward)
    assert with_backward(better, problem.backward).backward == problem.backward


def test_a_budget_below_the_floor_is_refused_with_the_least_that_was_found():
    problem = layers(40)
    solution = solve(problem, floor_of(problem) - 1, SolverOptions(seconds=20.0))
    assert solution.schedule is None
    assert solution.least_peak <= 1.01 * floor_of(problem)


def test_there_may_be_no_time():
    problem = layers(3)
    assert (
        Evictor(problem, Deadline(WorkTimer(), -1.0)).decisions(peak(problem), RULES[0], ()) is None
    )
