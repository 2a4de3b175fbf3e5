"""Counters and logs that the forward of a wrapped module only adds to count calls, as unwrapped."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchremat as tr

COUNT = 0


class Stats:
    total = 0

    def __init__(self):
        self.calls, self.tokens, self.log = 0, 0.3, []
        self.by_name, self.pair = {"a": 7, "b": "text"}, [1, 5]


class InSlots:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


def add(held, x):
    held.calls += 2


def add_fractions(held, x):
    held.tokens = held.tokens + 0.1


def log(held, x):
    held.log.append("called")


def add_in_containers(held, x):
    held.pair[0] += 1
    held.pair[0] *= 2
    held.by_name["a"] -= x.shape[0]


def add_all(held, x):
    add(held, x)
    add_fractions(held, x)
    log(held, x)
    add_in_containers(held, x)


def begin_anew(held, x):
    held.new = getattr(held, "new", 0) + 1


def set_a_number(held, x):
    held.calls = 5


def add_to_a_global(held, x):
    global COUNT
    COUNT += 1
    held.calls = COUNT


class Model(nn.Module):
    def __init__(self, count, held):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.count, self.held = count, held

    def forward(self, x):
        self.count(self.held, x)
        return torch.tanh(self.linear(x)).sin()


def contents(held):
    if isinstance(held, InSlots):
        return {"calls": held.calls}
    return {k: v.copy() if isinstance(v, list | dict) else v for k, v in vars(held).items()}


def train(model, held, with_resets):
    found = []
    for step in range(6):
        x = torch.full((2, 4), float(step), requires_grad=True)
        out = model(x)
        out.sum().backward()
        found.append((contents(held), out.detach(), x.grad))
        if with_resets and step == 3:
            held.calls, held.log = 50, []
            held.by_name["a"] = 0
            held.pair.append(2)
    return found


def assert_alike(ours, plain):
    for (our_contents, *our_tensors), (their_contents, *their_tensors) in zip(
        ours, plain, strict=True
    ):
        assert our_contents == their_contents
        torch.testing.assert_close(our_tensors, their_tensors, rtol=0, atol=0)


@pytest.mark.parametrize("with_resets", [False, True])
@pytest.mark.parametrize(
    "count", [add, add_fractions, log, add_in_containers, add_all, begin_anew, set_a_number]
)
def test_they_are_those_of_the_unwrapped_module(count, with_resets):
    plain, held = Stats(), Stats()
    expected = train(Model(count, plain), plain, with_resets)
    wrapped = tr.nn.wrap(Model(count, held), "full")
    assert_alike(train(wrapped, held, with_resets), expected)
    report = tr.nn.report(wrapped)
    assert {row.way for row in report.rows} == {"graph"}
    assert report.traces <= 2 + with_resets


@pytest.mark.parametrize("modules", [SimpleNamespace(calls=0), InSlots()])
def test_of_other_objects(modules):
    expected = [2, 4, 6, 8, 10, 12]
    wrapped = tr.nn.wrap(Model(add, modules), "full")
    assert [found[0]["calls"] for found in train(wrapped, modules, False)] == expected
    assert tr.nn.report(wrapped).traces == 1


def test_of_one_object_in_many_layers():
    held, plain = Stats(), Stats()
    model = nn.Sequential(*(Model(add_all, held) for _ in range(3)))
    unwrapped = nn.Sequential(*(Model(add_all, plain) for _ in range(3)))
    expected = train(unwrapped, plain, False)
    assert_alike(train(tr.nn.wrap(model, "full", select="*"), held, False), expected)


def test_a_counter_in_a_global_variable():
    global COUNT
    COUNT = 0
    held = Stats()
    wrapped = tr.nn.wrap(Model(add_to_a_global, held), "full")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is read: a trace for each value
        found = train(wrapped, held, False)
    assert [contents["calls"] for contents, *_ in found] == [1, 2, 3, 4, 5, 6]


def test_a_second_derivative_does_not_count():
    held = Stats()
    wrapped = tr.nn.wrap(Model(add, held), "full")
    x = torch.ones(2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(wrapped(x).sum(), x, create_graph=True)
    grad.sum().backward()
    assert held.calls == 2


def test_a_counter_that_is_no_number_any_more_is_traced_anew():
    held = Stats()
    wrapped = tr.nn.wrap(Model(add, held), "full")
    wrapped(torch.ones(2, 4, requires_grad=True))
    held.calls = "text"
    with pytest.raises(TypeError):
        wrapped(torch.ones(2, 4, requires_grad=True))
    held.calls = 1.5
    wrapped(torch.ones(2, 4, requires_grad=True))
    assert held.calls == 3.5
