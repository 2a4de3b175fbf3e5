"""Budgets of a whole device, which count what is there beside the step."""

import copy

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same
from tests.planning.models import GPT
from torchremat.checkpoint_policies import memory_budget
from torchremat.errors import ArgumentTypeError, BudgetError, PolicyError, PolicyValueError
from torchremat.measure import LiveBytes, resident_bytes


def tokens(batch):
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(0, 64, (batch, 48), generator=generator)


def peak_of_device(model, optimizer, batches, dtype=None):
    """The peak over forward and backward passes whose gradients are accumulated, twice."""
    with LiveBytes() as memory:
        for _ in range(2):
            optimizer.zero_grad()
            memory.add(model, list(optimizer.state.values()), batches)
            memory.reset_peak()
            for x in batches:
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    loss = model(x).sum()
                loss.backward()
            peak = memory.peak
            optimizer.step()
    return peak


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_budget_of_the_device_holds_while_gradients_are_accumulated(dtype):
    batches = [tokens(8), tokens(8)]
    plain = GPT()
    model = copy.deepcopy(plain)
    plain_peak = peak_of_device(plain, optimizer_of(plain), batches, dtype)
    optimizer = optimizer_of(model)
    there = resident_bytes(model, optimizer, batches, gradients=True)
    limit = there + (plain_peak - there) * 7 // 10
    tr.nn.wrap(model, memory_budget(limit, resident=there))
    assert peak_of_device(model, optimizer, batches, dtype) <= limit
    assert tr.nn.report(model).plans == 1
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_state_that_is_still_to_come_counts_as_much_as_when_it_is_there():
    model = GPT()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "amsgrad": True},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
    )
    before = resident_bytes(model, optimizer)
    model(tokens(2)).sum().backward()
    optimizer.step()
    with LiveBytes() as memory:
        memory.add(model, list(optimizer.state.values()))
    assert before == resident_bytes(model, optimizer) == memory.live
    gradients = sum(p.grad.nbytes for p in model.parameters())
    assert resident_bytes(optimizer, gradients=True) == before + gradients


def test_memory_that_is_shared_counts_once():
    model = nn.Linear(8, 8, bias=False)
    twin = nn.Linear(8, 8, bias=False)
    twin.weight = model.weight
    assert resident_bytes(model, twin, [model.weight, model.weight[0]]) == 256
    assert resident_bytes(model, twin, gradients=True) == 512
    frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
    assert resident_bytes(frozen, gradients=True) == 256


def test_a_fraction_is_of_the_whole_device():
    model, there = GPT(), 1 << 20
    wrapped = tr.nn.wrap(copy.deepcopy(model), memory_budget("90%", resident=there))
    x = tokens(8)
    with LiveBytes() as memory:
        model(x).sum().backward()
    plain = memory.peak
    with LiveBytes() as memory:
        wrapped(x).sum().backward()
    assert memory.peak <= 0.9 * (plain + there) - there
    (line,) = tr.nn.report(wrapped).budgets
    assert f"({int(0.9 * (plain + there))} bytes)" in line


@pytest.mark.slow
def test_errors_name_the_bytes_of_the_device():
    x, there = tokens(8), 1 << 20
    with pytest.raises(BudgetError, match=r"bytes, 1.00 MiB of it there anyway") as alone:
        tr.nn.wrap(GPT(), memory_budget(there + 4096, resident="1MiB"))(x)
    least = alone.value.least_bytes
    tr.nn.wrap(GPT(), memory_budget(least, resident="1MiB"))(x)


class Routed(nn.Module):
    """It cannot be one graph: which values are read depends on values."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            rows = (x[:, 0] > 0).nonzero()[:, 0]
            x = x + torch.tanh(block(x))
            x = x.index_add(0, rows, torch.sin(x[rows]))
        return x


def test_tapes_count_what_is_there_too():
    x, there = torch.randn(256, 64), 1 << 20
    model = Routed()
    with LiveBytes() as memory:
        model(x).sum().backward()
    limit = there + int(0.8 * memory.peak)
    wrapped = tr.nn.wrap(model, memory_budget(limit, resident=there))
    for _ in range(3):
        model.zero_grad()
        with LiveBytes() as memory:
            wrapped(x).sum().backward()
    assert memory.peak <= limit - there
    assert tr.nn.report(model).plans == 1
    with pytest.raises(BudgetError, match="of it there anyway"):
        tr.nn.wrap(Routed(), memory_budget(there + 4096, resident=there))(x)


def test_options_are_checked():
    with pytest.raises(PolicyError, match="counts in a budget of peak memory alone"):
        memory_budget(saved="1MiB", resident="2MiB")
    with pytest.raises(PolicyValueError, match="nothing is left for the step"):
        memory_budget("1MiB", resident="2MiB")
    with pytest.raises(TypeError, match="resident=0.5 is not a number of bytes"):
        memory_budget("1MiB", resident=0.5)
    with pytest.raises(ArgumentTypeError, match="there is no tensor in it"):
        resident_bytes(torch.optim.AdamW)
    policy = memory_budget("3MiB", resident="1MiB")
    assert repr(policy) == "memory_budget('3MiB', resident='1MiB')"
    assert policy == memory_budget(3 << 20, resident=1 << 20) != memory_budget("3MiB")
    assert policy.spelling is None
