"""Plans that offload: what they say, that they run as they say, and that nobody else offloads."""

import doctest
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same, gradients_handed_on, in_kib
from torchremat import planning
from torchremat.checkpoint_policies import everything_saveable, from_plan, memory_budget
from torchremat.errors import OffloadWarning, PlanError
from torchremat.measure import HeldBytes, LiveBytes, host_stats
from torchremat.planning import CostModel, Plan
from torchremat.planning.costs.device_rates import rates_of
from torchremat.planning.step.traced_step import timeline_of
from torchremat.remat.offload.copies import start_fetch
from torchremat.viz.picture.build import picture_of


def tower(depth: int, width: int) -> nn.Module:
    """Matrix products whose inputs the backward pass reads; their activations read outputs."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.Sigmoid()) for _ in range(depth)]
    return nn.Sequential(*layers).to("meta")


def rows(width: int) -> torch.Tensor:
    return torch.empty(16384, width, device="meta")


@pytest.fixture(scope="module")
def pair() -> tuple[Plan, Plan]:
    """The plan of a tower at 0.6 of its peak, without and with offloading."""
    model, x = tower(8, 1024), rows(1024)
    alone, offloads = (
        tr.plan(model, x, budget=0.6, device="h100", offload=offload) for offload in (False, True)
    )
    return alone, offloads


def test_offloading_takes_less_time_and_says_what_it_offloads(pair):
    alone, found = pair
    assert found.recompute_seconds < alone.recompute_seconds / 2
    assert found.peak_bytes <= found.budget == alone.budget
    assert 0 <= found.link_seconds <= found.recompute_seconds
    assert found.lower_bound_seconds <= found.recompute_seconds
    nbytes = 16384 * 1024 * 4  # of each value
    assert found.offloaded_bytes == nbytes * list(found.decisions.values()).count("offloaded") > 0
    assert len(found.order.offloaded) * nbytes == found.offloaded_bytes
    assert not set(found.order.offloaded) & set(found.order.saved)
    assert "offloaded" in found.summary()
    assert max(map(len, found.summary().splitlines())) <= 100


def test_without_being_asked_nothing_is_offloaded(pair):
    alone, _ = pair
    assert alone.offloaded_bytes == alone.link_seconds == 0
    assert "offloaded" not in {*alone.decisions.values(), *alone.summary().split()}
    assert alone.peak_bytes == alone.timeline().peak


def test_small_values_are_not_worth_a_copy():
    model, x = tower(4, 16), torch.empty(1023, 16, device="meta")  # 64 KiB less 64
    found = tr.plan(model, x, budget=0.8, device="h100", offload=True)
    assert set(found.decisions.values()) == {"saved", "recomputed"}
    assert found.timeline().peak == found.peak_bytes


@pytest.mark.parametrize("device", ["cpu", "m1"])
def test_a_device_without_a_host_has_nowhere_to_offload_to(device):
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    with pytest.raises(PlanError, match=r"offload=True: CostModel\(.* has no link to a host"):
        tr.plan(model, x, budget=0.9, device=device, offload=True)
    with pytest.raises(PlanError, match=r"or plan with offload=False"):
        planning.pareto(model, x, device=device, offload=True)


def test_the_link_of_a_cost_model_counts():
    model, x = tower(6, 1024), rows(1024)
    seconds = []
    for rate in (1e9, 64e9, 1e13):
        given = CostModel.of(replace(rates_of("h100"), host_bytes_per_second=rate))
        found = tr.plan(model, x, budget=0.7, cost_model=given, offload=True)
        seconds.append(found.recompute_seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


def test_the_curve_with_offloading_lies_below():
    model, x = tower(4, 1024), rows(1024)
    curves = [
        planning.pareto(model, x, points=["75%", "90%"], device="h100", offload=offload)
        for offload in (True, False)
    ]
    for below, above in zip(*curves, strict=True):
        assert below.recompute_seconds <= above.recompute_seconds


FAST_LINK = CostModel.of(replace(rates_of("h100"), host_bytes_per_second=1e13))


@pytest.fixture(scope="module")
def step() -> tuple[nn.Module, torch.Tensor]:
    """A step that is small enough to run, with values large enough to be offloaded."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(6)]
    return nn.Sequential(*layers), torch.randn(512, 64)


def gradients(fun, model, x) -> list[torch.Tensor]:
    loss = fun(x).square().sum()
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("budget", [0.7, 0.75])
def test_plans_that_offload_run_as_they_say(step, budget, tmp_path):
    model, x = step
    found = tr.plan(model, x, budget=budget, cost_model=FAST_LINK, offload=True)
    assert found.offloaded_bytes > 0
    path = tmp_path / "plan.json"
    found.save(path)
    for given in (found, str(path)):
        f = tr.checkpoint(model, policy=from_plan(given))
        assert_same(gradients(f, model, x), gradients(model, model, x))
    with LiveBytes() as memory, HeldBytes(model, x) as held:
        out = f(x)
    assert host_stats().nbytes == found.offloaded_bytes == found.timeline().offloaded_bytes
    assert held.total - out.nbytes == found.saved_bytes
    cotangents = [torch.ones_like(out)]
    memory.add(cotangents)
    with memory:
        gradients_handed_on([out], list(model.parameters()), cotangents)
    assert memory.peak == found.timeline().peak <= found.peak_bytes <= found.budget
    assert host_stats().nbytes == 0
    report = tr.explain(f, x)
    assert report.offloaded_total == found.offloaded_bytes


def test_a_budget_may_offload(step):
    model, x = step
    parameters = list(model.parameters())
    alone, policy = (
        memory_budget(0.7, cost_model=FAST_LINK, offload=offload) for offload in (False, True)
    )
    f = tr.checkpoint(model, policy=policy)
    assert_same(gradients(f, model, x), gradients(model, model, x))
    assert_same(gradients(tr.checkpoint(model, policy=alone), model, x), gradients(f, model, x))
    timeline = timeline_of(f.last_program)
    with LiveBytes() as memory, HeldBytes(model, x) as held:
        out = f(x)
    assert host_stats().nbytes == timeline.offloaded_bytes > 0
    assert held.total - out.nbytes == timeline.saved_bytes
    cotangents = [torch.ones_like(out)]
    memory.add(cotangents)
    with memory:
        gradients_handed_on([out], parameters, cotangents)
    plain = tr.checkpoint(model, policy=everything_saveable)
    plain(x)
    assert memory.peak == timeline.peak <= 0.7 * timeline_of(plain.last_program).peak
    report = tr.explain(f, x)
    assert report.total == held.total
    assert report.offloaded_total == timeline.offloaded_bytes
    assert repr(policy) == f"memory_budget(0.7, cost_model={FAST_LINK!r}, offload=True)"
    assert policy.spelling is None


def test_a_budget_needs_a_link_to_offload_over(step):
    model, x = step
    for offloads in (
        lambda: memory_budget(0.7, cost_model=CostModel.of("m1"), offload=True),
        lambda: tr.checkpoint(model, policy=memory_budget(0.7, offload=True))(x),
    ):
        with pytest.raises(PlanError, match="offload=True: .* has no link to a host"):
            offloads()


def test_a_value_begins_to_come_back_one_operator_of_the_backward_pass_ahead(step):
    model, x = step
    found = tr.plan(model, x, budget=0.65, cost_model=FAST_LINK, offload=True)
    nodes = [n for n in found.backward_graph.graph.nodes if n.op == "call_function"]
    for i, node in enumerate(nodes):
        if node.target is start_fetch:
            between = nodes[i + 1 : nodes.index(next(iter(node.users)))]
            steps = [n for n in between if n.name.startswith(("sigmoid_backward", "mm", "sum"))]
            assert len(steps) == 1


def test_a_compiler_saves_what_a_plan_offloads(step):
    model, x = step
    found = tr.plan(model, x, budget=0.72, cost_model=FAST_LINK, offload=True)
    options = {"policy": from_plan(found), "codegen": "eager"}
    f = torch.compile(model, backend="torchremat", options=options)
    with pytest.warns(OffloadWarning, match="saved on their device"):
        assert_same(gradients(f, model, x), gradients(model, model, x))


def test_a_plan_that_offloads_is_read_as_it_was_written(pair):
    for found in pair:
        again = Plan.from_json(found.to_json())
        assert again.to_json() == found.to_json()
        assert again.summary() == found.summary()


def test_plans_written_before_there_was_offloading_are_read(pair):
    content = json.loads(pair[0].to_json())
    del content["offloaded_bytes"], content["link_seconds"], content["order"]["offloaded"]
    again = Plan.from_json(json.dumps(content))
    assert again.to_json() == pair[0].to_json()


def test_the_examples_of_the_page_about_offloading():
    page = Path(__file__).parents[2] / "docs" / "explanation" / "offloading.md"
    found = doctest.testfile(str(page), module_relative=False)
    assert found.attempted >= 6
    assert not found.failed


def test_a_plan_that_offloads_is_drawn(step):
    model, x = step
    found = tr.plan(model, x, budget=0.72, cost_model=FAST_LINK, offload=True)
    picture = picture_of(found)
    assert picture.totals()["offloaded"] == found.offloaded_bytes
    assert ("on the host", in_kib(found.offloaded_bytes)) in picture.figures
    copies = [value for value in picture.values if value.op == "start_copy"]
    fetches = [value for value in picture.values if value.op == "start_fetch"]
    assert len(copies) == len(fetches) == len(found.order.offloaded)
    assert sum(value.nbytes for value in copies) == 0
    assert sum(value.nbytes for value in fetches) == found.offloaded_bytes
    assert all(value.seconds is None for value in (*copies, *fetches))
