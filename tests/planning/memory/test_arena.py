"""Addresses of values in one buffer: apart, in little more than the peak, and steps run there."""

import itertools
import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchremat as tr
from tests.planning.memory.one_buffer import OneBuffer
from torchremat.checkpoint_policies import from_plan
from torchremat.planning.memory.arena import ALIGNMENT, Arena, Moments, place

moments = st.tuples(st.integers(0, 12), st.integers(0, 6), st.integers(0, 9)).map(
    lambda t: (t[0], t[0] + t[1], 40 * t[2])
)


def rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def check(lifetimes: list[Moments], arena: Arena) -> None:
    placed = list(zip(lifetimes, arena.offsets, strict=True))
    for (a, at), (b, bt) in itertools.combinations(placed, 2):
        if a[0] <= b[1] and b[0] <= a[1] and a[2] and b[2]:
            assert at + a[2] <= bt or bt + b[2] <= at
    assert all(at % ALIGNMENT == 0 for at in arena.offsets)
    assert arena.nbytes == max((at + rounded(t[2]) for t, at in placed), default=0)
    alive = [
        sum(rounded(nbytes) for first, last, nbytes in lifetimes if first <= i <= last)
        for i in range(20)
    ]
    assert arena.peak == max(alive) <= arena.nbytes


@given(st.lists(moments, max_size=12))
def test_values_that_are_alive_together_lie_apart(lifetimes):
    check(lifetimes, place(lifetimes))


def least(lifetimes: list[Moments]) -> int:
    """The least buffer: in the order of its addresses each value lies as low as it can."""
    best = 1 << 62
    for order in itertools.permutations(lifetimes):
        placed: list[tuple[Moments, int]] = []
        for value in order:
            met = [(t, at) for t, at in placed if t[0] <= value[1] and value[0] <= t[1]]
            tops = [0, *(at + t[2] for t, at in met)]
            fits = [
                top
                for top in tops
                if all(top + value[2] <= at or at + t[2] <= top for t, at in met)
            ]
            placed.append((value, min(fits)))
        best = min(best, max(at + t[2] for t, at in placed))
    return best


def test_beside_the_least_buffer():
    draw = random.Random(0)
    ratios = []
    for _ in range(60):
        starts = [draw.randrange(6) for _ in range(6)]
        values = [(a, a + draw.randrange(4), 64 * draw.randrange(1, 9)) for a in starts]
        ratios.append(place(values).nbytes / least(values))
    assert min(ratios) == 1
    assert statistics.mean(ratios) <= 1.002
    assert max(ratios) <= 1.1


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 50)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.convolution(x))).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)).softmax(-1) * x.cos()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


@pytest.mark.parametrize("budget", ["100%", "75%", "least"])
def test_a_step_runs_in_one_buffer(budget):
    model = Layers()
    args = torch.randn(4, 3, 12, 12), torch.randint(0, 50, (4, 144))
    plan = tr.plan(model, *args, budget=budget)
    expected = torch.autograd.grad(model(*args), list(model.parameters()))
    run = tr.checkpoint(model, policy=from_plan(plan))
    run(*args).backward()
    timeline = plan.timeline()
    with OneBuffer(timeline) as step:
        found = torch.autograd.grad(run(*args), list(model.parameters()))
    assert all(map(torch.equal, found, expected))
    assert not step.left
    assert timeline.peak <= len(step.buffer) <= 1.05 * timeline.peak
