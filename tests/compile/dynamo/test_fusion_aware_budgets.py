"""Budgets under a compiler: what fuses costs little, and runs again in place of products."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchremat as tr
from torchremat.checkpoint_policies import from_plan, memory_budget
from torchremat.planning import CostModel
from torchremat.planning.planner import Planner
from torchremat.report.report import Report

CPU = CostModel.of("cpu")
BUDGET = memory_budget(0.75, cost_model=CPU)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Products(nn.Module):
    """Small products, and chains of twelve cheap operators whose results are as large."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.randn(*s)) for s in ((4, 64, 256), (256, 8)))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for w in self.w:
            y = torch.mm(x, w)
            chain = y.detach()
            for _ in range(6):
                chain = chain * 0.5 + 1
            total = total + (y * y).sum() + torch.sin(chain @ self.v).sum()
        return total


def explained(run: Callable[..., Any] | None) -> Report:
    model, x = Products(), torch.randn(256, 64)
    return tr.explain(model, x, policy=BUDGET) if run is None else run(model, x)


def by_dynamo(codegen: str) -> Callable[..., Report]:
    def run(model: nn.Module, x: Tensor) -> Report:
        reports: list[Report] = []
        options = {"policy": BUDGET, "codegen": codegen, "report": reports.append}
        torch.compile(model, backend="torchremat", options=options)(x).backward()
        return reports[0]

    return run


def wrapped(compile: str | None) -> Callable[..., Report]:
    def run(model: nn.Module, x: Tensor) -> Report:
        return tr.explain(tr.nn.wrap(model, BUDGET, compile=compile), x)

    return run


def jitted(backend: str) -> Callable[..., Report]:
    def run(model: nn.Module, x: Tensor) -> Report:
        return tr.explain(tr.jit(model, policy=BUDGET, backend=backend), x)

    return run


def again(report: Report) -> set[str]:
    """The operators that run again."""
    return {row.name.split("_")[0] for row in report if row.decision == "recomputed"}


@pytest.mark.parametrize(
    "run",
    [by_dynamo("inductor"), wrapped("inductor"), jitted("inductor")],
    ids=["dynamo", "wrap", "jit"],
)
@pytest.mark.sampled(2)
def test_for_inductor_a_chain_is_computed_again_and_no_product(run: Callable[..., Report]) -> None:
    assert again(explained(run)) == {"mul", "add"}


@pytest.mark.parametrize(
    "run",
    [None, by_dynamo("eager"), wrapped(None), wrapped("aot_eager"), jitted("eager")],
    ids=["checkpoint", "dynamo", "wrap", "wrap aot_eager", "jit"],
)
def test_operator_by_operator_the_product_is(run: Callable[..., Report] | None) -> None:
    assert again(explained(run)) == {"mm"}


def test_a_plan_for_a_compiler_is_that_of_the_fused_model() -> None:
    model, x = Products(), torch.randn(256, 64)
    plan = tr.plan(model, x, budget=0.75, cost_model=CPU.fused())
    reports: list[Report] = []
    options = {"policy": from_plan(plan), "codegen": "eager", "report": reports.append}
    torch.compile(model, backend="torchremat", options=options)(x).backward()
    assert again(reports[0]) == {"mul", "add"}


@pytest.mark.parametrize("cost_model", [None, CPU, CostModel.of("h100").fused()])
def test_the_model_is_fused_for_a_compiler_alone(
    cost_model: CostModel | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[CostModel] = []
    start = Planner.__init__

    def note(planner: Planner, joint: Any, **options: Any) -> None:
        start(planner, joint, **options)
        used.append(planner.cost_model)

    monkeypatch.setattr(Planner, "__init__", note)
    f = lambda x: torch.sin(torch.sin(torch.sin(x))).sum()  # noqa: E731
    x = torch.ones(8, requires_grad=True)
    policy = memory_budget(1.0, cost_model=cost_model)
    expected = cost_model or CostModel.of(None)
    for compiled in (True, False):
        (tr.jit(f, policy=policy) if compiled else tr.checkpoint(f, policy=policy))(x)
        assert used.pop() == (expected.fused() if compiled else expected)
