"""Objects with `__slots__` that a function reads and writes, against plain PyTorch."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import torchremat as tr


class InSlots:
    __slots__ = ("count", "scale", "state")

    def __init__(self):
        self.scale = 2.0
        self.state = torch.ones(2, 4)


class Derived(InSlots):
    """Has attributes in slots and in a `__dict__`, and weak references."""

    __slots__ = ("__dict__", "__weakref__")

    def __init__(self):
        super().__init__()
        self.free = 1


@dataclass(frozen=True, slots=True)
class Frozen:
    scale: float = 2.0
    state: Any = None
    count: int = 0


class Reads(nn.Module):
    def __init__(self, held):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.held = held

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.held.scale + self.held.state


class Writes(Reads):
    def forward(self, x):
        before = self.held.state
        self.held.state = torch.tanh(self.linear(x)).sin()
        self.held.count = getattr(self.held, "count", 0) + 1
        return self.held.state * self.held.scale * self.held.count + before


class Nests(Reads):
    def forward(self, x):
        self.held.state = [self.held.state, {"y": self.linear(x).sin()}][-2:]
        result = self.held.state[1]["y"].cos()
        self.held.state = self.held.state[1]["y"]
        return result


def train(kind, held, wrap):
    torch.manual_seed(0)
    module = wrap(kind(held))
    found = []
    for step in range(4):
        x = torch.randn(2, 4, requires_grad=True)
        y = module(x)
        y.sum().backward()
        grads = [x.grad, *(p.grad.clone() for p in module.parameters())]
        found += [y.detach(), held.state.clone().detach(), *grads]
        found += [torch.tensor(getattr(held, "count", -1))]
        held.state = held.state.detach()
        if step == 1:
            held.scale, held.state = 3.0, torch.randn(2, 4)
        if step == 2 and hasattr(held, "count"):
            del held.count
    return found, module


@pytest.mark.parametrize("holder", [InSlots, Derived])
@pytest.mark.parametrize("kind", [Reads, Writes, Nests])
def test_steps_are_those_of_plain_pytorch(kind, holder):
    plain, _ = train(kind, holder(), lambda m: m)
    ours, module = train(kind, holder(), lambda m: tr.nn.wrap(m, "full"))
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    assert {row.way for row in tr.nn.report(module).rows} == {"graph"}


def test_a_global_in_slots_is_guarded():
    held = InSlots()
    checkpointed = tr.checkpoint(lambda x: torch.tanh(x) * held.scale + held.state)
    x = torch.randn(2, 4, requires_grad=True)
    for scale in (1.0, 2.0, 2.0):
        held.scale, held.state = scale, torch.randn(2, 4)
        assert torch.equal(checkpointed(x), torch.tanh(x) * scale + held.state)


def test_a_frozen_object_is_read():
    held = [Frozen(state=torch.ones(2, 4))]
    checkpointed = tr.checkpoint(lambda x: torch.tanh(x) * held[0].scale + held[0].state)
    x = torch.randn(2, 4, requires_grad=True)
    for scale in (1.0, 2.0):
        held[0] = Frozen(scale, torch.randn(2, 4))
        assert torch.equal(checkpointed(x), torch.tanh(x) * scale + held[0].state)


def test_a_failed_trace_leaves_slots_as_they_were():
    held = InSlots()
    before = held.state

    def fun(x):
        held.state = x.sin()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tr.explain(fun, torch.ones(3, requires_grad=True))
    assert held.state is before
