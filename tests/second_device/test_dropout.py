"""Dropout on a device is one operator, which takes no generator and computes with what it draws."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchremat as tr
from tests.helpers import assert_same
from tests.second_device.training import assert_trained_alike, make_input, train
from torchremat.measure import HeldBytes
from torchremat.policies.policy import Policy
from torchremat.remat.op import autograd_functions
from torchremat.remat.tape import recorder

pytestmark = pytest.mark.parametrize("late", ["copies last"], indirect=True)
"""No copy runs beside the operators here."""

aten = torch.ops.aten


def _build():
    torch.manual_seed(1)
    layers = [nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 32), nn.GELU(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(32, 32)).to("late")


def _count_held(model, run, x):
    with HeldBytes([x], [*model.parameters()]) as held:
        loss = run(x)
    del loss
    return held.total


def test_neither_its_output_nor_its_mask_is_saved(late):
    model, x = _build(), make_input((128, 32))
    plain = copy.deepcopy(model)
    wrapped = tr.nn.wrap(model, "full")
    ours = _count_held(wrapped, wrapped, x)
    theirs = _count_held(plain, lambda x: checkpoint(plain, x, use_reentrant=False), x)
    assert theirs == 0
    assert ours == 2 * 16  # the state of the generator, for each
    rows = [row for row in tr.nn.report(wrapped) if row.decision == "saved"]
    assert {row.reason for row in rows} == {
        "the state of the generator, from which it is drawn again"
    }


def test_a_mask_alone_is_drawn_from_the_shape(late):
    """What the dropout read is not computed again for it."""

    def f(x, w):
        return torch.nn.functional.dropout(x @ w, 0.4)

    x, w = (make_input((64, 64)).requires_grad_() for _ in range(2))
    report = tr.explain(f, x, w, policy="full")
    assert "mm" not in {row.name for row in report if row.decision == "recomputed"}


class _SaveResult(Policy):
    """Saves one result of each dropout."""

    def __init__(self, index):
        self.index = index

    def decide(self, value):
        return value.op is aten.native_dropout.default and value.index == self.index


@pytest.mark.parametrize("index", [0, 1])
def test_one_of_its_results_is_saved(late, index):
    x = make_input((128, 32))
    assert_trained_alike(_build, lambda m: tr.nn.wrap(m, _SaveResult(index)), x)


def test_budgets_run_it_again(late):
    def build(dropout=0.3):
        torch.manual_seed(1)
        layers = [
            nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(dropout)) for _ in range(6)
        ]
        return nn.Sequential(*layers).to("late")

    x = make_input((512, 32))
    without = tr.plan(build(0.0), x, budget="least").peak_bytes
    least = tr.plan(build(), x, budget="least").peak_bytes
    assert least <= 1.1 * without
    assert_trained_alike(build, lambda m: tr.nn.wrap(m, f"budget:{least}B"), x)


def test_second_derivatives_read_it(late):
    def f(x, w, v):
        return torch.nn.functional.dropout(torch.tanh(x @ w), 0.4) @ v

    given = [make_input((16, 16)).double() * scale for scale in (1.0, 0.5, 0.3)]

    def penalty(f):
        x, w, v = (t.detach().clone().requires_grad_() for t in given)
        torch.manual_seed(5)
        slopes = torch.autograd.grad(f(x, w, v).square().sum(), [x, w], create_graph=True)
        return torch.autograd.grad(sum(s.square().sum() for s in slopes), [x, w, v])

    assert_same(penalty(tr.checkpoint(f, policy="full")), penalty(f), close=True)


def test_a_graph_that_is_kept_runs_it_twice(late):
    x = make_input((128, 32))

    def run(model):
        torch.manual_seed(4)
        loss = model(x).square().sum()
        weights = list(model.parameters())
        found = [torch.autograd.grad(loss, weights, retain_graph=True)]
        found += [torch.autograd.grad(loss, weights[:2], retain_graph=True)]
        return [*found, torch.autograd.grad(loss, weights), late.get_rng_state()]

    assert_same(run(tr.nn.wrap(_build(), "full")), run(_build()))


def test_it_is_verified(late, monkeypatch):
    monkeypatch.setattr(tr.config, "verify_recomputation", "bitwise")
    x = make_input((128, 32))
    assert_trained_alike(_build, lambda m: tr.nn.wrap(m, "full"), x)


def test_on_a_tape(late):
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = _build()

        def forward(self, x):
            return self.layers(x) if x.sum().item() < 1e6 else x

    x = make_input((128, 32))
    assert_trained_alike(Routed, lambda m: tr.nn.wrap(m, "full"), x)
    wrapped = tr.nn.wrap(Routed(), "full")
    train(wrapped, x, steps=1)
    assert {row.way for row in tr.nn.report(wrapped)} == {"tape"}
    assert _count_held(wrapped, wrapped, x) <= 4 * 1024


def test_one_of_two_outputs_has_a_gradient(late):
    """The backward graph is then of another trace than the decisions."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = _build()

        def forward(self, x):
            y = self.layers(x)
            return y.sin(), y.cos()

    model, wrapped = Two(), tr.nn.wrap(Two(), "full")
    x = make_input((64, 32))
    for which in ([0], [1], [0, 1]):
        found = []
        for each in (model, wrapped):
            torch.manual_seed(4)
            outputs = each(x)
            loss = sum(outputs[i].square().sum() for i in which)
            found.append(torch.autograd.grad(loss, list(each.parameters())))
        assert_same(found[1], found[0])


@pytest.mark.parametrize("way", ["graph", "tape"])
def test_a_recorded_cuda_graph_reads_no_state(late, monkeypatch, way):
    """PyTorch refuses to tell it then: values are saved, as without a checkpoint."""
    for module in (autograd_functions, recorder):
        monkeypatch.setattr(module, "is_captured", lambda: True)

    def refuse():
        raise RuntimeError("Cannot call get_state during CUDA graph capture")

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = _build()

        def forward(self, x):
            return self.layers(x) if way == "graph" or x.sum().item() < 1e6 else x

    wrapped, x = tr.nn.wrap(Routed(), "full"), make_input((64, 32))
    wrapped(x)  # it is traced before, as graphs are warmed up
    with monkeypatch.context() as patch:
        patch.setattr(torch.late, "get_rng_state", lambda *_: refuse())
        wrapped(x).sum().backward()
    assert_trained_alike(Routed, lambda m: tr.nn.wrap(m, "full"), x)


def test_lengths_that_change(late):
    model, wrapped = _build(), tr.nn.wrap(_build(), "full")
    for rows in (16, 40, 24, 33):
        x = make_input((rows, 32))
        torch.manual_seed(rows)
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        torch.manual_seed(rows)
        found = torch.autograd.grad(wrapped(x).square().sum(), list(wrapped.parameters()))
        assert_same(found, expected)
