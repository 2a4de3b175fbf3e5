"""Hooks on the node that all outputs of a checkpoint share."""

import pytest
import torch

import torchremat as tr
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
