"""What a schedule costs, by hand; and what is no schedule."""

from dataclasses import replace

import pytest

from tests.planning.schedules import plain_schedule
from torchremat.planning.problem.problem import Operator, Part, Problem, Schedule
from torchremat.planning.problem.schedule_costs import ScheduleError, check_schedule, costs_of

FORWARD, EITHER, BACKWARD = Part.FORWARD, Part.EITHER_PASS, Part.BACKWARD

SINE = Problem(
    operators=(
        Operator((), (0,), 2.0, FORWARD),  # y = mm(x, w)
        Operator((0,), (1,), 1.0, FORWARD),  # z = sin(y), an output
        Operator((0,), (2,), 1.0, EITHER),  # c = cos(y)
        Operator((2,), (3,), 1.0, BACKWARD),  # g = mul(ct, c)
        Operator((3,), (4,), 2.0, BACKWARD),  # dw = mm(x.T, g)
    ),
    nbytes=(4, 4, 4, 4, 2),
    outputs=frozenset({1}),
    gradients=frozenset({4}),
)


def test_the_parts_of_a_problem():
    assert SINE.producers == (0, 1, 2, 3, 4)
    assert SINE.forward == (0, 1)
    assert SINE.backward == (3, 4)
    assert SINE.known == {0, 1, 2}
    assert SINE.needed == {2}
    assert not SINE.offloadable
    assert replace(SINE, host_bytes_per_second=1.0).offloadable == {0}
    assert replace(SINE, backward_order=(4, 3)).backward == (4, 3)


@pytest.mark.parametrize(
    ("schedule", "live", "added"),
    [
        (plain_schedule(SINE), (4, 8, 12, 12, 10), 0.0),
        (Schedule((), (0, 1), (0, 2, 3, 4)), (4, 8, 8, 12, 12, 10), 2.0),
        (Schedule((2,), (0, 1, 2), (3, 4)), (4, 8, 12, 12, 10), 0.0),
    ],
)
def test_bytes_alive_and_seconds_added_by_hand(schedule, live, added):
    costs = costs_of(SINE, schedule)
    assert costs.live == live
    assert costs.peak == max(live)
    assert costs.added_seconds == added


def test_constants_are_held_besides():
    held = replace(SINE, constant=3, backward_constant=5)
    assert costs_of(held, plain_schedule(held)).live == (7, 11, 20, 20, 18)


def test_what_an_operator_needs_inside_is_alive_while_it_runs():
    inside = replace(SINE.operators[1], nbytes_inside=7)
    problem = replace(SINE, operators=(SINE.operators[0], inside, *SINE.operators[2:]))
    assert costs_of(problem, plain_schedule(problem)).live == (4, 15, 12, 12, 10)


def test_what_is_written_to_inputs_is_held_to_the_end_of_the_forward_pass():
    problem = replace(SINE, outputs=frozenset(), written=frozenset({0}))
    assert costs_of(problem, Schedule((2,), (0, 2, 1), (3, 4))).live == (4, 8, 12, 8, 6)


def test_a_value_that_is_written_again_is_another_from_then_on():
    schedule = Schedule((), (0, 1), (0, 2, 0, 2, 3, 4))
    costs = costs_of(SINE, schedule)
    assert costs.added_seconds == 2.0 * 2 + 1.0
    assert costs.live == (4, 8, 8, 12, 8, 12, 12, 10)


def test_what_is_offloaded_is_away_between_the_passes_and_waits_for_the_link():
    problem = replace(SINE, host_bytes_per_second=1.0)
    costs = costs_of(problem, Schedule((), (0, 1), (2, 3, 4), offloaded=(0,)))
    assert costs.link_seconds == (4 - 3) + (4 - 4)
    assert costs.added_seconds == costs.link_seconds


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (Schedule((), (0, 1), (2, 3, 4)), "operator 2 reads value 0, which is not there"),
        (Schedule((2,), (0, 1), (3, 4)), r"not made by the forward pass: values \[2\]"),
        (Schedule((0,), (0,), (2, 3, 4)), r"operators \[1\] do not run"),
        (Schedule((0,), (0, 1), (2, 3)), r"operators \[4\] do not run"),
        (Schedule((), (0, 1), (2, 3, 4), offloaded=(0,)), "offloaded, which may not be"),
    ],
)
def test_what_is_no_schedule_says_why(schedule, said):
    with pytest.raises(ScheduleError, match=said):
        check_schedule(SINE, schedule)


def test_nothing_is_offloaded_that_is_saved_or_not_made():
    problem = replace(SINE, host_bytes_per_second=1.0)
    with pytest.raises(ScheduleError, match="and saved besides"):
        check_schedule(problem, Schedule((0,), (0, 1), (2, 3, 4), offloaded=(0,)))
    with pytest.raises(ScheduleError, match="but not made by the forward pass"):
        check_schedule(problem, Schedule((), (), (0, 1, 2, 3, 4), offloaded=(0,)))
    with pytest.raises(ScheduleError, match="which may not be"):  # only the backward pass has it
        check_schedule(problem, Schedule((), (0, 1, 2), (3, 4), offloaded=(2,)))
