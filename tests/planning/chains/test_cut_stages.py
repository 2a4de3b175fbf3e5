"""Stages: chains in which several values pass from step to step, and room that is left."""

import itertools

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from tests.planning.chains.test_chain_optimum import Builder, fewest_moves
from tests.planning.test_oracles import examples, problems
from torchremat.planning.chains.cut_stages import Stages, find_cuts, try_stages
from torchremat.planning.chains.spare_room import fill_room
from torchremat.planning.problem.problem import Operator, Part, Problem
from torchremat.planning.problem.replay import Decisions
from torchremat.planning.problem.schedule_costs import costs_of
from torchremat.planning.problem.trial import Evaluator
from torchremat.planning.search.clock import TimeSlice, WorkTimer
from torchremat.planning.search.incumbent import Incumbent
from torchremat.planning.solver import solve

FORWARD, BACKWARD = Part.FORWARD, Part.BACKWARD


def recurrent(steps: int, *, first: int = 1) -> Problem:
    """Steps of two states, each of one byte, from four values of one byte inside of the step.

    Those in the first step have `first` bytes.
    """
    builder = Builder()
    states: list[list[int]] = [[]]
    insides: list[list[int]] = []
    for step in range(steps):
        nbytes = 1 if step else first
        insides.append([builder.add(FORWARD, states[-1], nbytes) for _ in range(4)])
        states.append([builder.add(FORWARD, insides[-1]) for _ in range(2)])
    cotangent = builder.add(BACKWARD, [])
    for state, inside in zip(states[-2::-1], insides[::-1], strict=True):
        cotangent = builder.add(BACKWARD, [cotangent, *inside, *state])
    return builder.build(cotangent)


def new_incumbent() -> Incumbent:
    return Incumbent(TimeSlice(WorkTimer(has_wall=False), 1e9), 0.0)


def test_stages_are_cut_where_only_the_states_pass():
    problem = recurrent(8)
    cuts, *half = itertools.islice(find_cuts(problem), 3)  # those after lie inside of steps, too
    assert half == [cuts[::2], cuts[1::2]]
    stages = Stages(problem, cuts)
    assert stages.unit == 2
    assert [len(values) for values in stages.passing.values()] == [2] * 7
    assert not stages.long
    assert [demand.value for demand in stages.chain.demands] == [6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("states", [2, 4])
def test_states_are_saved_as_the_optimum_of_equal_steps_has_them(states):
    """A step takes six seconds, and its backward pass needs the four values inside again."""
    steps = 100
    problem = recurrent(steps)
    budget = 2 * states + 8  # and those inside, two cotangents, and two states on their way
    solution = solve(problem, budget)
    assert solution.schedule is not None
    assert costs_of(problem, solution.schedule).peak <= budget
    moves = fewest_moves(steps, states) - (steps - 1)
    assert solution.added_seconds <= 6 * moves + 4 * steps
    assert solution.lower_bound_seconds <= solution.added_seconds


@pytest.mark.parametrize("budget", [14, 20, 40, 80])
def test_what_is_tried_fits_and_adds_less_the_more_room_there_is(budget):
    problem = recurrent(24)
    found = []
    for room in (budget, budget + 8):
        incumbent = new_incumbent()
        try_stages(Evaluator(problem, room), incumbent)
        assert incumbent.best is not None
        assert incumbent.best.costs.peak <= room
        found.append(incumbent.best.costs.added_seconds)
    assert found[1] < found[0]


def test_a_chain_that_seems_to_need_more_than_the_budget_is_tried_with_the_least_room():
    """The first step is the widest, and nothing else is alive while it runs."""
    problem = recurrent(24, first=3)
    for budget, fits in ((16, True), (15, False)):
        incumbent = new_incumbent()
        try_stages(Evaluator(problem, budget), incumbent)
        assert incumbent.lowest is not None
        assert incumbent.lowest.costs.peak == 16
        assert (incumbent.best is not None) == fits


def with_early_gradient(steps: int, nbytes: int) -> Problem:
    """The steps of `recurrent`, and a gradient of `nbytes` bytes that the forward pass makes."""
    builder = Builder()
    states: list[int] = []
    made: list[list[int]] = []
    for _ in range(steps):
        inside = [builder.add(FORWARD, states) for _ in range(4)]
        made.append([*inside, *states])
        states = [builder.add(FORWARD, inside) for _ in range(2)]
    early = [builder.add(FORWARD, states, nbytes)] if nbytes else []
    cotangent = builder.add(BACKWARD, [])
    for values in made[::-1]:
        cotangent = builder.add(BACKWARD, [cotangent, *values])
    builder.operators.append(Operator((cotangent, *early), (), 0.0, BACKWARD))
    return builder.build(cotangent)


@pytest.mark.parametrize("steps", [24, 60])
def test_a_gradient_of_the_forward_pass_takes_its_bytes_and_no_more(steps):
    problem, without = with_early_gradient(steps, 3), with_early_gradient(steps, 0)
    assert len(problem.early_gradients) == 1
    assert not without.early_gradients
    for cuts in find_cuts(problem):
        stages = Stages(problem, cuts)
        assert stages.long == problem.early_gradients
        assert len(stages.chain.demands) >= len(cuts) // 2 - 1
    solutions = [solve(problem, 16 + 3), solve(without, 16)]
    assert solutions[0].added_seconds <= solutions[1].added_seconds
    lowest = []
    for step in (problem, without):
        incumbent = new_incumbent()
        try_stages(Evaluator(step, 0), incumbent)
        assert incumbent.lowest is not None
        lowest.append(incumbent.lowest.costs.peak)
    assert lowest[0] == lowest[1] + 3


def test_a_value_that_passes_most_of_the_cuts_is_saved():
    builder = Builder()
    context = builder.add(FORWARD, [])
    state, made = context, []
    for _ in range(12):
        inside = [builder.add(FORWARD, [state, context]) for _ in range(3)]
        state = builder.add(FORWARD, inside)
        made.append([*inside, state])
    cotangent = builder.add(BACKWARD, [])
    for values in made[::-1]:
        cotangent = builder.add(BACKWARD, [cotangent, context, *values])
    problem = builder.build(cotangent)
    for cuts in find_cuts(problem):
        stages = Stages(problem, cuts)
        assert context in stages.long
        assert all(context not in values for values in stages.passing.values())
    incumbent = new_incumbent()
    try_stages(Evaluator(problem, 14), incumbent)
    assert incumbent.best is not None
    assert context in incumbent.best.decisions.saved


def test_what_is_saved_besides_passes_no_cut_and_leaves_less_room():
    problem = recurrent(24)
    saved = frozenset({20, 21, 60})  # two values inside of a step, and a state
    evaluator, found = Evaluator(problem, 30), []
    for values in (frozenset(), saved):
        incumbent = new_incumbent()
        try_stages(evaluator, incumbent, saved=values)
        assert incumbent.best is not None
        assert values <= incumbent.best.decisions.saved
        found.append(incumbent.best.costs)
    for cuts in find_cuts(problem):
        stages = Stages(problem, cuts, saved)
        assert all(saved.isdisjoint(values) for values in stages.passing.values())
        assert stages.chain.constant >= Stages(problem, cuts).chain.constant + 3
    assert all(costs.peak <= 30 for costs in found)


@examples(150)
@given(problem=problems(), room=st.integers(0, 12))
def test_what_has_room_fits_and_takes_time_away(problem, room):
    evaluator = Evaluator(problem, 1 << 30)
    start = evaluator(Decisions(evaluator.fixed))
    evaluator = evaluator.under(start.costs.peak + room)
    incumbent = new_incumbent()
    fill_room(evaluator, incumbent, evaluator(start.decisions))
    note(f"{problem!r}\nroom {room}")
    seconds = start.costs.added_seconds
    for trial in incumbent.trials:
        assert trial.fits
        assert trial.costs.added_seconds <= seconds
        seconds = trial.costs.added_seconds


def test_all_that_is_recomputed_is_saved_where_there_is_room_for_it():
    problem = recurrent(6)
    evaluator = Evaluator(problem, 1000)
    incumbent = new_incumbent()
    fill_room(evaluator, incumbent, evaluator(Decisions(frozenset())))
    assert incumbent.best is not None
    assert incumbent.best.costs.added_seconds == 0
