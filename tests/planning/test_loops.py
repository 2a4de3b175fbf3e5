"""Budgets of functions with loops: what plans promise, and plain PyTorch's bits."""

import copy

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan

import torchremat as tr
from tests.helpers import assert_same
from torchremat.checkpoint_policies import from_plan
from torchremat.measure import LiveBytes

STEPS, ROWS, WIDTH = 48, 8, 16


class Scanned(nn.Module):
    """A gated cell over the steps, with dropout in each; its loss."""

    def __init__(self, p=0.0):
        super().__init__()
        self.cell, self.drop = nn.GRUCell(WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, xs):
        def step(state, x):
            state = self.drop(self.cell(x, state))
            return state, state.clone()

        start = xs.new_zeros(ROWS, WIDTH)
        return scan(step, start, xs, dim=0)[0].square().mean()


def run(model, xs):
    torch.manual_seed(3)
    loss = model(xs)
    return loss.detach(), torch.autograd.grad(loss, [xs, *model.parameters()])


def measure(model, xs):
    run(model, xs)
    with LiveBytes() as memory:
        found = run(model, xs)
    return found, memory.peak


@pytest.fixture(autouse=True)
def captured_anew():
    """Let PyTorch capture the bodies of `scan` as for the first time: else `p` is a symbol."""
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def xs():
    torch.manual_seed(1)
    return torch.randn(STEPS, ROWS, WIDTH, requires_grad=True)


@pytest.mark.parametrize(
    ("share", "p"),
    [(0.6, 0.2), *(pytest.param(part, 0.0, marks=pytest.mark.slow) for part in (0.6, 0.35))],
)
def test_a_plan_of_a_loop_is_kept(share, p, xs):
    torch.manual_seed(0)
    model = Scanned(p)
    plan = tr.plan(model, xs, budget=share)
    assert plan.peak_bytes <= share * plan.baseline.peak_bytes
    assert plan.tiling.num_tiles == 0
    assert f"loops run in {plan.tiling.num_segments} segments" in str(plan)
    assert plan.baseline.peak_bytes == tr.estimate(model, xs, policy="none").peak_bytes
    for made in (plan, tr.planning.Plan.from_json(plan.to_json())):
        found, peak = measure(tr.nn.wrap(copy.deepcopy(model), from_plan(made)), xs)
        assert_same(found, run(model, xs))
        assert peak <= plan.peak_bytes


def test_a_budget_of_a_loop_is_kept(xs):
    torch.manual_seed(0)
    model = Scanned()
    plain = tr.estimate(model, xs, policy="none").peak_bytes
    found, peak = measure(tr.nn.wrap(copy.deepcopy(model), "budget:45%"), xs)
    assert_same(found, run(model, xs))
    assert peak <= 0.45 * plain


@pytest.mark.slow
def test_what_cannot_be_met_names_a_budget_that_can(xs):
    model = Scanned()
    plain = tr.estimate(model, xs, policy="none").peak_bytes
    with pytest.raises(tr.BudgetError) as caught:
        tr.plan(model, xs, budget="5%")
    least = caught.value.least_bytes
    assert least < 0.4 * plain
    assert tr.plan(model, xs, budget=least).peak_bytes <= least
    assert tr.plan(model, xs, budget="100%").tiling is None


def test_a_second_call_runs_the_first_trace(xs):
    checkpointed = tr.checkpoint(Scanned(), policy="full")
    checkpointed(xs).backward()
    first = checkpointed.last_program
    checkpointed(xs).backward()
    assert checkpointed.last_program is first


def test_a_file_without_any_parts_is_refused(xs):
    plan = tr.plan(Scanned(), xs, budget="60%")
    text = plan.to_json()
    parts = f'"num_segments": {plan.tiling.num_segments}'
    assert parts in text
    with pytest.raises(tr.errors.PlanError, match="num_tiles"):
        tr.planning.Plan.from_json(text.replace(parts, '"num_segments": 0'))
