"""Function modes of the user (`TorchFunctionMode`) around calls, as in plain PyTorch."""

import contextlib
import gc
import itertools

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import torchremat as tr
from tests.helpers import nothing_left_behind


class SineIsCosine(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.sin:
            return args[0].cos()
        return function(*args, **(kwargs or {}))


class SineIsTangent(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.sin:
            return args[0].tan()
        return function(*args, **(kwargs or {}))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).sin() * x


def step(model, mode, twice):
    x = torch.ones(2, 4, requires_grad=True)
    with mode() if mode else contextlib.nullcontext():
        y = model(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    found = [y.detach(), grad.detach()]
    if twice:
        grad.square().sum().backward()
        found.append(x.grad)
    return found


MODES = [None, SineIsCosine, SineIsTangent]


@pytest.mark.parametrize("order", list(itertools.permutations(MODES)))
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.sampled(3)
def test_a_call_is_that_of_its_mode(order, twice, policy):
    gc.collect()  # or the model of another case, alike and not yet freed, lends its trace
    plain, wrapped = Model(), tr.nn.wrap(Model(), policy)
    for mode in (*order, *order):
        expected, found = step(plain, mode, twice), step(wrapped, mode, twice)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert tr.nn.report(wrapped).traces == len(MODES)


def test_a_default_device_is_no_mode_of_the_user():
    gc.collect()
    wrapped = tr.nn.wrap(Model(), "full")
    for _ in range(2):
        step(wrapped, None, False)
        with torch.device("cpu"):
            step(wrapped, None, False)
    assert tr.nn.report(wrapped).traces == 1


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, tr.grad])
def test_a_derivative_inside_leaves_the_modes_as_they_were(transform):
    """`torch.autograd.grad` sets the user's mode and that of the trace aside."""

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def f(x):
        return transform(lambda x: (x.sin() * x).sum())(x)

    x = torch.randn(3)
    for mode in (torch.device("cpu"), Mode()):
        with mode:
            with nothing_left_behind():
                tr.make_graph(f)(x)
            with nothing_left_behind():
                found = tr.checkpoint(f)(x)
            torch.testing.assert_close(found, f(x), rtol=0, atol=0)
            with nothing_left_behind(), pytest.raises(ZeroDivisionError):
                tr.make_graph(lambda x: f(x) / (1 // 0))(x)
