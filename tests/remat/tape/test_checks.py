"""Writes that PyTorch does not see, on a tape: noticed in the first calls, and under `verify`."""

import pytest
import torch
from torch import nn

import torchremat as tr
from torchremat.errors import ConcretizationError, RecomputationError


def write_unseen(x):
    y = x.exp()
    if y.sum() > 0:
        y.detach().numpy()[0] += 1
    return (y * x).sin()


def branch(x):
    y = x.exp() * 2
    return y.sin() if y.sum() > 0 else y


def leaf():
    return torch.linspace(-1, 1, 5).requires_grad_()


def test_what_numpy_wrote_is_missed():
    with pytest.raises(RecomputationError, match=r"test_checks.py:\d+ \(write_unseen\)"):
        tr.checkpoint(write_unseen, policy="full")(leaf()).sum().backward()


def test_what_is_saved_has_it():
    ours, plain = leaf(), leaf()
    tr.checkpoint(write_unseen, policy="none")(ours).sum().backward()
    write_unseen(plain).sum().backward()
    assert torch.equal(ours.grad, plain.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_equal_values_pass(dtype):
    def fun(x):
        y = (x * 2).exp()
        return y.sin() * x if y.abs().sum() > 0 else y

    x = torch.tensor([0.5, float("nan"), 300.0, -1.0]).to(dtype).requires_grad_()
    tr.checkpoint(fun)(x).abs().sum().backward()
    assert x.grad is not None


def test_later_calls_are_checked_bit_by_bit_where_it_is_asked_for(monkeypatch):
    is_writing = False

    def fun(x):
        y = x.exp()
        if y.sum() > 0 and is_writing:
            y.detach().numpy()[0] += 1
        return (y * x).sin()

    checked = tr.checkpoint(fun, policy="full")
    for _ in range(5):
        checked(leaf()).sum().backward()
    is_writing = True
    monkeypatch.setattr(tr.config, "verify_recomputation", "bitwise")
    with pytest.raises(RecomputationError):
        checked(leaf()).sum().backward()


@pytest.mark.parametrize("setting", [None, "bitwise"])
@pytest.mark.parametrize("on_tape", [True, False])
def test_memory_that_an_operator_never_writes_is_not_compared(monkeypatch, on_tape, setting):
    """The loss makes rows for the longest target, and fills them as far as each target goes."""
    monkeypatch.setattr(tr.config, "verify_recomputation", setting)
    targets, lengths = torch.tensor([[1, 2, 3, 4], [1, 0, 0, 0]]), ([12, 5], [4, 1])
    if on_tape:  # the values of tensors are read
        lengths = tuple(map(torch.tensor, lengths))

    def fun(x):
        y = x.log_softmax(-1)
        return torch.nn.functional.ctc_loss(y, targets, *lengths) * y.mean()

    ours = torch.randn(12, 2, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    plain = ours.detach().clone().requires_grad_()
    monkeypatch.setattr(tr.config, "untraceable", "tape")
    result = tr.checkpoint(fun, policy="full")(ours)
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is filled with NaN
        result.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    fun(plain).backward()
    assert torch.equal(ours.grad, plain.grad)


class Branches(nn.Module):
    def forward(self, x):
        return branch(x)


def test_by_default_modules_write_tapes_and_functions_are_refused(monkeypatch):
    monkeypatch.setattr(tr.config, "untraceable", "modules")
    module, x = Branches(), leaf()
    expected = torch.autograd.grad(branch(x).sum(), x)
    for ours in (tr.checkpoint(module), tr.checkpoint(module.forward), tr.nn.wrap(Branches())):
        assert torch.equal(torch.autograd.grad(ours(x).sum(), x)[0], expected[0])
    with pytest.raises(ConcretizationError) as caught:
        tr.checkpoint(branch)(x)
    assert "config.untraceable = 'tape'" in caught.value.__notes__[0]
    monkeypatch.setattr(tr.config, "untraceable", "error")
    with pytest.raises(ConcretizationError):
        tr.checkpoint(Branches())(x)
