"""Random functions of one element over piles: values and gradients are those of a loop.

A function is a chain of steps on a matrix `[n, 3]`, drawn from a seed. A step may be refused with
a line, which is right, and may run in a loop. What runs gives what a loop gives.
"""

import random

import pytest
import torch
import torch.nn.functional as F

from tests.batching.ragged.checks import check, pile_of
from torchremat import checkpoint
from torchremat.batching import pile_axis
from torchremat.errors import RaggedError

TABLE = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
SIZES = [
    lambda n: n,
    lambda n: n - 1,
    lambda n: 2 * n,
    lambda n: n // 2,
    lambda n: 9 - n,
    lambda n: n % 3,
    lambda n: torch.sym_min(n, 4),
    lambda n: 3,
    lambda n: -2,
]
STEPS = [
    lambda x, t, a, b: x[a:],
    lambda x, t, a, b: x[:a],
    lambda x, t, a, b: x[a:b],
    lambda x, t, a, b: x[::2] * a,
    lambda x, t, a, b: torch.cat([x, t[:a]]),
    lambda x, t, a, b: torch.cat([t[a:b], x[:1]]),
    lambda x, t, a, b: x + t[: x.shape[0]],
    lambda x, t, a, b: x - t[a],
    lambda x, t, a, b: x + x[a],
    lambda x, t, a, b: x.roll(a, 0),
    lambda x, t, a, b: x.roll(1),
    lambda x, t, a, b: x.flip(0).cumsum(0),
    lambda x, t, a, b: F.pad(x, (0, 0, a, 1), value=0.5),
    lambda x, t, a, b: (x @ x.T).tril(a) @ x,
    lambda x, t, a, b: (x @ x.T)[:, a:] @ x[a:],
    lambda x, t, a, b: x.softmax(0) * len(x),
    lambda x, t, a, b: x / (1 + x.shape[0]) + b,
    lambda x, t, a, b: x.sum(0, keepdim=True).expand(x.shape[0], 3) - x,
    lambda x, t, a, b: x * torch.arange(x.shape[0])[:, None],
    lambda x, t, a, b: torch.linspace(0, 1, len(x), dtype=x.dtype)[:, None] * x,
    lambda x, t, a, b: x.narrow(0, 0, len(x) // 2),
    lambda x, t, a, b: x.sin().unsqueeze(1).squeeze(1),
    lambda x, t, a, b: checkpoint(lambda x: x.cos() + t[: x.shape[0]])(x),
    lambda x, t, a, b: x.reshape(-1).view(-1, 3).T.contiguous().T,
    lambda x, t, a, b: x if a > 1 else 2 * x,
]


def draw_function(draw):
    steps = [
        (draw.choice(STEPS), draw.choice(SIZES), draw.choice(SIZES))
        for _ in range(draw.randint(1, 4))
    ]

    def function(x, table):
        for step, a, b in steps:
            n = x.shape[0]
            x = step(x, table, a(n), b(n))
        return x

    return function


def run(seed):
    """Whether the function ran; what it gives is compared."""
    draw = random.Random(seed)
    function = draw_function(draw)
    least = draw.choice([0, 1, 3])
    lengths = [draw.randint(least, 9) for _ in range(draw.randint(1, 4))]
    pile = pile_of(lengths, 3, seed=seed)
    try:
        for x in pile.to_list():
            function(x, TABLE)
    except (RuntimeError, IndexError, ValueError):
        return False  # of one element it is an error
    try:
        check(function, pile, TABLE.clone(), axes=[pile_axis, None], loops=True)
    except RaggedError:
        return False
    return True


@pytest.mark.parametrize("first", [0, 4, 56])
def test_a_function_gives_what_a_loop_gives(first):
    assert sum(map(run, range(first, first + 4))) > 1


@pytest.mark.slow
def test_many_functions_give_what_a_loop_gives():
    assert sum(map(run, range(1000, 3000))) > 600
