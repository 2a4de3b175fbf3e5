"""Code that is replaced after a trace: the next call computes what plain PyTorch does then.

Each case runs a wrapped module and a plain copy before the change, after it and once it is undone,
and compares outputs and gradients to the bit.
"""

import copy
import functools
import gc
import sys
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchremat as tr
from tests.helpers import assert_same

HELPERS = """
import torch

FACTOR = 2.0

def scale(y): return y * FACTOR

def more(y): return scale(y)

def number(): return 3.0

def through(): return number()

class Rule:
    def apply(self, y): return y * 1.25
"""
helpers = types.ModuleType("helpers")
exec(compile(HELPERS, "/helpers.py", "exec"), vars(helpers))
NUMBER = 2.0


def own_helper(y):
    return y.sin()


class Child(nn.Module):
    def forward(self, x):
        return x.tanh()


class Base(nn.Module):
    def inherited(self, y):
        return y + 1


class Block(Base):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.GELU()
        self.child, self.rule = Child(), helpers.Rule()

    def scaled(self, y):
        return y * 1.5

    @staticmethod
    def shifted(y):
        return y - 0.5

    @property
    def level(self):
        return 0.75

    def forward(self, x):
        y = self.shifted(self.scaled(self.child(self.second(F.silu(self.act(self.first(x)))))))
        y = self.inherited(own_helper(y)) * self.level + helpers.more(y) * helpers.through()
        y = torch.relu(y) + y.square() * NUMBER
        return sum([self.rule.apply(y) * NUMBER for _ in range(2)])


def zeroed(*args, **kwargs):
    return args[0] * 0


def zeroed_method(self, x):
    return x * 0


PATCHES = {
    "F.gelu": (F, "gelu", zeroed),
    "F.silu": (F, "silu", zeroed),
    "F.linear": (F, "linear", zeroed),
    "torch.relu": (torch, "relu", zeroed),
    "method of tensors": (torch.Tensor, "square", zeroed),
    "method of tensors in C": (torch.Tensor, "tanh", zeroed),
    "module of functions": (sys.modules[__name__], "F", types.SimpleNamespace(silu=zeroed)),
    "helper": (sys.modules[__name__], "own_helper", zeroed),
    "helper elsewhere": (helpers, "more", zeroed),
    "helper of a helper": (helpers, "scale", zeroed),
    "helper that gives a number": (helpers, "through", lambda: 5.0),
    "helper of one that gives a number": (helpers, "number", lambda: 5.0),
    "number of a helper": (helpers, "FACTOR", 5.0),
    "number in a comprehension": (sys.modules[__name__], "NUMBER", 5.0),
    "own forward": (Block, "forward", zeroed_method),
    "forward of a child": (Child, "forward", zeroed_method),
    "forward of a child of PyTorch": (nn.Linear, "forward", zeroed_method),
    "method": (Block, "scaled", zeroed_method),
    "static method": (Block, "shifted", staticmethod(zeroed)),
    "property": (Block, "level", property(lambda self: 7.0)),
    "inherited method": (Base, "inherited", zeroed_method),
    "method that hides an inherited one": (Block, "inherited", zeroed_method),
    "method of an object": (helpers.Rule, "apply", zeroed_method),
    "code of a function": (own_helper, "__code__", (lambda y: y * 3).__code__),
    "code of a method": (Block.scaled, "__code__", (lambda self, y: y * 3).__code__),
    "code of its forward": (Block.forward, "__code__", (lambda self, x: x * 3).__code__),
}


def run(module, x):
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.sin().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def new_block():
    torch.manual_seed(0)
    return Block()


@pytest.mark.parametrize("policy", ["full", "dots"])
@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
@pytest.mark.sampled(3)
def test_what_is_replaced(patch, policy, monkeypatch):
    plain, x = new_block(), torch.randn(3, 4)
    block = tr.nn.wrap(new_block(), policy)
    assert_same(run(block, x), before := run(plain, x))
    for _ in range(3):
        monkeypatch.setattr(*patch, raising=False)
        assert_same(run(block, x), after := run(plain, x))
        assert not torch.equal(before[0], after[0])
        monkeypatch.undo()
        assert_same(run(block, x), before)
    assert block.forward.traces.num_made <= 3


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
@pytest.mark.sampled(3)
def test_what_is_replaced_inside_of_a_function(patch, monkeypatch):
    plain, x = new_block(), torch.randn(3, 4)
    block = copy.deepcopy(plain)
    outer = tr.checkpoint(lambda x: block(x).cos())
    assert_same(outer(x), plain(x).cos())
    monkeypatch.setattr(*patch, raising=False)
    assert_same(outer(x), plain(x).cos())
    monkeypatch.undo()
    assert_same(outer(x), plain(x).cos())


def test_what_one_instance_has(monkeypatch):
    plain, x = new_block(), torch.randn(3, 4)
    block = tr.nn.wrap(new_block(), "dots")
    assert_same(run(block, x), run(plain, x))
    for name, method in (("scaled", zeroed), ("inherited", zeroed), ("shifted", torch.sin)):
        with monkeypatch.context() as patch:
            patch.setattr(block, name, method)
            patch.setattr(plain, name, method)
            assert_same(run(block, x), run(plain, x))
        assert_same(run(block, x), run(plain, x))
    for layer in (block, plain):
        layer.child.forward = layer.first.forward = zeroed
        layer.rule.apply = zeroed
    assert_same(run(block, x), run(plain, x))


def test_a_function_that_is_imported_when_it_is_called(monkeypatch):
    monkeypatch.setitem(sys.modules, "helpers", helpers)

    @tr.checkpoint
    def f(x):
        import helpers as own
        from torch.nn.functional import gelu

        return gelu(own.more(x))

    x = torch.randn(3)
    assert_same(f(x), F.gelu(helpers.more(x)))
    monkeypatch.setattr(helpers, "more", torch.sin)
    assert_same(f(x), F.gelu(x.sin()))
    monkeypatch.setattr(F, "gelu", torch.cos)
    assert_same(f(x), x.sin().cos())


def test_code_of_a_checkpoint_that_another_one_finds_traced(monkeypatch):
    inner = tr.checkpoint(lambda x: helpers.more(x).sin())
    outer = tr.checkpoint(lambda x, n: inner(x) * n)
    x = torch.randn(3, requires_grad=True)
    for n in (1, 2):  # of which the second finds a trace of `inner`
        assert_same(outer(x, n), (x * 2.0).sin() * n)
    monkeypatch.setattr(helpers, "more", torch.cos)
    for n in (2, 1):
        assert_same(outer(x, n), x.cos().sin() * n)


def test_unchanged_code_costs_one_trace():
    block, x = tr.nn.wrap(new_block(), "dots"), torch.randn(3, 4)
    f = tr.checkpoint(lambda x: block.act(own_helper(x)))
    for _ in range(3):
        run(block, x)
        f(x)
        gc.collect()
    assert block.forward.traces.num_made == 1
    assert len(f._trace_cache.traces) == 1


def test_functions_that_are_made_anew_are_freed():
    block, x = tr.nn.wrap(new_block(), "dots"), torch.randn(3, 4)
    held = []
    for number in range(3):
        block.scaled = functools.partial(torch.mul, other=number)
        held.append(weakref.ref(block.scaled))
        run(block, x)
    del block.scaled
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


def test_a_wrapped_module_is_freed():
    block, x = tr.nn.wrap(new_block(), "dots"), torch.randn(3, 4)
    run(block, x)
    gone = weakref.ref(block)
    del block
    assert gone() is None


def test_a_forward_that_is_replaced_while_gradients_are_off(monkeypatch):
    block, x = tr.nn.wrap(new_block(), "dots"), torch.randn(3, 4)
    monkeypatch.setattr(Block, "forward", zeroed_method)
    with torch.no_grad():
        assert_same(block(x), x * 0)
    assert_same(block(x), x * 0)


def test_the_message_of_many_traces_names_the_function(monkeypatch):
    block, x = tr.nn.wrap(new_block(), "dots"), torch.randn(3, 4)
    kept = [lambda y, i=i: y * i for i in range(12)]
    with pytest.warns(tr.errors.RetraceWarning, match=r"the function helpers\.more changes"):
        for function in kept:
            monkeypatch.setattr(helpers, "more", function)
            block(x)
