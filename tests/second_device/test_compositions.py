"""Dropout that runs again, inside of what else a checkpoint may be in."""

import pytest
import torch
from torch.nn import functional as F

import torchremat as tr
from tests.helpers import assert_same
from tests.second_device.training import assert_trained_alike, build_encoder, make_input, train

pytestmark = pytest.mark.parametrize("late", ["copies last"], indirect=True)
"""No copy runs beside the operators here."""


def _function(x, w):
    return F.dropout(torch.tanh(x @ w), 0.3) @ w


def _draw(run):
    torch.manual_seed(5)
    return run()


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_in_vmap_of_grad(late, randomness):
    x, w = make_input((4, 16, 32)), make_input((32, 32))

    def run(f):
        slope = torch.func.grad(lambda x: f(x, w).square().sum())
        return torch.func.vmap(slope, randomness=randomness)(x)

    assert_same(_draw(lambda: run(tr.checkpoint(_function))), _draw(lambda: run(_function)))


def test_in_checkpoints_of_checkpoints(late):
    def wrap(model):
        return tr.nn.wrap(tr.nn.wrap(model, "full", select="*"), "dots")

    assert_trained_alike(build_encoder, wrap, make_input((4, 16, 32)))


def test_in_jit(late):
    def f(x, w):
        return _function(x, w).square().sum()

    given = [make_input((4, 16, 32)).requires_grad_(), make_input((32, 32)).requires_grad_()]
    jitted = tr.jit(f, backend="eager")
    for _ in range(2):
        found, expected = (
            _draw(lambda g=g: torch.autograd.grad(g(*given), given)) for g in (jitted, f)
        )
        assert_same(found, expected)


@pytest.mark.parametrize("policy", ["full", "budget:85%"])
def test_with_updates_in_the_backward_pass(late, policy):
    x = make_input((4, 16, 32))
    model = tr.nn.wrap(build_encoder(), policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(3)
    losses = []
    with tr.optim.step_in_backward(optimizer):
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
    expected = train(build_encoder(), x)
    weights = [t.detach().cpu() for t in model.state_dict().values()]
    assert_same([losses, weights], expected[:2])


def test_in_attention(late):
    def f(q):
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).sum()

    q = make_input((2, 4, 16, 8)).requires_grad_()
    found, expected = (
        _draw(lambda g=g: torch.autograd.grad(g(q), q)) for g in (tr.checkpoint(f), f)
    )
    assert_same(found, expected)


def test_offloaded(late):
    def policy(op, *_avals, **_params):
        dropout = torch.ops.aten.native_dropout.default
        return tr.Offloadable("device", "pinned_host") if op is dropout else False

    x = make_input((4, 16, 32))
    assert_trained_alike(build_encoder, lambda m: tr.nn.wrap(m, policy, select="*"), x)
