"""A residual network and a U-Net, in training, under the compiled backend."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

import torchremat as tr
from tests.compile.models import ResNet, Transformer, UNet, gradients_of, held_nbytes
from torchremat.report.report import Report

MODELS = {"resnet": ResNet, "unet": UNet}
POLICIES = [
    "none",
    "full",
    "dots",
    "names:hidden",
    "ops:aten.relu",
    "modules:layers.1*",
    "recompute_ops:aten.convolution",
    "budget:60%",
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[request.param]()  # type: ignore[no-any-return]


def images() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 3, 16, 16)


def compiled(model: nn.Module, policy: Any, codegen: str, **options: Any) -> Callable[..., Any]:
    options = {"policy": policy, "codegen": codegen, **options}
    return torch.compile(model, backend="torchremat", options=options, fullgraph=True)  # type: ignore[no-any-return]


def _saved(report: Report) -> list[tuple[Any, ...]]:
    """What is saved, but in place of running statistics, which each does in its own way."""
    rows = [
        (r.name, r.shape, r.nbytes)
        for r in report
        if r.decision == "saved" and "of an input that is written to" not in r.reason
    ]
    return sorted(row for row in rows if ".clone" not in row[0])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.sampled(3)
def test_the_same_values_are_kept_as_in_eager_mode(policy: str, model: nn.Module) -> None:
    x = images()
    reports: list[Report] = []
    searched: Any = policy
    if policy.startswith("budget:"):  # calls take the first good plan, a compiler searches longer
        searched = tr.checkpoint_policies.memory_budget(policy[7:], solver="milp")
    f = compiled(model, searched, "eager", report=reports.append)
    held = held_nbytes(f, model, x)
    expected = tr.explain(model, x, policy=searched)
    assert _saved(reports[0]) == _saved(expected)
    assert held <= reports[0].total <= expected.total
    if searched is policy:  # a plan recomputes batch norms without their running statistics
        assert reports[0].total == held


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.sampled(3)
def test_gradients_and_statistics_are_those_of_plain_pytorch(policy: str, model: nn.Module) -> None:
    twin, x = copy.deepcopy(model), images()
    f = compiled(model, policy, "eager")
    for _ in range(2):
        assert all(map(torch.equal, gradients_of(f, model, x), gradients_of(twin, twin, x)))
    assert all(map(torch.equal, model.buffers(), twin.buffers()))


def _check_inductor(model: nn.Module, policy: str, **options: Any) -> None:
    twin, x = copy.deepcopy(model), images()
    expected = tr.explain(model, x, policy=policy).total
    f = compiled(model, policy, "inductor", **options)
    assert held_nbytes(f, model, x) <= expected
    model.load_state_dict(twin.state_dict())
    ours, plain = gradients_of(f, model, x), gradients_of(twin, twin, x)
    for pair in zip([*ours, *model.buffers()], [*plain, *twin.buffers()], strict=True):
        torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_inductor_computes_the_same_and_holds_no_more(policy: str, model: nn.Module) -> None:
    _check_inductor(model, policy)


_SHAPE = r"\(\((\d+), (\d+), (\d+), (\d+)\), \((\d+), (\d+), (\d+), (\d+)\)"


@pytest.mark.slow
def test_nothing_is_made_in_two_layouts(model: nn.Module) -> None:
    """What a convolution reads has its channels last; the backward pass has no second of it."""
    f, x = compiled(model, "full", "inductor"), images()
    _, (_, backward) = run_and_get_code(lambda: f(x).backward())
    made = [line for line in backward.splitlines() if re.search("(empty|reinterpret)_", line)]
    layouts = [tuple(map(int, m.groups())) for line in made if (m := re.search(_SHAPE, line))]
    wide = [layout for layout in layouts if layout[1] > 1 and layout[2] > 3]
    assert wide
    assert all(stride_of_channels == 1 for *_, stride_of_channels, _, _ in wide)


@pytest.mark.slow
def test_the_forward_pass_of_a_plan_copies_no_statistics() -> None:
    reports: list[Report] = []
    f, x = compiled(UNet(), "budget:60%", "inductor", report=reports.append), images()
    with fresh_inductor_cache():
        _, (forward, _) = run_and_get_code(lambda: f(x).backward())
    again = {row.op for row in reports[0] if row.decision == "recomputed"}
    assert any("batch_norm" in op for op in again)
    assert "torchremat.copied" not in forward


def test_the_forward_pass_of_a_plan_makes_no_masks() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
    f = compiled(model, "budget:100%", "inductor")
    with fresh_inductor_cache():
        _, (forward, _) = run_and_get_code(lambda: f(torch.randn(64, 32)).mean().backward())
    assert "torch.bool" not in forward


@pytest.mark.slow
def test_max_autotune_of_convolutions(model: nn.Module) -> None:
    with fresh_inductor_cache():
        _check_inductor(model, "dots", mode="max-autotune")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dots", "budget:80%"])
def test_max_autotune_of_products(policy: str) -> None:
    torch.manual_seed(0)
    model, x = Transformer(layers=1), torch.randn(2, 16, 16)
    plain = gradients_of(model, model, x)
    with fresh_inductor_cache():
        f = compiled(model, policy, "inductor", mode="max-autotune")
        ours = gradients_of(f, model, x)
    for pair in zip(ours, plain, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-5)
