"""Which states are saved: never too many, and the steps run again are those of the formulas."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchremat.loops.snapshots import Snapshots, choose_next, count_steps, num_snapshots


def fewest_steps(steps: int, snapshots: int) -> int:
    """The formula of Griewank and Walther (2000); one snapshot is the first state."""
    repeats = 0
    while math.comb(snapshots + repeats, snapshots) < steps:
        repeats += 1
    return repeats * steps - math.comb(snapshots + repeats, repeats - 1) if repeats else 0


def steps_again(steps: int, most: int | None) -> int:
    """How many steps the backward pass runs again, after a forward pass of so many."""
    snapshots = Snapshots(most)
    for position in range(1, steps):
        snapshots.visit(position)
    room = num_snapshots(steps) if most is None else most
    total, end = 0, steps
    for number, position in reversed(list(enumerate([0, *snapshots.positions]))):
        total += count_steps(end - position, room - number)
        end = position
    return total


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 20, 61, 100])
def test_the_backward_pass_of_a_known_length_runs_the_fewest_steps(steps):
    for most in range(steps):
        assert count_steps(steps, most) == fewest_steps(steps, most + 1)


@given(steps=st.integers(2, 400), most=st.integers(1, 30))
def test_the_next_state_is_on_the_way(steps, most):
    assert 1 <= choose_next(steps, most) < steps


@given(steps=st.integers(1, 300), most=st.one_of(st.none(), st.integers(0, 20)))
def test_there_are_never_more_snapshots_than_may_be(steps, most):
    snapshots = Snapshots(most)
    saved: set[int] = set()
    for position in range(1, steps):
        dropped = snapshots.visit(position)
        saved.add(position)
        saved.discard(dropped)
        assert snapshots.positions == sorted(saved)
        assert len(saved) <= (num_snapshots(position) if most is None else most)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 10, 20])
@pytest.mark.parametrize("steps", [50, 232, 1000])
def test_a_loop_of_unknown_length_runs_hardly_more_than_one_of_a_known_length(steps, most):
    known = fewest_steps(steps, most + 1) - (steps - 1)  # of which the forward pass runs some
    assert known <= steps_again(steps, most) <= 1.35 * known


def test_steps_run_again_grow_slowly():
    """A thousand steps run 1.8 times, thirty times as many 2.8 times."""
    assert steps_again(1000, None) < 1.8 * 1000
    assert steps_again(30_000, None) < 2.85 * 30_000
