"""The first rounds: a bound for every problem, and answers near it where a step peaks once."""

import importlib.util
import math

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from tests.planning.llama import llama_problem
from tests.planning.schedules import plain_schedule
from tests.planning.test_oracles import cases, examples, least_seconds
from tests.planning.test_solver import layers, peak
from torchremat.planning.milp.intervals import PeakPoint
from torchremat.planning.milp.linear_program import LinearProgram
from torchremat.planning.milp.problem_index import ProblemIndex
from torchremat.planning.milp.saving_program import SavingProgram
from torchremat.planning.milp.whole_rounds import WholeRounds
from torchremat.planning.problem.backward_order import floor_of, reorder_backward
from torchremat.planning.problem.problem import Operator, Part, Problem
from torchremat.planning.problem.replay import Decisions
from torchremat.planning.problem.schedule_costs import costs_of
from torchremat.planning.problem.trial import Evaluator
from torchremat.planning.search.clock import TimeSlice, WorkTimer
from torchremat.planning.search.incumbent import Incumbent
from torchremat.planning.search.solver_options import SolverOptions
from torchremat.planning.solver import solve


def rounds_for(problem: Problem, budget: int) -> WholeRounds:
    """First rounds that have not run yet, for a step of which the plain schedule was tried."""
    evaluator = Evaluator(problem, budget)
    incumbent = Incumbent(TimeSlice(WorkTimer(), 60.0), 0.002)
    incumbent.note(evaluator(Decisions(problem.needed)))
    return WholeRounds(evaluator, incumbent)


def bound_at_the_peak(problem: Problem, budget: int) -> float:
    """The relaxation with one moment: that at which the step without recomputation peaks."""
    trial = Evaluator(problem, budget)(Decisions(problem.needed))
    live, num_forward = trial.costs.live, len(trial.replay.schedule.forward)
    at = max(range(len(live)), key=live.__getitem__)
    assert at >= num_forward, "the peak is in the backward pass"
    moment = PeakPoint(trial.replay.steps[at - num_forward])
    return SavingProgram(ProblemIndex(problem), budget, [moment]).linear.relax().answer.value


@examples(80)
@given(case=cases())
@pytest.mark.parametrize("has_integers", [False, True])
def test_the_bound_is_below_every_schedule(has_integers, case):
    problem, budget = case
    note(f"{problem!r}\nbudget {budget}")
    rounds = rounds_for(problem, budget)
    rounds.run(has_integers=has_integers)
    assert rounds.incumbent.bound <= least_seconds(problem, budget) + 1e-6


@examples(60)
@given(
    costs=st.lists(st.floats(0.1, 5.0), min_size=4, max_size=4),
    rows=st.lists(st.lists(st.integers(-3, 3), min_size=4, max_size=4), min_size=1, max_size=4),
    prices=st.lists(st.floats(-1.0, 4.0), min_size=4, max_size=4),
)
def test_any_prices_prove_a_bound(costs, rows, prices):
    """Of all 16 answers in integers none costs less, however wrong the prices are."""
    program = LinearProgram()
    variables = [program.variable(cost) for cost in costs]
    for row in rows:
        program.at_least(zip(variables, map(float, row), strict=True), 1.0)
    answers = np.stack(np.meshgrid(*[[0, 1]] * 4), -1).reshape(-1, 4)
    allowed = answers[(answers @ np.array(rows).T >= 1).all(1)]
    least = min((float(a @ np.array(costs)) for a in allowed), default=math.inf)
    assert program._prove_bound(np.array(prices[: len(rows)])) <= least + 1e-9


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_hundreds_of_operators_are_planned_to_two_percent(share):
    problem = layers(80)
    budget = int(share * peak(problem))
    solution = solve(problem, budget)
    assert solution.schedule is not None
    assert solution.lower_bound_seconds >= (1 - 1e-5) * bound_at_the_peak(problem, budget) > 0
    assert solution.added_seconds <= 1.02 * solution.lower_bound_seconds


@pytest.mark.parametrize(
    "options",
    [
        SolverOptions(seconds=0.0),
        SolverOptions(is_prompt=True),
        SolverOptions(solver="local", seconds=1.0),
    ],
    ids=["no time", "prompt", "local"],
)
def test_there_is_a_bound_however_short_the_search(options):
    problem = layers(80)
    budget = int(0.6 * peak(problem))
    solution = solve(problem, budget, options)
    assert solution.lower_bound_seconds >= (1 - 1e-5) * bound_at_the_peak(problem, budget) > 0


@pytest.mark.parametrize("free", [(250, 1000, 8000), (1, 2, 8000)])
def test_integers_prove_a_bound_where_fractions_prove_none_though_the_time_is_over(
    monkeypatch, free
):
    """In fractions it costs nothing: parts of what may run in either pass run in both."""
    monkeypatch.setattr("torchremat.planning.milp.whole_rounds._FREE", free)
    operators = (
        Operator((), (0, 1), 1.0, Part.FORWARD),
        Operator((1,), (2,), 1.0, Part.FORWARD),
        Operator((0, 1), (3,), 4.0, Part.FORWARD),
        Operator((0, 2), (4, 5), 2.0, Part.EITHER_PASS),
        Operator((2, 5), (6,), 1.0, Part.EITHER_PASS),
        Operator((2, 3, 6), (7,), 1.0, Part.BACKWARD),
        Operator((5, 7), (8,), 1.0, Part.BACKWARD),
        Operator((4, 8), (9,), 1.0, Part.BACKWARD, nbytes_inside=2),
        Operator((9,), (), 0.0, Part.BACKWARD),
    )
    nbytes = (3, 7, 4, 2, 1, 6, 2, 5, 1, 3)
    problem = Problem(operators, nbytes, frozenset({0}), frozenset({9}), backward_constant=1)
    evaluator, timer = Evaluator(problem, 23), WorkTimer()
    incumbent = Incumbent(TimeSlice(timer, 1.0), 0.0)
    timer.charge(5.0)
    incumbent.note(evaluator(Decisions(problem.needed)))
    WholeRounds(evaluator, incumbent).run(has_integers=False)
    assert incumbent.bound == pytest.approx(0.0)
    WholeRounds(evaluator, incumbent).run()
    assert incumbent.bound == pytest.approx(least_seconds(problem, 23)) == 2.0


def test_a_wide_gap_has_a_reason():
    problem = layers(80)
    budget = peak(problem) // 4
    solution = solve(problem, budget, SolverOptions(solver="local", seconds=0.0))
    assert solution.added_seconds > 1.06 * solution.lower_bound_seconds
    assert solution.gap_reason.endswith("ended at its limit")
    near = solve(problem, budget)
    assert near.added_seconds <= 1.02 * near.lower_bound_seconds
    assert not near.gap_reason


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
@pytest.mark.parametrize("num_layers", [8, 16, 32])
def test_a_llama_is_planned_to_two_percent(num_layers):
    problem = reorder_backward(llama_problem(num_layers))
    least, plain = floor_of(problem), costs_of(problem, plain_schedule(problem)).peak
    left = []
    for share in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        budget = int(least + share * (plain - least))
        solution = solve(problem, budget)
        assert solution.lower_bound_seconds >= (1 - 1e-5) * bound_at_the_peak(problem, budget)
        left.append(solution.lower_bound_seconds / solution.added_seconds)
    assert min(left) >= 0.95
    assert math.prod(left) ** (1 / len(left)) >= 0.98
