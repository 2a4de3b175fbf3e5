"""A replay writes to a part of a memory in place, where autograd has other parts of it."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import torchremat as tr
from torchremat.measure import LiveBytes
from torchremat.nn import report, wrap
from torchremat.remat.tape.contents import Geometry


def is_apart(one, other):
    return Geometry.of(one).is_apart_from(Geometry.of(other))


def shares_an_element(one, other, base):
    hits = torch.zeros_like(base)
    for view in (one, other):
        own = torch.zeros_like(base)
        own.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
        hits += own
    return bool((hits > 1).any())


def test_geometries_that_are_apart():
    base = torch.zeros(6, 8)
    rows, columns = base.chunk(2), base.chunk(4, 1)
    assert is_apart(rows[0], rows[1])
    assert is_apart(columns[0], columns[3])
    assert not is_apart(rows[0], columns[0])
    assert not is_apart(base[:, 0:4], base[:, 3:8])
    assert not is_apart(base.view(-1)[2:9], base.view(-1)[8:12])


def test_no_two_geometries_that_meet_are_apart():
    choose, found = random.Random(0), 0
    base = torch.zeros(2, 3, 4)
    for _ in range(2000):
        views = []
        order = choose.sample(range(3), 3)
        for _ in range(2):
            view = base.permute(*order)
            for dim in range(3):
                start = choose.randrange(view.shape[dim])
                length = choose.randint(1, view.shape[dim] - start)
                view = view.narrow(dim, start, length)
            views.append(view if choose.random() < 0.7 else view[..., ::2])
        if is_apart(*views):
            found += 1
            assert not shares_an_element(*views, base)
    assert found > 300


class Gates(nn.Module):
    """Gates in one memory, written in place part by part, and a branch on a value."""

    def __init__(self, seed):
        super().__init__()
        self.linear = nn.Linear(6, 24)
        self.seed = seed

    def forward(self, x):
        choose = random.Random(self.seed)
        for _ in range(3):
            # these parts have versions of their own, as in PyTorch's cells
            parts = list(self.linear(x).unsafe_chunk(4, choose.choice((1, -1))))
            for i in choose.sample(range(4), 4):
                name = choose.choice(("sigmoid_", "tanh_", "relu_", "exp_"))
                parts[i] = getattr(parts[i], name)()
                if choose.random() < 0.3:
                    parts.append(parts[i] * parts[i])
            choose.shuffle(parts)
            x = sum(a * b for a, b in itertools.pairwise(parts)).sigmoid()
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(3)
def test_bits(seed):
    torch.manual_seed(seed)
    model, x = Gates(seed), torch.randn(5, 6, requires_grad=True)

    def gradients():
        inputs = (x, *model.parameters())
        first = torch.autograd.grad(model(x).pow(2).sum(), inputs, create_graph=True)
        return first, torch.autograd.grad(sum(g.pow(2).sum() for g in first), inputs)

    expected = gradients()
    found = []
    for policy in ("full", "dots", lambda op, *_, **__: "sigmoid" in str(op)):
        wrap(model, policy)
        found.append(gradients())
        assert {row.way for row in report(model)} == {"tape"}
        tr.nn.unwrap(model)
    for first, second in found:
        assert all(map(torch.equal, first, expected[0]))
        assert all(map(torch.equal, second, expected[1]))


def test_the_gates_of_a_cell_take_their_memory_once():
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(32, 32)

        def forward(self, x):
            lengths = [12] * 8 + [x.shape[0]] * 8
            packed = rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
            out = rnn.pad_packed_sequence(self.lstm(packed)[0])[0]
            return out if out.sum() > -1e9 else -out

    torch.manual_seed(0)
    model, x = Cells(), torch.randn(14, 16, 32)
    peaks, gradients = [], []
    for is_wrapped in (False, True):
        if is_wrapped:
            wrap(model)
        model(x).sum().backward()
        model.zero_grad()
        with LiveBytes() as live:
            model(x).sum().backward()
        peaks.append(live.peak)
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))
    assert peaks[1] <= 1.05 * peaks[0]  # 1.6 of it where each write makes a copy
