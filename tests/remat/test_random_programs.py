"""Random programs with a random policy for each node are equal to plain PyTorch, to the bit."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import torchremat as tr
from tests.helpers import Choosing, assert_same, derivatives
from tests.programs import Program, inputs

DRAWS = ("random", "dropout")

programs = st.tuples(st.integers(0, 10**6), st.integers(5, 40))
choices = st.lists(st.booleans(), min_size=1, max_size=40)
quick = settings(max_examples=25, deadline=None, derandomize=True, database=None)
slow = settings(
    max_examples=600, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def check(program, saved, order, without):
    """Value and derivatives, those of higher order where nothing random would be drawn again."""
    fun = Program(*program, without=without)
    args = [x.requires_grad_() for x in inputs(program[0])]
    wrt = [*args, fun.weight]
    expected = derivatives(fun, args, wrt, order=order)
    state = torch.get_rng_state()
    found = derivatives(tr.checkpoint(fun, policy=Choosing(saved)), args, wrt, order=order)
    assert_same(state, torch.get_rng_state(), "random state")
    for key, value in expected.items():
        assert_same(_zeros_for_none(value, wrt), _zeros_for_none(found[key], wrt), key)


def _zeros_for_none(value, like):
    """A derivative that is 0 may be `None`: autograd knows more or less of where it comes from."""
    if not isinstance(value, list | tuple) or len(value) != len(like):
        return value
    return [torch.zeros_like(t) if v is None else v for v, t in zip(value, like, strict=True)]


@quick
@example((628, 14), [False])  # functionalisation leaves other unused views in each trace
@given(programs, choices)
def test_second_derivatives(program, saved):
    check(program, saved, 2, DRAWS)


@quick
@given(programs, choices)
def test_random_numbers(program, saved):
    check(program, saved, 1, ())


@pytest.mark.slow
@slow
@given(programs, choices)
def test_many_second_derivatives(program, saved):
    check(program, saved, 2, DRAWS)


@pytest.mark.slow
@slow
@given(programs, choices)
def test_many_random_numbers(program, saved):
    check(program, saved, 1, ())
