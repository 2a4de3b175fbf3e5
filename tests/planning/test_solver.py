"""Laws of the solver, beyond what `test_oracles.py` checks against brute force."""

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, note

from tests.planning.schedules import check_outer_programs, plain_schedule
from tests.planning.test_oracles import cases, examples, least_seconds
from torchremat.planning.milp.intervals import PeakPoint
from torchremat.planning.milp.linear_program import LinearProgram, silence
from torchremat.planning.milp.problem_index import ProblemIndex
from torchremat.planning.milp.saving_program import SavingProgram
from torchremat.planning.problem.backward_order import floor_of, reorder_backward
from torchremat.planning.problem.problem import Operator, Part, Problem
from torchremat.planning.problem.replay import Decisions, replay_of
from torchremat.planning.problem.schedule_costs import costs_of
from torchremat.planning.problem.trial import Evaluator
from torchremat.planning.search.solver_options import SolverOptions
from torchremat.planning.solver import solve

FORWARD, EITHER, BACKWARD = Part.FORWARD, Part.EITHER_PASS, Part.BACKWARD


def layers(depth: int, width: int = 4) -> Problem:
    """`depth` layers of `width` operators in a row, of bytes and seconds that vary, with weights.

    The backward pass reads each value once, in the opposite order, and keeps a gradient a layer.
    """
    operators: list[Operator] = []
    nbytes: list[int] = []

    def add(part: Part, reads: list[int], size: int, seconds: float) -> int:
        operators.append(Operator(tuple(reads), (len(nbytes),), seconds, part))
        nbytes.append(size)
        return len(nbytes) - 1

    known: list[int] = []
    for i in range(depth * width):
        known.append(add(FORWARD, known[-1:], (4, 8, 4, 16)[i % 4], (5.0, 1.0, 2.0, 1.0)[i % 4]))
    gradients: list[int] = []
    cotangent: list[int] = []
    for i in reversed(range(depth * width)):
        cotangent = [add(BACKWARD, [*cotangent, known[i]], 8, 2.0)]
        if i % width == 0:
            gradients.append(add(BACKWARD, [*cotangent, *known[i - 1 : i]], 2, 1.0))
    operators.append(Operator((*gradients, *cotangent), (), 0.0, BACKWARD))
    return Problem(
        tuple(operators), tuple(nbytes), frozenset(known[-1:]), frozenset(gradients), constant=3
    )


def peak(problem: Problem) -> int:
    """The peak without rematerialisation."""
    return costs_of(problem, plain_schedule(problem)).peak


QUICK = SolverOptions(seconds=5.0)


def test_the_figures_are_those_of_the_schedule():
    problem = layers(4)
    solution = solve(problem, peak(problem) // 2, QUICK)
    assert solution.schedule is not None
    costs = costs_of(problem, solution.schedule)
    assert solution.peak == costs.peak <= peak(problem) // 2
    assert solution.added_seconds == pytest.approx(costs.added_seconds)
    assert 0 < solution.lower_bound_seconds <= solution.added_seconds


def test_with_the_plain_peak_as_budget_nothing_is_computed_again():
    problem = layers(3)
    solution = solve(problem, peak(problem), QUICK)
    assert solution.added_seconds == 0
    assert solution.lower_bound_seconds == 0


def test_more_budget_never_costs_more():
    problem = layers(3)
    plain = peak(problem)
    seconds = [
        solve(problem, int(plain * share), QUICK).added_seconds
        for share in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_the_same_problem_has_the_same_answer():
    problem = layers(3)
    first, second = (solve(problem, peak(problem) // 2, QUICK) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_the_answer_is_proved_to_be_near_the_optimum(share):
    problem = layers(4)
    solution = solve(problem, int(share * peak(problem)), QUICK)
    assert solution.added_seconds <= 1.05 * solution.lower_bound_seconds


def test_a_budget_below_what_one_operator_needs_has_no_answer():
    problem = layers(3)
    solution = solve(problem, floor_of(problem) - 1, QUICK)
    assert solution.schedule is None
    assert solution.least_peak == costs_of(problem, solution.lowest).peak >= floor_of(problem)


def test_what_may_run_once_does_however_low_the_budget():
    problem = layers(2)
    operators = [replace(op, repeatable=i != 2) for i, op in enumerate(problem.operators)]
    problem = replace(problem, operators=tuple(operators))
    solution = solve(problem, int(0.6 * peak(problem)), QUICK)
    order = (*solution.lowest.forward, *solution.lowest.backward)
    assert order.count(2) == 1


def test_without_integer_programs_budgets_are_met_too():
    problem = layers(4)
    budget = int(0.6 * peak(problem))
    local, program = (
        solve(problem, budget, replace(QUICK, solver=solver)) for solver in ("local", "milp")
    )
    assert local.peak <= budget
    assert program.added_seconds <= local.added_seconds


def test_progress_goes_from_0_to_1():
    told: list[float] = []
    problem = layers(3)
    solve(problem, peak(problem) // 2, replace(QUICK, progress=told.append))
    assert told == sorted(told)
    assert told
    assert 0 <= told[0] <= told[-1] <= 1


def test_no_time_is_enough_for_some_answer():
    problem = layers(8)
    assert solve(problem, int(0.7 * peak(problem)), SolverOptions(seconds=0.0)).schedule is not None


@examples(60)
@given(case=cases())
@pytest.mark.parametrize("window", [None, 0, 1, 2])
@pytest.mark.sampled(2)
def test_every_schedule_is_an_answer_of_the_outer_program(window, case):
    problem, budget = case
    note(f"{problem!r}\nbudget {budget}")
    check_outer_programs(problem, budget, window, least_seconds(problem, budget))


@pytest.mark.parametrize("share", [0.65, 0.75, 0.85])
def test_the_decisions_of_the_program_cost_what_it_says(share):
    problem = layers(2)
    budget = int(share * peak(problem))
    moments = [PeakPoint(step) for step in range(len(problem.backward))]
    program = SavingProgram(ProblemIndex(problem), budget, moments, range(len(problem.forward)))
    answer = program.linear.solve(seconds=10.0)
    assert answer.x is not None
    trial = Evaluator(problem, budget)(program.decisions(answer.x))
    assert trial.costs.added_seconds == pytest.approx(answer.value)


def test_an_operator_may_run_before_it_is_needed():
    problem = layers(1)
    early = Decisions(frozenset({0}), early={0: frozenset({1})})
    schedule = replay_of(problem, early).schedule
    assert schedule.backward[0] == 1
    costs_of(problem, schedule)


def test_reordering_needs_no_more_memory():
    problem = layers(4)
    assert floor_of(reorder_backward(problem)) <= floor_of(problem)


def test_programs_print_nothing(capfd):
    program = LinearProgram()
    variables = [program.variable(1.0 + i % 3, integral=True) for i in range(30)]
    for i in range(25):
        program.at_least([(v, 1.0) for v in variables[i : i + 5]], 1.5)
    assert program.solve(seconds=5.0).x is not None
    with silence():
        os.write(1, b"not seen")
    os.write(1, b"seen")
    assert capfd.readouterr().out == "seen"


def test_a_program_that_cannot_be_met_has_an_infinite_bound():
    program = LinearProgram()
    x = program.variable(1.0)
    program.at_least([(x, 1.0)], 2.0)
    assert program.solve(seconds=1.0).bound == np.inf
    assert program.relax(seconds=1.0).answer.bound == np.inf


@pytest.mark.slow
def test_thousands_of_operators_are_planned_to_a_few_percent():
    problem = layers(600)
    solution = solve(problem, peak(problem) // 2)
    assert solution.added_seconds <= 1.1 * solution.lower_bound_seconds
