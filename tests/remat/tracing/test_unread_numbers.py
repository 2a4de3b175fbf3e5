"""Numbers among the arguments: one trace serves all values of those that the function ignores."""

import copy

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same


class Layer(nn.Module):
    """It passes on its options, as layers of transformers do, and `use` reads them or does not."""

    def __init__(self, use):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.use = use

    def forward(self, x, **options):
        return self.attend(torch.tanh(self.linear(x)), **options)

    def attend(self, x, scale=2.0, **options):
        return self.use(x * scale, **options)


class Model(nn.Module):
    def __init__(self, use, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Layer(use) for _ in range(depth))

    def forward(self, x, **options):
        x = x.cos()  # so that the input of the first layer is as that of others
        for layer in self.layers:
            x = layer(x, **options)
        return x


def check(use, calls, traces, select="layers.*"):
    """Gradients equal plain ones for each of the calls, and so many traces are made."""
    plain = Model(use)
    model = copy.deepcopy(plain)
    tr.nn.wrap(model, "full", select=select)
    for rows, options in calls:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, 8, generator=generator, requires_grad=True)
        found = []
        for each in (plain, model):
            each.zero_grad()
            y = each(x, **options)
            y.sum().backward()
            found.append((y, [p.grad for p in each.parameters()]))
        assert_same(found[1], found[0])
    assert tr.nn.report(model).traces == traces
    return model


def ignore(x, n=0, rate=0.0):
    return x.sin()


@pytest.mark.parametrize("select", ["layers.*", None])
def test_numbers_that_nothing_reads_cost_one_more_trace(select):
    check(ignore, [(3, {"n": n}) for n in range(6)], 2, select)
    check(ignore, [(3, {"n": n, "rate": n / 7}) for n in range(6)], 2, select)
    check(ignore, [(3, {"n": n % 2, "rate": n / 7}) for n in range(6)], 2, select)


def test_sizes_may_vary_with_them():
    check(ignore, [(n, {"n": n}) for n in range(3, 9)], 2)


def test_a_number_beside_one_that_is_read():
    def use(x, n, m):
        return x * n

    check(use, [(3, {"n": 1 + i % 2, "m": i}) for i in range(6)], 3)


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        ctx.n = n
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.n, None


def branch(x, n):
    return x.sin() if n > 2 else x.cos()


def kind(x, n):
    return x.sin() if type(n) is int else x.cos()


def look_up(x, n):
    return x * {0: 1.0, 1: 2.0}.get(n, 3.0)


def write_text(x, n):
    return x * len(f"{n:b}")


USES = {
    "multiply": lambda x, n: x * n,
    "own backward": OwnBackward.apply,
    "branch": branch,
    "look up": look_up,
    "text": write_text,
    "slice": lambda x, n: x[:, : n + 1].sum(1, keepdim=True) + x,
    "full": lambda x, n: x + torch.full((n + 1, 8), 0.5).sum(),
    "range": lambda x, n: sum((x * i for i in range(n)), x),
    "fill": lambda x, n: x + torch.tensor(n),
    "add to": lambda x, n: x * (1 + n + 1),
    "keyword": lambda x, n: torch.add(x, x, alpha=n),
    "tuple": lambda x, n: x.expand((n + 1, *x.shape)).sum(0),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.sampled(3)
def test_numbers_that_are_read_have_traces_of_their_own(use):
    check(USES[use], [(3, {"n": n}) for n in (0, 1, 2, 3, 4, 1)], 5)


def test_the_type_of_a_number_is_the_same_for_all():
    check(kind, [(3, {"n": n}) for n in (0, 1, 2, 3.0, 4.0, 1)], 5)


def test_a_number_that_is_kept_is_read():
    kept = []

    class Keeps(nn.Module):
        def forward(self, x, n):
            self.last = n
            kept.append(n)
            return x.sin()

    module = Keeps()
    tr.nn.wrap(module, "full")
    x = torch.randn(3, 8, requires_grad=True)
    for n in (5, 6, 7, 8):
        module(x, n).sum().backward()
        assert module.last == n
        assert type(module.last) is int
    assert all(type(n) is int for n in kept)


def test_a_number_that_is_returned_is_that_of_the_call():
    f = tr.checkpoint(lambda x, n: (x.sin(), n))
    x = torch.randn(3, requires_grad=True)
    assert [f(x, n)[1] for n in (5, 6, 7, 6)] == [5, 6, 7, 6]


def test_numbers_inside_trees():
    def use(x, sizes):
        return x * sizes["read"][0]

    check(use, [(3, {"sizes": {"read": (1 + i % 2, 4 * i), "not": [i]}}) for i in range(6)], 3)
