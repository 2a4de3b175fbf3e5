"""Traces leave no fake tensor in what a function writes to, though it fails."""

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.remat.escapes.test_slots import InSlots

LOG = []


def trace_as_graph(fun, *args):
    return tr.make_graph(fun)(*args)


def plan_all(fun, *args):
    return tr.plan(fun, *args, budget="100%")


TRACES = [tr.explain, trace_as_graph, tr.linearize, tr.estimate, plan_all]


def new_function(is_broken):
    held = SimpleNamespace(state=torch.zeros(3), list=[1], dict={"a": 2}, slots=InSlots())
    held.deep = [{"of": SimpleNamespace(inner=held.dict)}]

    def fun(x):
        y = x.sin()
        held.state, held.new = y, (y, 1)
        held.list.append(y)
        held.deep[0]["of"].inner["y"] = [y]
        held.slots.state = y
        LOG.append(y)
        if is_broken:
            raise ZeroDivisionError
        return (y.cos() + held.state).sum()

    return fun, held


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("is_broken", [False, True])
def test_no_fake_tensor_is_left(trace, is_broken):
    fun, held = new_function(is_broken)
    state = held.slots.state
    x = torch.ones(3, requires_grad=True)
    if is_broken:
        with pytest.raises(ZeroDivisionError):
            trace(fun, x)
    else:
        trace(fun, x)
    gc.collect()
    assert torch.equal(held.state, torch.zeros(3))
    assert not hasattr(held, "new")
    assert held.list == [1]
    assert held.dict == {"a": 2}
    assert held.slots.state is state
    assert LOG == []


@pytest.mark.parametrize("trace", TRACES)
def test_arguments_are_left_as_they_were(trace):
    held = SimpleNamespace(x=torch.ones(3, requires_grad=True))
    x, many = held.x, [torch.ones(3)]

    def fun(held, many):
        held.x = held.x.sin()
        many.append(held.x)
        return (held.x * many[0]).sum()

    trace(fun, held, many)
    assert held.x is x
    assert len(many) == 1


class Rebuilt(nn.Module):
    """Whose forward puts other modules in place, counts, and logs numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.config = SimpleNamespace(kind="sparse", sizes=[])
        self.count = 0

    def forward(self, batch):
        x = batch.pop("x")
        self.count += 1
        self.config.kind = "full"
        self.config.sizes.append(len(x))
        if self.count == 1:
            first = self.first
            del self.first
            self.first = nn.Sequential(first)
            self.seen = None
            self.eval()
        return self.last(self.first(x)).sum()


@pytest.mark.parametrize("trace", TRACES)
def test_modules_are_left_as_they_were_though_nothing_traced_is_in_them(trace):
    model, batch = Rebuilt(), {"x": torch.ones(2, 3, requires_grad=True), "y": 1}
    parts, keys = list(model.modules()), list(model.state_dict())
    items = list(batch.items())
    refused = pytest.raises(tr.EffectError, match="'training'")  # a plan is of what is replayed
    with refused if trace in (tr.estimate, plan_all) else nullcontext():
        trace(model, batch)
    assert list(model.modules()) == parts
    assert list(model.state_dict()) == keys
    assert model.count == 0
    assert model.training
    assert vars(model.config) == {"kind": "sparse", "sizes": []}
    assert [(k, id(v)) for k, v in batch.items()] == [(k, id(v)) for k, v in items]


class Reordered(nn.Module):
    """Whose forward takes an attribute away, and gives it back."""

    def __init__(self):
        super().__init__()
        self.kind, self.size = "sparse", 3
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        vars(self)["kind"] = vars(self).pop("kind")
        return self.last(x).sum()


@pytest.mark.parametrize("trace", TRACES[:3])
def test_attributes_stand_in_the_order_in_which_they_stood(trace):
    model = Reordered()
    before = list(vars(model))
    trace(model, torch.ones(2, 3, requires_grad=True))
    assert list(vars(model)) == before


def test_what_a_closure_logs_is_kept():
    lengths = []

    def fun(x):
        lengths.append(len(x))
        return x.sin().sum()

    tr.make_graph(fun)(torch.ones(3))
    assert lengths == [3]
