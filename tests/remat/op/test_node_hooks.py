"""Hooks on the node that all outputs of a checkpoint share."""

import pytest
import torch

import torchremat as tr
from tests.helpers import assert_same
from torchremat.errors import HookError

KINDS = ("register_hook", "register_prehook")


def outputs():
    x = torch.randn(3, requires_grad=True)
    return x, *tr.checkpoint(lambda x: (x.sin(), x.cos()))(x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_calls_itself_for_ever_is_refused_by_line(kind):
    _, y, z = outputs()
    calls = []

    def hook(*_):
        calls.append(1)
        assert len(calls) < 100
        z.backward(torch.ones(3), retain_graph=True)

    getattr(y.grad_fn, kind)(hook)
    with pytest.raises(HookError, match=r"the hook at test_node_hooks.py:\d+ \(hook\) on the grad"):
        y.backward(torch.ones(3), retain_graph=True)
    calls.clear()  # and it may be called again
    with pytest.raises(RecursionError, match="share one grad_fn"):
        y.backward(torch.ones(3), retain_graph=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_counts_its_calls_runs_another_backward_pass(kind):
    x, y, z = outputs()
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) == 1:
            z.backward(torch.ones(3), retain_graph=True)

    handle = getattr(y.grad_fn, kind)(hook)
    y.backward(torch.ones(3), retain_graph=True)
    assert len(calls) == 2
    torch.testing.assert_close(x.grad, x.detach().cos() - x.detach().sin())
    handle.remove()
    y.backward(torch.ones(3))
    assert len(calls) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_hook_returns_counts(kind):
    x, y, _ = outputs()
    getattr(y.grad_fn, kind)(lambda *grads: tuple(None if g is None else 2 * g for g in grads[0]))
    y.backward(torch.ones(3))
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


def outcome_with_hooks(make, hook_backward):
    """Calls of a hook of the first output, and gradients, where a loss reads some outputs."""
    x = torch.linspace(0.1, 0.9, 3).requires_grad_()
    y, z = make(lambda x: (x.sin(), x.cos()))(x)
    given = []

    def hook(gradient):
        assert len(given) < 100
        given.append(gradient.clone())
        if hook_backward:
            z.backward(torch.ones(3), retain_graph=True)
        return 2 * gradient

    handle = y.register_hook(hook)
    y.register_hook(lambda gradient: gradient + 1)
    grads = [
        torch.autograd.grad(loss, x, retain_graph=True)[0]
        for loss in (y.sum(), z.sum(), (y * z).sum())
        if not hook_backward
    ]
    if hook_backward:
        (y * z).sum().backward(retain_graph=True)
    handle.remove()
    return given, grads, *torch.autograd.grad((y + z).sum(), x), x.grad


@pytest.mark.parametrize("hook_backward", [False, True])
@pytest.mark.parametrize("way", [tr.checkpoint, lambda f: tr.jit(f, backend="eager")])
def test_hooks_of_one_output_as_in_plain_autograd(way, hook_backward):
    expected = outcome_with_hooks(lambda f: f, hook_backward)
    assert_same(outcome_with_hooks(way, hook_backward), expected)
