"""What `forward` writes into containers and objects of many kinds, against plain PyTorch."""

import array
import collections
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchremat as tr


class Logged:
    """Notes the names that are set."""

    def __init__(self):
        vars(self).update(names=[], value=torch.zeros(4))

    def __setattr__(self, name, value):
        self.names.append(name)
        vars(self)[name] = value


class Doubling(dict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setitem__(f"{key} again", value)


class Reversed(list):
    def extend(self, items):
        super().extend(reversed(list(items)))


class Described:
    @property
    def value(self):
        return self.own

    @value.setter
    def value(self, value):
        self.own = value


def closure():
    value = torch.zeros(4)

    def put(y):
        nonlocal value
        value = y

    return SimpleNamespace(put=put, get=lambda: value)


def move_to_the_end(held, y):
    held["a"] = y
    held.move_to_end("a")


def count_and_keep(held, y):
    held.counts.update(["a"])
    held.value = y


WRITES = {
    "attribute": (SimpleNamespace, lambda held, y: setattr(held, "value", y)),
    "attribute that is noted": (Logged, lambda held, y: setattr(held, "value", y)),
    "property": (Described, lambda held, y: setattr(held, "value", y)),
    "dict with a method of its own": (Doubling, lambda held, y: held.__setitem__("a", y)),
    "list with a method of its own": (lambda: Reversed([1]), lambda held, y: held.append(y)),
    "ordered dict": (lambda: collections.OrderedDict(a=1, b=2), move_to_the_end),
    "default dict": (lambda: collections.defaultdict(list), lambda held, y: held["a"].append(y)),
    "user dict": (collections.UserDict, lambda held, y: held.__setitem__("a", y)),
    "chain map": (
        lambda: collections.ChainMap({}, {"b": 1}),
        lambda held, y: held.__setitem__("a", y),
    ),
    "deque": (lambda: collections.deque(maxlen=2), lambda held, y: held.append(y)),
    "front of a list": (lambda: [1], lambda held, y: held.insert(0, y)),
    "counter": (
        lambda: SimpleNamespace(counts=collections.Counter(), value=None),
        count_and_keep,
    ),
    "variable of a closure": (closure, lambda held, y: held.put(y)),
    "new objects": (
        SimpleNamespace,
        lambda held, y: setattr(held, "made", SimpleNamespace(value=y, more=[y, {"n": 1}])),
    ),
    "tuple that grows": (
        lambda: SimpleNamespace(values=()),
        lambda held, y: setattr(held, "values", (*held.values, y)),
    ),
}  # fmt: skip


def contents(held):
    """Texts, numbers and tensors in `held`, in order."""
    if isinstance(held, Tensor | str | int | float | type(None)):
        return [held]
    if isinstance(held, collections.UserDict):
        return contents(held.data)
    if isinstance(held, collections.ChainMap):
        return contents(held.maps)
    if isinstance(held, dict):
        return [x for key, value in held.items() for x in (key, *contents(value))]
    if isinstance(held, list | tuple | collections.deque):
        return [x for item in held for x in contents(item)]
    if callable(getattr(held, "get", None)):
        return contents(held.get())
    return contents(vars(held))


class Model(nn.Module):
    def __init__(self, held, write):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.held, self.write = held, write

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        self.write(self.held, y)
        return y.sin()


def train(model):
    found = []
    for step in range(4):
        x = torch.full((2, 4), step + 1.0, requires_grad=True)
        out = model(x)
        left = contents(model.held)
        new = [t for t in left[-1:] if isinstance(t, Tensor) and t.requires_grad]
        sum(t.sum() for t in (out, *new)).backward()
        found += [out.detach(), x.grad]
        found += [t.detach().clone() if isinstance(t, Tensor) else t for t in left]
    return found


@pytest.mark.parametrize("name", WRITES)
def test_what_is_left_is_what_plain_pytorch_leaves(name):
    make, write = WRITES[name]
    plain, ours = (train(wrap(Model(make(), write))) for wrap in (lambda m: m, tr.nn.wrap))
    assert len(plain) == len(ours)
    for a, b in zip(plain, ours, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


ARRAYS = [lambda: np.zeros(2), lambda: array.array("d", [0, 0]), lambda: bytearray(2)]


def count(held, y):
    held[0] = held[0] + 1


@pytest.mark.parametrize("make", ARRAYS)
def test_a_count_in_an_array_goes_on(make):
    held = make()
    wrapped = tr.nn.wrap(Model(held, count), "full")
    for step in range(4):
        wrapped(torch.ones(2, 4, requires_grad=True)).sum().backward()
        assert held[0] == step + 1
    assert {row.way for row in tr.nn.report(wrapped).rows} == {"tape"}


@pytest.mark.parametrize("make", ARRAYS)
def test_a_count_in_an_array_is_an_error_of_a_function(make):
    held = make()

    def fun(x):
        count(held, x)
        return x.sin()

    with pytest.raises(tr.errors.EffectError, match="writes to an array, of type"):
        tr.checkpoint(fun)(torch.ones(3, requires_grad=True))
    assert held[0] == 0
