"""Layers that are alike, yet that some code tells apart, do not share a trace."""

import contextvars
import functools
import itertools
import threading
import weakref
from collections import deque
from typing import ClassVar

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.remat.sharing.stacks import Block, Stack, check_bits, count_traces, step

TABLE = {}
WEAK_TABLE = weakref.WeakKeyDictionary()
CHOSEN = []
NUMBERS = {}
LOCAL = threading.local()
CONTEXT = contextvars.ContextVar("CONTEXT")


class Registry:
    last = None
    __slots__ = ("held",)


REGISTRY = Registry()


class ByTable(Block):
    def forward(self, x):
        return super().forward(x) * TABLE[self]


class ByWeakTable(Block):
    def forward(self, x):
        return super().forward(x) * WEAK_TABLE[self]


class ByNumber(Block):
    def forward(self, x):
        return super().forward(x) * NUMBERS[id(self)]


class ByList(Block):
    def forward(self, x):
        return super().forward(x) * (2 if self in CHOSEN else 3)


class ByIdentity(Block):
    def forward(self, x):
        return super().forward(x) * (2 if REGISTRY.held is self else 3)


class ByClass(Block):
    first: ClassVar = deque()

    def forward(self, x):
        return super().forward(x) * (2 if self.first[0]() is self else 3)


class ByThread(Block):
    def forward(self, x):
        return super().forward(x) * LOCAL.current.scale


class ByContext(Block):
    def forward(self, x):
        return super().forward(x) * CONTEXT.get().scale


class ByParent(Block):
    def forward(self, x):
        return super().forward(x) * (2 if self.parent[0].layers[0] is self else 3)


class ByWeight(Block):
    """Reads the first layer's weight by another way than its own attributes."""

    def forward(self, x):
        return super().forward(x) * REGISTRY.held.up.weight.detach().sum()


class ByBoundMethod(Block):
    def forward(self, x):
        return self.method(x)

    def run(self, x):
        return super().forward(x) * self.scale


class ByAttributes(Block):
    def forward(self, x):
        return super().forward(x) * self.__dict__["scale"]


class ByObject(Block):
    def forward(self, x):
        return super().forward(x) * object.__getattribute__(self, "scale")


class ByOwnGetter(Block):
    def __getattribute__(self, name):
        return object.__getattribute__(self, name)

    def forward(self, x):
        return super().forward(x) * self.scale


class ByCachedMethod(Block):
    @functools.lru_cache  # noqa: B019
    def factor(self):
        return self.scale + 1

    def forward(self, x):
        return super().forward(x) * self.factor()


class ByVars(Block):
    def forward(self, x):
        return super().forward(x) * sum(v for v in vars(self).values() if type(v) is float)


def _fill_tables(model):
    for i, layer in enumerate(model.layers):
        TABLE[layer] = WEAK_TABLE[layer] = NUMBERS[id(layer)] = float(i + 2)


def _choose_second(model):
    CHOSEN[:] = [model.layers[1]]
    REGISTRY.held = model.layers[1]
    ByClass.first.clear()
    ByClass.first.append(weakref.ref(model.layers[1]))
    for layer in model.layers:
        layer.parent = [model]


def _set_scales(model):
    for i, layer in enumerate(model.layers):
        layer.scale = float(i + 2)
        layer.method = layer.run if hasattr(layer, "run") else None


def _set_current(model):
    _set_scales(model)
    for layer in model.layers:

        def note(module, args):
            LOCAL.current = module
            CONTEXT.set(module)

        layer.register_forward_pre_hook(note)


@pytest.mark.parametrize(
    ("kind", "prepare"),
    [
        (ByTable, _fill_tables),
        (ByWeakTable, _fill_tables),
        (ByNumber, _fill_tables),
        (ByList, _choose_second),
        (ByIdentity, _choose_second),
        (ByClass, _choose_second),
        (ByParent, _choose_second),
        (ByWeight, _choose_second),
        (ByThread, _set_current),
        (ByContext, _set_current),
        (ByBoundMethod, _set_scales),
        (ByAttributes, _set_scales),
        (ByVars, _set_scales),
        (ByObject, _set_scales),
        (ByOwnGetter, _set_scales),
        (ByCachedMethod, _set_scales),
    ],
)
def test_code_that_tells_layers_apart(kind, prepare):
    model = Stack([kind() for _ in range(3)])
    prepare(model)
    check_bits(model, torch.randn(3, 4), is_copied=False)
    assert count_traces(model) >= 2
    check_again = [None if t is None else t.clone() for t in step(model, torch.ones(3, 4))]
    tr.nn.unwrap(model)
    for ours, theirs in zip(check_again, step(model, torch.ones(3, 4)), strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


def test_closures_that_differ():
    def layer(scale):
        class Closed(Block):
            def forward(self, x):
                return super().forward(x) * scale

        return Closed()

    model = Stack([layer(2.0), layer(3.0)])
    check_bits(model, torch.randn(3, 4))
    assert count_traces(model) == 2


def test_functions_that_are_attributes():
    class Called(Block):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            return self.function(super().forward(x))

    def scaled(by):
        return lambda x: x * by

    double = scaled(2.0)
    functions = [double, double, scaled(2.0), scaled(3.0)]
    functions += [functools.partial(torch.mul, other=b) for b in (2.0, 2.0, 5.0)]
    model = Stack([Called(f) for f in functions])
    check_bits(model, torch.randn(3, 4))
    assert count_traces(model) == 5


def test_a_counter_that_all_layers_have():
    count = [0]

    class Counting(Block):
        def forward(self, x):
            count[0] += 1
            return super().forward(x) * count[0]

    model = Stack([Counting() for _ in range(3)])
    expected = step(model, torch.ones(3, 4))[0].clone()
    count[0] = 0
    tr.nn.wrap(model, select="layers.*")
    assert torch.equal(step(model, torch.ones(3, 4))[0], expected)


def test_an_iterator_that_all_layers_have():
    numbers = itertools.count()

    class Counting(Block):
        def forward(self, x):
            return super().forward(x) * next(numbers)

    model = Stack([Counting() for _ in range(3)])
    tr.nn.wrap(model, select="layers.*")
    step(model, torch.ones(3, 4))
    assert count_traces(model) == 3


def test_a_generator_of_each_layer():
    class Noisy(Block):
        def __init__(self, seed):
            super().__init__()
            self.generator = torch.Generator().manual_seed(seed)

        def forward(self, x):
            return super().forward(x) + torch.rand(x.shape, generator=self.generator)

    model = Stack([Noisy(seed) for seed in range(3)])
    expected = step(model, torch.ones(3, 4))[0].clone()
    for seed, layer in enumerate(model.layers):
        layer.generator.manual_seed(seed)
    tr.nn.wrap(model, select="layers.*")
    assert torch.equal(step(model, torch.ones(3, 4))[0], expected)


def test_layers_that_are_called_at_other_lines():
    class Lines(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            x = self.layers[0](2 * x).tanh()
            return self.layers[1](2 * x)

    model = Lines()
    check_bits(model, torch.randn(3, 4))
    assert count_traces(model) == 2  # operators note the line, where no line inside ran them


def test_a_checkpoint_inside():
    class Nested(Block):
        def forward(self, x):
            return tr.checkpoint(super().forward)(x)

    model = Stack([Nested() for _ in range(3)])
    check_bits(model, torch.randn(3, 4))
    names = {row.module for row in tr.nn.report(model)}
    assert {"layers.0.up", "layers.1.up", "layers.2.up"} <= names


@pytest.mark.parametrize("kind", [ByAttributes, ByVars, ByObject, ByOwnGetter])
def test_reads_that_are_not_seen_are_guarded(kind):
    model = Stack([kind() for _ in range(2)])
    _set_scales(model)
    check_bits(model, torch.randn(3, 4))
    model.layers[1].scale = 7.0
    check_bits(model, torch.randn(3, 4), wrap=False)
