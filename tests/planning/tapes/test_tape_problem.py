"""The numbers of a tape are what happens: the bytes alive in both passes, by `LiveBytes`."""

import pytest
import torch
from torch import nn

import torchremat as tr
from torchremat.measure import LiveBytes
from torchremat.planning.cost_model import CostModel
from torchremat.planning.tapes import tape_budget


@pytest.fixture
def simulated(monkeypatch):
    """The planner of each call, and the values that it saved."""
    found = []
    settle = tape_budget.TapeBudgetCall.settle

    def note(self, record):
        kept = settle(self, record)
        step = tape_budget.TapeStep.of(record, self.seconds_of)
        planner = tape_budget.TapePlanner(step.problem)
        found.append((planner, planner.evaluate(step.numbers[number] for number in kept)))
        return kept

    monkeypatch.setattr(tape_budget.TapeBudgetCall, "settle", note)
    return found


class Branching(nn.Module):
    def __init__(self, make, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if x.sum() < 1e6 else x
        return x.square().mean()


def mlp():
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))


def convolution():
    return nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.Tanh())


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.gate = nn.Linear(32, 32)

    def forward(self, x):
        return x + torch.sigmoid(self.gate(x)) * self.inner(x)


@pytest.mark.parametrize(
    ("make", "budget"),
    [
        (mlp, "budget:1GiB"), (mlp, "budget:75%"), (convolution, "budget:1GiB"),
        (Residual, "budget:1GiB"), (Residual, "budget:75%"),
    ],
)  # fmt: skip
def test_simulated_bytes_are_those_that_are_measured(simulated, make, budget):
    model = tr.nn.wrap(Branching(make), budget)
    x = torch.randn(*((16, 8, 32) if make is convolution else (128, 32)))
    for _ in range(2):
        model.zero_grad()
        with LiveBytes() as live:
            loss = model(x)
            held = live.live
            loss.backward()
    planner, trial = simulated[-1]
    saved = sum(planner.problem.nbytes[v] for v in trial.decisions.saved)
    assert saved == pytest.approx(held, abs=64)
    assert live.peak <= trial.costs.peak + 64
    assert live.peak > 0.9 * trial.costs.peak


def test_the_backward_pass_reads_what_autograd_saves(simulated):
    layer = nn.Linear(8, 8)

    def fun(x):
        y = layer(x).sin()
        return (y * y.exp()).sum() if y.sum() < 100 else y

    tr.config.untraceable, before = "tape", tr.config.untraceable
    try:
        tr.checkpoint(fun, policy="budget:1GiB")(torch.ones(4, 8))
    finally:
        tr.config.untraceable = before
    problem = simulated[0][0].problem
    assert len(problem.forward) == 7  # addmm, sin, sum and lt of the branch, exp, mul, sum
    sizes = sorted(problem.nbytes[v] for v in problem.needed)
    assert sizes == [128, 128, 128]  # addmm for sin, sin and exp for mul
    assert sorted(problem.nbytes[v] for v in problem.gradients) == [4, 32, 256]


def test_seconds_are_those_of_the_cost_model(simulated):
    model = CostModel.of("h100")
    layer = nn.Linear(512, 512, bias=False)

    class Product(nn.Module):
        def forward(self, x):
            y = x @ layer.weight
            return y.sum() if y.sum() < 1e9 else y

    x = torch.randn(512, 512)
    policy = tr.checkpoint_policies.memory_budget("1GiB", cost_model=model)
    tr.nn.wrap(Product(), policy)(x)
    graph = tr.make_graph(torch.mm)(x, x).graph_module.graph
    (mm,) = [node for node in graph.nodes if node.op == "call_function"]
    problem = simulated[0][0].problem
    assert problem.operators[0].seconds == model.seconds(mm) > 0
