"""`torchremat.testing` passes what is right and finds planted faults."""

import pytest
import torch
from torch import nn

import torchremat as tr
from torchremat import testing
from torchremat.remat.op import autograd_functions


@pytest.mark.parametrize("policy", [None, "none", "dots", "full"])
def test_a_model_with_random_numbers_and_buffers(policy):
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 2)
    )
    before = [b.clone() for b in model.buffers()]
    found = testing.check_remat(model, torch.randn(5, 4), policy=policy)
    assert found.held_bytes <= found.plain_held_bytes
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert ("aten.gelu.default" in found.recomputed) == (policy != "none")


def test_a_function_is_counted():
    found = testing.check_remat(lambda x: x.sin().sin().sin(), torch.ones(3))
    assert found.held_bytes == 0
    assert found.recomputed == {"aten.sin.default": 2}


def test_a_wrong_gradient_is_found(monkeypatch):
    right = autograd_functions._apply_vjp

    def wrong(ctx, cotangents):
        hand_out = right(ctx, cotangents)
        return lambda: tuple(g if g is None else g * 1.0001 for g in hand_out())

    monkeypatch.setattr(autograd_functions, "_apply_vjp", wrong)
    with pytest.raises(AssertionError, match=r"gradients\[0\] of shape \(3,\) differs"):
        testing.check_remat(torch.sin, torch.ones(3))


def test_a_wrong_output_is_found(monkeypatch):
    right = autograd_functions.run_program

    def wrong(*args, **options):
        return tuple(out + 1 for out in right(*args, **options))

    monkeypatch.setattr(autograd_functions, "run_program", wrong)
    with pytest.raises(AssertionError, match=r"outputs\[0\]"):
        testing.check_remat(torch.sin, torch.ones(3))


def test_check_grads():
    x = torch.randn(2, 3, dtype=torch.float64)
    w = torch.randn(3, 3, dtype=torch.float64)
    testing.check_grads(tr.checkpoint(lambda x, w: torch.tanh(x @ w)), x, w)


class _WrongCube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.saved_tensors[0] ** 2


def test_check_grads_finds_a_wrong_derivative():
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        testing.check_grads(tr.checkpoint(_WrongCube.apply), torch.ones(2, dtype=torch.float64))


def test_check_grads_of_bad_input():
    with pytest.raises(ValueError, match="need float64 or complex128"):
        testing.check_grads(torch.sin, torch.ones(2))
    with pytest.raises(ValueError, match="order 1 or 2"):
        testing.check_grads(torch.sin, torch.ones(2, dtype=torch.float64), order=3)


def test_check_grads_takes_trees():
    x = torch.linspace(0.1, 1, 3, dtype=torch.float64)
    tr.testing.check_grads(lambda pair: {"y": pair[0] * pair[1]["w"]}, (x, {"w": x.clone()}))
    with pytest.raises(ValueError, match="convert it with .double"):
        tr.testing.check_grads(lambda pair: pair[0], (x.float(),))
