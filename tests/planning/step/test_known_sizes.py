"""Sizes between two that a job has planned for are known, and the budget holds for them too."""

import random
import re

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same
from torchremat.measure import LiveBytes
from torchremat.planning.problem.problem import Schedule
from torchremat.planning.step.known_sizes import KnownSizes


def schedule(n):
    return Schedule((n,), (), frozenset(), frozenset())


def graph_of(fun, *args):
    """The graph of `fun` for any number of rows."""
    wrapped = tr.checkpoint(fun)
    for size in (8, 12):
        wrapped(*(torch.ones(size, *a.shape[1:], requires_grad=True) for a in args))
    program, sizes = wrapped.last_call
    assert sizes
    return program.root_joint.module.graph


def test_a_plan_chosen_above_and_below_is_chosen_between():
    known = KnownSizes(graph_of(lambda x: x.sin().cos().sum(), torch.ones(1, 4)))
    a, b = schedule(1), schedule(2)
    known.note({"b": 2, "t": 8}, a, is_plain=False)
    known.note({"b": 4, "t": 16}, a, is_plain=False)
    known.note({"b": 8, "t": 16}, b, is_plain=False)
    assert known.find({"b": 3, "t": 9}) is a
    assert known.find({"b": 2, "t": 17}) is None  # longer than all
    assert known.find({"b": 1, "t": 8}) is None  # perhaps plain autograd keeps within the budget
    assert known.find({"b": 5, "t": 12}) is None  # two plans, above and below
    known.note({"b": 2, "t": 4}, b, is_plain=True)
    assert known.find({"b": 1, "t": 3}) is b


def test_sizes_that_may_fall_are_looked_at_each_time():
    """The second half of 8 + 100 rows is longer than that of 60 + 100."""
    known = KnownSizes(
        graph_of(lambda x: torch.ones(100 - x.shape[0], 2).sum() * x.sum(), torch.ones(1))
    )
    known.note({"b": 8}, schedule(1), is_plain=True)
    assert known.find({"b": 4}) is None


@pytest.mark.parametrize("budget", ["budget:60%", "budget:least"])
def test_steps_of_sizes_between_keep_within_the_budget_and_have_the_bits(budget):
    torch.manual_seed(0)
    plain = nn.Sequential(
        *[nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    )
    wrapped = tr.nn.wrap(nn.Sequential(*plain), budget)
    draw = random.Random(0)
    sizes = [(8, 40), (4, 30), *((draw.randint(1, 8), draw.randint(2, 40)) for _ in range(12))]

    def step(net, x):
        net.zero_grad()
        with LiveBytes() as memory:
            net(x).square().sum().backward()
        return [p.grad for p in net.parameters()], memory.peak

    for size in sizes:
        x = torch.randn(*size, 16)
        expected, _ = step(plain, x)
        found, peak = step(wrapped, x)
        assert_same(found, expected)
        (budget_said,) = tr.nn.report(wrapped).budgets
        assert peak <= int(re.search(r"\((\d+) bytes\)", budget_said)[1])
