"""Hooks of tensors inside a checkpoint: called with the gradients of each backward pass."""

import gc
import weakref

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same
from torchremat.errors import EffectError


class Keeps(nn.Module):
    """`register` puts a hook on a value of `forward`; what it keeps goes to `seen`."""

    def __init__(self, register):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 3))
        self.seen = []
        self.count = 0
        self.register = register

    def forward(self, x):
        y = (x * self.weight).sin()
        self.register(self, y)
        return y.exp()

    def keep(self, grad):
        self.seen.append(grad)

    def scale(self, grad):
        self.count += 1
        self.seen.append(grad.norm())
        return grad * 2


LAST = []


def keep_in_a_global(grad):
    LAST.append(grad)


REGISTER = {
    "a lambda keeps it": lambda m, y: y.register_hook(lambda g: m.seen.append(g)),
    "a method keeps it": lambda m, y: y.register_hook(m.keep),
    "a method counts and scales": lambda m, y: y.register_hook(m.scale),
    "a global list": lambda m, y: y.register_hook(keep_in_a_global),
    "computes only": lambda m, y: y.register_hook(lambda g: g.clamp(-1, 1) * 2),
    "computes with a value inside": lambda m, y: y.register_hook(lambda g, mask=y > 0: g * mask),
}


@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize("register", REGISTER.values(), ids=REGISTER)
def test_a_hook_of_a_tensor_sees_the_gradient_of_each_call(register, policy):
    def run(wrap):
        LAST.clear()
        module = Keeps(register)
        wrap(module)
        grads = []
        for scale in (1.0, 2.0, 3.0):
            x = (scale * torch.ones(3)).requires_grad_()
            module(x).sum().backward()
            grads.append(x.grad)
        return grads, module.weight.grad, module.seen, module.count, list(LAST)

    assert_same(run(lambda m: tr.nn.wrap(m, policy)), run(lambda m: m))


@pytest.mark.parametrize("name", ["a lambda keeps it", "a method counts and scales"])
def test_a_hook_does_not_keep_its_module_alive(name):
    module = tr.nn.wrap(Keeps(REGISTER[name]))
    module(torch.ones(3)).sum().backward()
    reference = weakref.ref(module)
    del module
    gc.collect()
    assert reference() is None


def test_a_hook_that_keeps_a_gradient_which_is_differentiated_again_is_an_error():
    seen = []

    def fun(x):
        y = x.sin()
        y.register_hook(lambda g: seen.append(g))
        return y.exp()

    x = torch.ones(3, requires_grad=True)
    out = tr.checkpoint(fun)(x).sum()
    with pytest.raises(EffectError, match="keeps the gradient"):
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        grad.sum().backward()


def test_a_function_without_any_tensor():
    assert tr.checkpoint(lambda x, y: (x + y, None, "text"))(1.5, 2) == (3.5, None, "text")


KEPT = []


class KeepsGradient(torch.autograd.Function):
    """Its backward pass leaves a tensor in a list, as code that logs gradients does."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        KEPT.append(g * y)
        return g * y, None


class KeepingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        return KeepsGradient.apply(self.lin(x), x).sin()


def test_what_a_backward_pass_of_the_user_keeps_is_that_of_each_call():
    block = KeepingBlock()
    kept = {}
    for way in ("plain", "wrapped"):
        if way == "wrapped":
            tr.nn.wrap(block, "full")
        torch.manual_seed(0)
        KEPT.clear()
        for _ in range(2):
            block(torch.randn(2, 3)).sum().backward()
        kept[way] = list(KEPT)
    assert len(kept["wrapped"]) == 2
    assert_same(kept["wrapped"], kept["plain"])


def test_a_graph_does_not_keep_what_a_backward_pass_of_the_user_keeps():
    KEPT.clear()
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(EffectError, match=r"test_backward_hooks\.py:\d+ \(backward\) changes KEPT"):
        tr.checkpoint(lambda x: KeepsGradient.apply(x, x.detach()))(x)
    assert KEPT == []


NUMBERS = [0]


class ReadsNumbers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * len(NUMBERS)


def test_what_the_forward_pass_changes_is_not_blamed_on_the_backward_pass():
    def f(x):
        NUMBERS[0] += 1
        return ReadsNumbers.apply(x) * NUMBERS[0]

    x, found = torch.ones(3), {}
    for name, function in {"plain": f, "checkpointed": tr.checkpoint(f)}.items():
        NUMBERS[0] = 0
        found[name] = [function(x.requires_grad_()).detach() for _ in range(3)]
        assert NUMBERS == [3]
    assert_same(found["checkpointed"], found["plain"])
