"""Schedules near answers of programs that are above the budget, for steps in stages."""

import pytest

from tests.planning.chains.test_chain_optimum import BACKWARD, FORWARD, Builder
from tests.planning.chains.test_cut_stages import new_incumbent
from torchremat.planning.chains.cut_stages import try_stages
from torchremat.planning.milp.near_answers import search_near
from torchremat.planning.milp.whole_rounds import WholeRounds
from torchremat.planning.problem.replay import Decisions
from torchremat.planning.problem.schedule_costs import costs_of
from torchremat.planning.problem.trial import Evaluator
from torchremat.planning.solver import solve


def gated(steps):
    """Steps of an LSTM: a product gives four gates, from which the rest follows in no time."""
    builder = Builder()
    states, insides = [[]], []
    for _ in range(steps):
        gates = builder.add(FORWARD, states[-1][:1], nbytes=4, seconds=8.0)
        cell = builder.add(FORWARD, [gates, *states[-1][1:]])
        lively = builder.add(FORWARD, [cell])
        insides.append([gates, lively])
        states.append([builder.add(FORWARD, [gates, lively]), cell])
    cotangent = builder.add(BACKWARD, [])
    for state, inside in zip(states[-2::-1], insides[::-1], strict=True):
        cotangent = builder.add(BACKWARD, [cotangent, *inside, *state])
    return builder.build(cotangent)


def search(budget, find):
    problem = gated(60)
    evaluator, incumbent = Evaluator(problem, budget), new_incumbent()
    incumbent.note(evaluator(Decisions(problem.needed)))
    WholeRounds(evaluator, incumbent).run(has_integers=False)
    find(evaluator, incumbent)
    assert incumbent.best is not None
    assert incumbent.best.costs.peak <= budget
    return incumbent


def test_what_answers_for_less_memory_save_is_a_better_start_than_stages_alone():
    budget = 250
    alone = search(budget, try_stages).best.costs.added_seconds
    near = search(budget, lambda *found: search_near(*found, 5.0))
    assert near.best.costs.added_seconds < alone
    assert near.best.costs.added_seconds >= near.bound


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.7])
def test_plans_of_steps_in_stages_are_near_their_bound(fraction):
    problem = gated(60)
    plain = max(costs_of(problem, solve(problem, 1 << 30).schedule).live)
    solution = solve(problem, int(fraction * plain))
    assert solution.added_seconds <= 1.06 * solution.lower_bound_seconds
