"""`torch.compile(model, backend="torchremat")`: policies decide as they do in eager mode."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

import torchremat as tr
from tests.compile.models import Convolutions, Transformer, gradients_of, held_nbytes
from tests.helpers import one_in
from torchremat.checkpoint_policies import from_plan, memory_budget
from torchremat.errors import BudgetError, PlanError, TorchrematError, UnmatchedWarning
from torchremat.planning.budget_policy import MemoryBudget
from torchremat.report.report import Report

POLICIES = [
    "none",
    "full",
    "dots",
    "names:hidden",
    "ops:aten.gelu",
    "modules:layers.1.*",
    "recompute_ops:aten.mm",
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(
    f: Any, policy: Any, codegen: str = "eager", dynamic: bool | None = None, **options: Any
) -> Callable[..., Any]:
    options = {"policy": policy, "codegen": codegen, **options}
    return torch.compile(f, backend="torchremat", options=options, fullgraph=True, dynamic=dynamic)


@pytest.mark.parametrize("policy", [*POLICIES, "budget:80%"])
@pytest.mark.sampled(3)
def test_gradients_are_those_of_plain_pytorch(policy: str) -> None:
    model, x = Transformer(width=8), torch.randn(8, 32, 8)
    plain = gradients_of(model, model, x)
    ours = gradients_of(compiled(model, policy), model, x)
    assert all(map(torch.equal, ours, plain))


@pytest.mark.parametrize("policy", [*POLICIES, "budget:80%"])
@pytest.mark.sampled(3)
def test_the_same_values_are_kept_as_in_eager_mode(policy: str) -> None:
    model, x = Transformer(width=8), torch.randn(8, 32, 8)
    reports: list[Report] = []
    compiled(model, policy, report=reports.append)(x).backward()
    (report,) = reports
    assert _saved(report) == _saved(tr.explain(model, x, policy=policy))


@pytest.mark.parametrize("policy", one_in(2, [*POLICIES, "budget:80%"]))
@pytest.mark.sampled(2)
def test_the_same_values_are_kept_where_sizes_are_symbols(policy: str) -> None:
    model, x = Transformer(width=8), torch.randn(8, 32, 8)
    reports: list[Report] = []
    ours = gradients_of(compiled(model, policy, dynamic=True, report=reports.append), model, x)
    assert all(map(torch.equal, ours, gradients_of(model, model, x)))
    (report,) = reports
    assert _saved(report) == _saved(tr.explain(model, x, policy=policy))


def _saved(report: Report) -> list[tuple[Any, ...]]:
    return [(r.name, r.shape, r.nbytes) for r in report if r.decision == "saved"]


def test_a_plan_is_kept_to() -> None:
    model, x = Transformer(width=8), torch.randn(8, 32, 8)
    policy = from_plan(tr.plan(model, x, budget=0.75))
    reports: list[Report] = []
    ours = gradients_of(compiled(model, policy, report=reports.append), model, x)
    assert all(map(torch.equal, ours, gradients_of(model, model, x)))
    assert _saved(reports[0]) == _saved(tr.explain(model, x, policy=policy))


def test_a_plan_of_another_function_is_told() -> None:
    x = torch.randn(8, 32, 8)
    policy = from_plan(tr.plan(Transformer(width=8), x, budget=0.75))
    with pytest.raises(PlanError, match="the plan is for another graph"):
        compiled(Transformer(layers=3, width=8), policy)(x)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.sampled(2)
def test_the_report_counts_what_autograd_holds(policy: str) -> None:
    model, x = Transformer(dropout=0.5), torch.randn(8, 32, 16)
    reports: list[Report] = []
    f = compiled(model, policy, report=reports.append)
    held = held_nbytes(f, model, x)
    assert reports[0].total == held
    assert held <= tr.explain(model, x, policy=policy).total


class Masked(nn.Module):
    """Dropouts, and what they leave."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        left = []
        for _ in range(4):
            x = torch.dropout(torch.sin(torch.sin(torch.sin(x))), 0.25, True)
            left.append(x.detach())
        return x.square().sum(), left


def masked_by(left: list[Tensor], x: Tensor) -> Tensor:
    for y in left:
        x = torch.where(y == 0, 0, torch.sin(torch.sin(torch.sin(x))) / 0.75)
    return x.square().sum()


def least_budget_of(codegen: str, x: Tensor) -> int:
    with pytest.raises(BudgetError, match="The least that was found is") as told:
        compiled(Masked(), memory_budget(1), codegen)(x)
    torch._dynamo.reset()
    return told.value.least_bytes


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("policy", ["none", "full", "budget:100%", "budget:85%", "least"])
@pytest.mark.sampled(3)
def test_the_backward_has_the_masks_of_the_forward(policy: Any, codegen: str) -> None:
    x = (torch.rand(4, 1024) + 0.5).requires_grad_()
    if policy == "least":
        policy = memory_budget(least_budget_of(codegen, x))
    loss, left = compiled(Masked(), policy, codegen)(x)
    loss.backward()
    (expected,) = torch.autograd.grad(masked_by(left, x), x)
    torch.testing.assert_close(x.grad, expected)
    assert all(0.2 < float((y == 0).float().mean()) < 0.9 for y in left)


class Skip(nn.Module):
    """A value at the beginning that is read at the end, and cheap to make."""

    def forward(self, x: Tensor) -> Tensor:
        first = y = torch.sin(x @ x.t())
        for _ in range(4):
            y = torch.sin(y @ y)
        return (y * torch.cos(first)).square().sum()


def test_what_a_plan_lets_go_and_computes_twice_is_twice_in_the_compiled_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(64, 4).div(8).requires_grad_()
    with pytest.raises(BudgetError) as told:
        compiled(Skip(), memory_budget(1), "inductor")(x)
    torch._dynamo.reset()
    schedules, find = [], MemoryBudget.schedule

    def schedule(policy: MemoryBudget, joint: Any, **options: Any) -> Any:
        schedules.append(find(policy, joint, **options))
        return schedules[0]

    monkeypatch.setattr(MemoryBudget, "schedule", schedule)
    f = compiled(Skip(), memory_budget(told.value.least_bytes), "inductor")
    with fresh_inductor_cache():
        _, codes = run_and_get_code(lambda: f(x).backward())
    runs = [node for node in schedules[0].backward if "mm" in node.name]
    products = re.findall(r"extern_kernels\.(?:add)?mm\(", codes[-1])
    assert len(set(runs)) < len(runs) == len(products)
    torch.testing.assert_close(x.grad, torch.autograd.grad(Skip()(x), x)[0])


@pytest.mark.parametrize("policy", one_in(3, ["none", "dots", "names:hidden", "budget:80%"]))
def test_inductor_computes_the_same_and_holds_no_more(policy: str) -> None:
    model, x = Transformer(layers=1, width=32), torch.randn(4, 16, 32)
    reports: list[Report] = []
    f = compiled(model, policy, "inductor", report=reports.append)
    for ours, plain in zip(gradients_of(f, model, x), gradients_of(model, model, x), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    held = held_nbytes(f, model, x)
    assert held <= reports[0].total
    if not policy.startswith("budget:"):  # inductor has an order of its own, so another plan
        assert held <= tr.explain(model, x, policy=policy).total


@pytest.mark.parametrize(
    ("policy", "codegen"), one_in(3, ["full", "none", "budget:90%"], ["eager", "inductor"])
)
def test_buffers_are_written_once(policy: str, codegen: str) -> None:
    model, x = Convolutions(), torch.randn(8, 3, 16, 16)
    twin = copy.deepcopy(model)
    f = compiled(model, policy, codegen, report=lambda report: None)
    for _ in range(2):
        ours, plain = gradients_of(f, model, x), gradients_of(twin, twin, x)
        for pair in zip([*ours, *model.buffers()], [*plain, *twin.buffers()], strict=True):
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("policy", ["full", "names:x", "none", "reported", None, "budget:100%"])
def test_what_is_computed_again_reads_a_buffer_before_it_is_written_to(
    policy: str | None, codegen: str
) -> None:
    def f(x: Tensor, buffer: Tensor) -> Tensor:
        y = torch.sin(torch.sin(tr.checkpoint_name(x * torch.exp(buffer), "x")))
        buffer.add_(1)
        return y.sum()

    x, buffer = torch.randn(64, requires_grad=True), torch.rand(64)
    (expected,) = torch.autograd.grad(f(x, buffer.clone()), x)
    before = buffer.clone()
    options = {"report": lambda report: None} if policy == "reported" else {}
    policy = "none" if policy == "reported" else policy
    (ours,) = torch.autograd.grad(compiled(f, policy, codegen, **options)(x, buffer), x)
    torch.testing.assert_close(ours, expected)
    assert torch.equal(buffer, before + 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
def test_a_graph_break_makes_two_graphs() -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.sin(x @ x)
        torch._dynamo.graph_break()
        return torch.cos(y @ y).sum()

    reports: list[Report] = []
    options = {"policy": "dots", "codegen": "eager", "report": reports.append}
    x = torch.randn(4, 4, requires_grad=True)
    torch.compile(f, backend="torchremat", options=options)(x).backward()
    (ours,), (plain,) = (x.grad,), torch.autograd.grad(f(x), x)
    assert torch.equal(ours, plain)
    assert [[row.name for row in r if row.decision == "saved"] for r in reports] == [["mm"], ["mm"]]


@pytest.mark.parametrize("policy", ["full", "dots", "budget:90%"])
def test_sizes_may_change(policy: str) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(torch.sin(x @ w) @ w).sum()

    reports: list[Report] = []
    options = {"policy": policy, "codegen": "eager", "report": reports.append}
    g = torch.compile(f, backend="torchremat", options=options, dynamic=True, fullgraph=True)
    w = torch.randn(8, 8, requires_grad=True)
    for size in (16, 24, 40):
        x = torch.randn(size, 8)
        ours, plain = (torch.autograd.grad(h(x, w), w)[0] for h in (g, f))
        assert torch.equal(ours, plain)
    assert len(reports) == 1


def test_without_gradients_the_forward_alone_is_compiled() -> None:
    model, x = Transformer(layers=1), torch.randn(2, 4, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, "dots", "inductor")(x), model(x))


def test_the_policy_looks_inside_a_checkpoint() -> None:
    def f(x: Tensor) -> Tensor:
        return tr.checkpoint(lambda x: torch.sin(x @ x))(x).sum()

    x = torch.randn(4, 4, requires_grad=True)
    reports: list[Report] = []
    compiled(f, "dots", report=reports.append)(x).backward()
    assert [row.name for row in reports[0] if row.decision == "saved"] == ["mm"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"polcy": "dots"}, "nearest: 'policy'"),
        ({"policy": "dotz"}, "nearest: 'dots'"),
        ({"policy": "dots", "codegen": "inducter"}, "nearest: 'inductor'"),
        ({"mode": "max-autotun"}, "nearest: 'max-autotune'"),
        ({"policy": 3}, "unknown policy"),
        ({"policy": "dots", "report": 3}, "is not callable"),
        ({"max_autotune": "yes"}, "this setting of inductor is bool, not str"),
    ],
)
def test_bad_options_are_told(options: dict[str, Any], message: str) -> None:
    f = torch.compile(torch.sin, backend="torchremat", options=options)
    with pytest.raises(TorchrematError, match=message) as told:
        f(torch.ones(3, requires_grad=True))
    assert isinstance(told.value, ValueError | TypeError)
    assert "BackendCompilerFailed" not in type(told.value).__name__


def test_a_name_that_no_value_has_is_told() -> None:
    with pytest.warns(UnmatchedWarning, match="nearest: 'hidden'"):
        compiled(Transformer(layers=1), "names:hiden")(torch.randn(2, 4, 16))


def test_the_installed_package_is_a_backend() -> None:
    assert "torchremat" in torch._dynamo.list_backends()


@torch.library.custom_op("torchremat_tests::add_into", mutates_args=("buffer",))
def add_into(x: Tensor, buffer: Tensor) -> None:
    buffer.add_(x)


def writes_by_a_users_operator(x: Tensor, buffer: Tensor) -> Tensor:
    add_into(x.detach(), buffer)
    return (x * buffer).sin()


def writes_twice(x: Tensor, buffer: Tensor) -> Tensor:
    add_into(x.detach(), buffer)
    y = x * buffer.clone()
    add_into(x.detach(), buffer)
    return (y * buffer).cos()


def writes_to_parts(x: Tensor, buffer: Tensor) -> Tensor:
    buffer[0].copy_(x[0].detach())
    y = (x * buffer.clone()).sin()
    buffer.t()[1] = 5.0
    return (y * buffer).tanh()


@pytest.mark.parametrize(
    ("policy", "codegen"), [("none", "eager"), (None, "inductor"), ("full", "inductor")]
)
@pytest.mark.parametrize("f", [writes_by_a_users_operator, writes_twice, writes_to_parts])
def test_arguments_may_be_written_to(f: Any, policy: str | None, codegen: str) -> None:
    x, buffer = torch.rand(3, 3, requires_grad=True), torch.rand(3, 3)
    twin = buffer.clone()
    plain, ours = f(x, twin), compiled(f, policy, codegen)(x, buffer)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (ours, plain)))
    torch.testing.assert_close(buffer, twin)


@pytest.mark.parametrize("policy", [None, "none", "full"])
def test_batch_normalisation_inside_a_checkpoint(policy: str | None) -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8))
    model = nn.Sequential(tr.nn.wrap(inner, "full"), nn.Linear(8, 1))
    twin, x = copy.deepcopy(model), torch.randn(16, 8)
    tr.nn.unwrap(twin)
    f = compiled(model, policy)
    ours, plain = (
        gradients_of(lambda x, g=g: g(x).sum(), m, x) for g, m in ((f, model), (twin,) * 2)
    )
    for pair in zip([*ours, *model.buffers()], [*plain, *twin.buffers()], strict=True):
        torch.testing.assert_close(*pair)


def test_a_name_inside_a_checkpoint_is_seen_by_the_policy_around_it() -> None:
    @tr.checkpoint(policy="full")
    def block(x: Tensor) -> Tensor:
        return tr.checkpoint_name(x.sin(), "hidden").exp()

    reports: list[Report] = []
    x = torch.ones(3, requires_grad=True)
    compiled(lambda x: block(x).cos().sum(), "names:hidden", report=reports.append)(x).backward()
    assert [row.name for row in reports[0] if row.decision == "saved"] == ["hidden"]


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_results_that_are_copies_stay_copies(policy: str, codegen: str) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.sin(x)
        z = torch.cos(y.clone())
        return y, y.clone().view(-1), z

    x = torch.rand(2, 3, requires_grad=True)
    y, copied, z = compiled(f, policy, codegen)(x)
    with torch.no_grad():
        copied.zero_()
    torch.testing.assert_close(y, torch.sin(x))
    torch.testing.assert_close(*(torch.autograd.grad(r.sum(), x)[0] for r in (z, f(x)[2])))
