"""A backward pass asked for in two parts, as pipeline schedules do, computes again once."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchremat as tr

POLICIES = ["full", "dots", "none", "names:hidden"]


class Calls(TorchDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counted[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, x):
        hidden = tr.checkpoint_name(nn.functional.gelu(self.up(x)), "hidden")
        return self.down(nn.functional.dropout(hidden, 0.3)).sin()


def make(policy):
    torch.manual_seed(0)
    model = Block()
    return model if policy is None else tr.nn.wrap(model, policy)


def call(model):
    torch.manual_seed(1)
    x = torch.randn(3, 4, requires_grad=True)
    return x, model(x), torch.randn(3, 4)


def whole(policy):
    model = make(policy)
    x, y, ct = call(model)
    with Calls() as calls:
        found = torch.autograd.grad(y, [x, *model.parameters()], ct)
    return found, calls.counted


def in_parts(policy, between=lambda ct: ct):
    model = make(policy)
    x, y, ct = call(model)
    with Calls() as calls:
        first = torch.autograd.grad(y, x, ct, retain_graph=True)
        second = torch.autograd.grad(y, list(model.parameters()), between(ct))
    return [*first, *second], calls.counted


@pytest.mark.parametrize("policy", POLICIES)
def test_both_parts_together_run_what_the_whole_runs(policy):
    expected, _ = whole(None)
    found, calls = whole(policy)
    parts, calls_in_parts = in_parts(policy)
    for a, b, c in zip(parts, found, expected, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    computing = [n for n in calls if "gelu" in n or "mm" in n or "sin" in n or "cos" in n]
    assert computing
    assert {n: calls_in_parts[n] for n in computing} == {n: calls[n] for n in computing}


@pytest.mark.parametrize("policy", POLICIES)
def test_other_cotangents_have_other_gradients(policy):
    for between in (lambda ct: 2 * ct, lambda ct: ct.mul_(2)):
        found, _ = in_parts(policy, between)
        expected, _ = in_parts(None, between)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_what_is_handed_on_goes_with_the_second_part():
    model = make("full")
    x, y, ct = call(model)
    torch.autograd.grad(y, x, ct, retain_graph=True)
    assert y.grad_fn.second_part is not None
    torch.autograd.grad(y, list(model.parameters()), ct, retain_graph=True)
    assert y.grad_fn.second_part is None


def test_a_pass_that_is_asked_for_at_once_hands_nothing_on():
    model = make("full")
    _, y, ct = call(model)
    for _ in range(2):
        y.backward(ct, retain_graph=True)
        assert y.grad_fn.second_part is None


def test_changing_sizes_are_right_if_not_shared():
    model, plain = make("full"), make(None)
    for n in (2, 3, 5):
        for net in (model, plain):
            torch.manual_seed(n)
            x = torch.randn(n, 4, requires_grad=True)
            y = net(x)
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
            found = [dx, *torch.autograd.grad(y, list(net.parameters()), torch.ones_like(y))]
            if net is model:
                ours = found
        for a, b in zip(ours, found, strict=True):
            assert torch.equal(a, b)
