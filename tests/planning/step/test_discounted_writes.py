"""Bounds of plans whose operators write in place: no plan that runs in the budget adds less."""

import pytest
import torch
from torch import nn

import torchremat as tr
from torchremat.planning.planner import Planner
from torchremat.planning.step.discounted_writes import discount_writes
from torchremat.planning.step.traced_step import WholeGraphPolicy, region_of


class Residual(nn.Module):
    """Writes to what it has just computed, in several ways."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = part(x).add_(x).mul_(0.5)
        return x


def dropouts():
    blocks = [(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))] * 4
    return nn.Sequential(*(nn.Sequential(*block) for block in blocks)), torch.randn(64, 32)


def convolutions():
    def block(n, m):
        return nn.Sequential(
            nn.Conv2d(n, m, 3, padding=1), nn.BatchNorm2d(m), nn.ReLU(inplace=True)
        )

    return nn.Sequential(block(3, 8), block(8, 8), block(8, 8)), torch.randn(2, 3, 16, 16)


def residuals():
    parts = [nn.Sequential(nn.Tanh(), nn.Linear(32, 32)) for _ in range(5)]
    return Residual(*parts), torch.randn(64, 32)


MODELS = {"dropouts": dropouts, "convolutions": convolutions, "residuals": residuals}


def step_of(name):
    torch.manual_seed(0)
    model, x = MODELS[name]()
    return (lambda x: model(x).square().mean()), x


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n == "dropouts" else []) for n in MODELS],
)
def test_no_plan_that_runs_in_the_budget_adds_less_than_its_bound(name):
    step, x = step_of(name)
    least = tr.plan(step, x, budget="least")
    plain = least.baseline.peak_bytes
    shares = (0.02, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
    budgets = [round(least.peak_bytes + s * (plain - least.peak_bytes)) for s in shares]
    plans = [least, *(tr.plan(step, x, budget=budget) for budget in budgets)]
    for budget, plan in zip(budgets, plans[1:], strict=True):
        within = [p.recompute_seconds for p in plans if p.peak_bytes <= budget]
        assert plan.lower_bound_seconds <= min(within)
    assert any(plan.lower_bound_seconds > 0 for plan in plans[1:])


def test_dropout_leaves_a_bound():
    step, x = step_of("dropouts")
    plan = tr.plan(step, x, budget="70%")
    assert plan.recompute_seconds > 0
    assert plan.gap < 0.35
    assert plan.gap <= 0.05 or "writes in place" in str(plan)


def joint_of(step, x):
    region = region_of(step, (x,), {}, WholeGraphPolicy())
    return region.joint_for(region.usual_outputs)


def test_writes_take_nothing_while_they_are_made():
    planner = Planner(joint_of(lambda x: ((x * 2).mul_(2).sin() * 3).sum(), torch.ones(1024)))
    problem, plain = planner.step.problem, planner.plain
    made = discount_writes(planner.step, plain.schedule, plain.peak_bytes)
    inside = [
        b.nbytes_inside - a.nbytes_inside
        for a, b in zip(problem.operators, made.operators, strict=True)
    ]
    assert sorted(inside)[:2] == [-4096, 0]
    assert made.nbytes == problem.nbytes


def test_writes_to_a_part_leave_none():
    def step(x):
        y = x * 2
        y[:4].mul_(2)
        return (y.sin() * y).sum()

    planner = Planner(joint_of(step, torch.ones(1024)))
    plain = planner.plain
    assert discount_writes(planner.step, plain.schedule, plain.peak_bytes) is None
    assert planner.find_bound(1) == 0.0
