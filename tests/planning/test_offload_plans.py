"""Plans that offload: what they say, what refuses them, and that nobody else offloads."""

import doctest
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import torchremat as tr
from torchremat import planning
from torchremat.checkpoint_policies import from_plan
from torchremat.errors import NotAvailableError, PlanError
from torchremat.planning import CostModel, Plan
from torchremat.planning.devices import rates_of
from torchremat.planning.step import LEAST_OFFLOAD


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
    model, x = tower(4, 16), torch.empty(LEAST_OFFLOAD // 64 - 1, 16, device="meta")
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


def test_plans_that_offload_cannot_be_run_yet(pair, tmp_path):
    _, found = pair
    path = tmp_path / "plan.json"
    found.save(path)
    first = next(name for name, what in found.decisions.items() if what == "offloaded")
    for use in (
        lambda: from_plan(found),
        lambda: from_plan(str(path)),
        lambda: found.forward_graph,
        lambda: found.timeline(),
        lambda: Plan.load(path).backward_graph,
    ):
        with pytest.raises(NotAvailableError, match=rf"offloads '{first}'.*with offload=False"):
            use()


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
    page = Path(__file__).parents[2] / "docs" / "offloading.md"
    found = doctest.testfile(str(page), module_relative=False)
    assert found.attempted >= 6
    assert not found.failed
