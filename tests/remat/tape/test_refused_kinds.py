"""A call that cannot be one graph is not traced again, and nothing of it is kept."""

import gc
import warnings
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.helpers import assert_same
from torchremat.nn import wrap


class Shared(dict):
    """A container that one layer writes tensors to and the next reads, new in each call."""


class Cache:
    """The same as an object, which Python compares by identity."""

    def __init__(self):
        self.tensors = {}

    def __setitem__(self, name, tensor):
        self.tensors[name] = tensor


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.num_calls = []

    def forward(self, x, shared):
        self.num_calls.append(1)
        y = self.linear(x)
        shared["keys"] = y
        return (y * y[y > 0].sum()).sin()


@pytest.mark.parametrize("container", [Shared, Cache])
def test_a_refusal_is_remembered_for_values_that_are_new_in_each_call(container):
    torch.manual_seed(0)
    layer = Layer()
    wrap(layer)
    references, calls = [], []
    for _ in range(7):
        x, shared = torch.randn(3, 4), container()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.autograd.grad(layer(x, shared).sum(), layer.linear.weight)
        calls.append(len(layer.num_calls))
        y = nn.functional.linear(x, layer.linear.weight, layer.linear.bias)
        loss = (y * y[y > 0].sum()).sin().sum()
        assert_same(found, torch.autograd.grad(loss, layer.linear.weight), "bits")
        references.append(weakref.ref(shared))
        del shared
    assert [b - a for a, b in pairwise(calls[1:])] == [1] * 5  # no traces
    gc.collect()
    assert not any(reference() is not None for reference in references)


class Namespace(SimpleNamespace):
    """An object with tensors as its attributes."""


class _TakesNamespace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, state):
        return self.linear(state.x).sin()


@pytest.mark.parametrize("container", [Namespace, Cache])
def test_what_a_refused_call_was_given_is_freed_at_once(container):
    """A refusal has a traceback, whose frames have the arguments: no cycle may hold it."""
    layer, references = wrap(Layer() if container is Cache else _TakesNamespace()), []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            x = torch.randn(3, 4)
            given = (x, Cache()) if container is Cache else (Namespace(x=x),)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss = layer(*given).sum()
            loss.backward()
            references.append([weakref.ref(x), weakref.ref(given[-1])])
            del x, given, loss
        later = references[1:]  # a trace, tried in the first call, leaves cycles of its own
        assert [[r() is None for r in found] for found in later] == [[True, True]] * 2
    finally:
        gc.enable()
