"""Plans with updates in the backward pass: the bytes that they say, and the plain loop's bits."""

import copy
from dataclasses import replace

import pytest
import torch

import torchremat as tr
from tests.helpers import one_in
from tests.planning.stepping import MODELS, OPTIMIZERS, Mlp, make, train
from torchremat.checkpoint_policies import from_plan
from torchremat.errors import BudgetError, BudgetWarning
from torchremat.measure import resident_bytes
from torchremat.optim import step_in_backward
from torchremat.optim.step_in_backward import stepping_of
from torchremat.planning import CostModel, Plan
from torchremat.planning.api import _prepare
from torchremat.planning.budget import Budget
from torchremat.planning.costs.device_rates import rates_of
from torchremat.planning.memory.update_bytes import find_updates
from torchremat.planning.step.order import order_of
from torchremat.planning.step.traced_step import region_of


def plan_least(model, x, optimizer):
    """The plan of the least budget that can be met with updates in the backward pass."""
    with pytest.raises(BudgetError, match="even with updates in the backward pass") as error:
        tr.plan(model, x, budget=1, optimizer=optimizer)
    return tr.plan(model, x, budget=error.value.least_bytes, optimizer=optimizer)


@pytest.mark.parametrize(("name", "optimizer"), one_in(3, MODELS, OPTIMIZERS))
@pytest.mark.sampled(2)
def test_a_plan_keeps_to_a_budget_that_all_gradients_exceed(name, optimizer):
    plain_peak, *plain = train(*make(name, optimizer))
    model, x, stepped = make(name, optimizer)
    resident = resident_bytes(model, stepped, x)
    plan = plan_least(model, x, stepped)
    assert plan.updates_in_backward == sum(p.requires_grad for p in model.parameters())
    tr.nn.wrap(model, policy=from_plan(plan))
    peak, *found = train(model, x, stepped)
    assert all(torch.equal(a, b) for a, b in zip(found[0], plain[0], strict=True))
    assert repr(found[1]) == repr(plain[1])
    assert peak <= plan.peak_bytes - resident
    assert peak < plain_peak


def test_gradients_of_an_mlp_take_the_memory_of_one():
    model, x, optimizer = make()
    layer = 4 * 128 * 129
    budget = resident_bytes(model, optimizer, x) + 2 * layer
    plan = tr.plan(model, x, budget=budget, optimizer=optimizer)
    assert plan.baseline.peak_bytes - resident_bytes(model, optimizer, x) > 8 * layer
    assert plan.peak_bytes - resident_bytes(model, optimizer, x) < 1.5 * layer
    assert plan.recompute_seconds == 0
    assert "16 parameters are updated in the backward pass" in str(plan)
    assert any(point.name.endswith("/update") for point in plan.timeline())


@pytest.mark.parametrize("name", ["mlp", "gpt", "shared"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6])
@pytest.mark.sampled(3)
def test_a_schedule_takes_no_more_than_its_numbers_say(name, part):
    """An update waits for all that reads the parameter, in whatever order a search puts it."""
    model, x, optimizer = make(name)
    args = (model, (x,), {}, optimizer, "auto", None, None, False)
    step = _prepare(*args).with_updates(optimizer)
    low, high = step.planner.find_lowest().peak_bytes, step.planner.plain.peak_bytes
    room = step.resident + int(low + part * (high - low))
    planned = step.planner.search(Budget(nbytes=room)).planned
    plan = step.plan(Budget(nbytes=room), "a plan")
    assert plan.peak_bytes - step.resident <= planned.costs.peak
    assert order_of(planned.graph_schedule, planned.step.joint) == plan.order


@pytest.mark.parametrize("is_autocast", one_in(2, [False, True]))
def test_steps_of_changing_lengths(is_autocast):
    found = []
    for is_planned in (False, True):
        model, _, optimizer = make("gpt", "adamw")
        if is_planned:
            longest = torch.arange(12).reshape(2, 6)
            with torch.autocast("cpu", enabled=is_autocast):
                plan = plan_least(model, longest, optimizer)
                tr.nn.wrap(model, policy=from_plan(plan))
        torch.manual_seed(1)
        for length in (6, 3, 6, 5):
            optimizer.zero_grad()
            with torch.autocast("cpu", enabled=is_autocast):
                loss = model(torch.arange(2 * length).reshape(2, length))
            loss.backward()
            optimizer.step()
        found.append((list(model.parameters()), optimizer.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert repr(found[0][1]) == repr(found[1][1])


def test_a_budget_that_needs_no_updates_has_none():
    model, x, optimizer = make()
    plan = tr.plan(model, x, budget="100%", optimizer=optimizer)
    assert plan.updates_in_backward == 0
    tr.nn.wrap(model, policy=from_plan(plan))
    train(model, x, optimizer)
    assert stepping_of(optimizer) is None


def test_a_percentage_is_one_of_the_plain_step():
    model, x, optimizer = make()
    plan = tr.plan(model, x, budget="80%", optimizer=optimizer)
    assert plan.updates_in_backward == 16
    assert plan.budget == int(0.8 * plan.baseline.peak_bytes)


def test_what_steps_already_is_counted_so():
    model, x, optimizer = make()
    with step_in_backward(optimizer):
        plan = tr.plan(model, x, budget="100%", optimizer=optimizer)
    assert plan.updates_in_backward == 16
    assert plan.peak_bytes < plan.baseline.peak_bytes


@pytest.mark.parametrize("settings", [{"max_norm": 1.0}, {"accumulate": 2}])
def test_gradients_that_are_clipped_or_accumulated_stay(settings):
    model, x, optimizer = make()
    with step_in_backward(optimizer, **settings):
        plan = tr.plan(model, x, budget="100%", optimizer=optimizer)
    assert plan.updates_in_backward == 0


def test_only_parameters_of_the_optimizer_are_updated():
    model, x, _ = make()
    optimizer = torch.optim.SGD(list(model.layers[:4].parameters()), lr=0.1)
    plan = plan_least(model, x, optimizer)
    assert plan.updates_in_backward == 8
    assert plan.peak_bytes - resident_bytes(model, optimizer, x) > 4 * 4 * 128 * 129


def test_no_updates_where_an_argument_gets_a_gradient():
    model, x, optimizer = make()
    with pytest.raises(BudgetError) as error:
        tr.plan(model, x.requires_grad_(), budget=1, optimizer=optimizer)
    assert "updates" not in str(error.value)


def test_no_updates_where_processes_sum_their_gradients(monkeypatch):
    model, x, optimizer = make()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert find_updates(region_of(model, (x,), {}), optimizer) == {}


class Counting(torch.optim.SGD):
    """Has a count for all parameters."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_no_updates_by_an_optimizer_of_all_parameters_at_once():
    model, x, _ = make()
    optimizer = Counting(model.parameters(), lr=0.1)
    with pytest.raises(BudgetError) as error:
        tr.plan(model, x, budget=1, optimizer=optimizer)
    assert "updates" not in str(error.value)


def test_a_plan_for_a_class_warns_until_an_optimizer_steps(tmp_path):
    model, x, optimizer = make()
    plan = plan_least(model, x, torch.optim.SGD)
    plan.save(tmp_path / "plan.json")
    wrapped = tr.nn.wrap(copy.deepcopy(model), f"plan:{tmp_path / 'plan.json'}")
    with pytest.warns(BudgetWarning, match="no optimizer makes any.*step_in_backward"):
        wrapped(x).backward()
    wrapped = tr.nn.wrap(model, from_plan(plan))
    with step_in_backward(optimizer):
        peak, *_ = train(model, x, optimizer)
    assert peak <= plan.peak_bytes - resident_bytes(model, x)


def test_on_the_meta_device():
    with torch.device("meta"):
        model = Mlp(1024, 6)
        x = torch.empty(4, 1024)
    plan = plan_least(model, x, torch.optim.AdamW)
    layer = 4 * 1024 * 1025
    # weights, two moments; the gradient, and two tensors for an update
    assert 6 * 3 * layer < plan.peak_bytes < (6 * 3 + 3.5) * layer


@pytest.mark.slow
def test_with_tiles():
    model, x, optimizer = make("gpt", "sgd")
    plan = tr.plan(model, x, budget=plan_least(model, x, optimizer).budget, optimizer=optimizer)
    tiled = tr.plan(model, x, budget=plan.budget, optimizer=optimizer, tile=True)
    assert tiled.updates_in_backward == plan.updates_in_backward
    assert tiled.peak_bytes <= tiled.budget


def test_a_page_of_a_plan_with_updates(tmp_path):
    model, x, optimizer = make()
    assert plan_least(model, x, optimizer).to_html(tmp_path / "plan.html").exists()


@pytest.mark.parametrize("budget", ["least", "time:+0%"])
def test_the_least_memory_has_updates_where_they_lower_it(budget):
    _, *plain = train(*make())
    model, x, optimizer = make()
    resident = resident_bytes(model, optimizer, x)
    plan = tr.plan(model, x, budget=budget, optimizer=optimizer)
    assert plan.updates_in_backward == 16
    assert plan.peak_bytes < 0.9 * plan.baseline.peak_bytes
    assert plan.recompute_seconds == 0 or budget == "least"
    tr.nn.wrap(model, policy=from_plan(plan))
    peak, *found = train(model, x, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(found[0], plain[0], strict=True))
    assert peak <= plan.peak_bytes - resident


class Wide(torch.nn.Module):
    """A step whose peak is before there is a gradient of a parameter."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.exp(self.linear(x).unsqueeze(0) * torch.ones(64, 1, 1)).sum()


def test_the_least_memory_has_no_updates_where_they_spare_nothing():
    model, x = Wide(), torch.ones(16, 8)
    assert find_updates(region_of(model, (x,), {}), torch.optim.SGD)
    plan = tr.plan(model, x, budget="time:+0%", optimizer=torch.optim.SGD)
    assert plan.updates_in_backward == 0


LINKED = CostModel.of(replace(rates_of("cpu"), host_bytes_per_second=64e9))
WEIGHT = 4 * 128 * 128


def plan_with_host(model, x, optimizer, budget, *, offload=True):
    return tr.plan(model, x, budget=budget, optimizer=optimizer, offload=offload, cost_model=LINKED)


def test_state_goes_to_the_host_where_updates_are_not_enough(tmp_path):
    _, *plain = train(*make("mlp", "adamw"))
    model, x, optimizer = make("mlp", "adamw")
    budget = resident_bytes(model, optimizer, x) - 4 * WEIGHT
    with pytest.raises(BudgetError, match="even with updates in the backward pass. The least"):
        plan_with_host(model, x, optimizer, budget, offload=False)
    plan = plan_with_host(model, x, optimizer, budget)
    assert plan.peak_bytes <= budget < plan.baseline.peak_bytes - 12 * WEIGHT
    assert (
        plan.state_on_host_bytes == 2 * 5 * WEIGHT
    )  # of three of eight layers it is on the device
    assert plan.state_link_seconds == pytest.approx(2 * plan.state_on_host_bytes / 64e9)
    assert "640 KiB of the optimizer's state are on the host, 20.5 us on the link" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert "optimizer's state on the host" in plan.to_html(tmp_path / "plan.html").read_text()
    tr.nn.wrap(model, policy=from_plan(plan))
    peak, *found = train(model, x, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(found[0], plain[0], strict=True))
    assert repr(found[1]) == repr(plain[1])
    small = sum(s.nbytes for s in state_tensors_of(optimizer) if s.nbytes < WEIGHT)
    assert peak <= plan.peak_bytes - resident_bytes(model, x) - small
    assert stepping_of(optimizer).offload
    stepping_of(optimizer).remove()


def state_tensors_of(optimizer):
    return [value for state in optimizer.state.values() for value in state.values()]


def test_the_least_memory_has_state_on_the_host():
    model, x, optimizer = make("mlp", "adamw")
    found = [plan_with_host(model, x, optimizer, "least", offload=o) for o in (False, True)]
    assert found[1].peak_bytes <= found[0].peak_bytes - 10 * WEIGHT
    with pytest.raises(
        BudgetError, match="backward pass and the optimizer's state on the host"
    ) as e:
        plan_with_host(model, x, optimizer, found[1].peak_bytes - 1)
    assert e.value.least_bytes == found[1].peak_bytes
    assert f"of {in_mib(found[0].baseline.peak_bytes)} without" in str(e.value)


def in_mib(nbytes):
    return f"{nbytes / 2**20:.2f} MiB"


def test_state_stays_where_a_budget_needs_no_other():
    model, x, optimizer = make("mlp", "adamw")
    for budget in ("100%", "time:+0%"):
        assert plan_with_host(model, x, optimizer, budget).state_on_host_bytes == 0
    model, x, optimizer = make("mlp", "adamw")
    with step_in_backward(optimizer, offload=True):
        plan = tr.plan(model, x, budget="100%", optimizer=optimizer)
    assert plan.state_on_host_bytes == 2 * 5 * WEIGHT


def test_a_plan_for_a_class_says_to_leave_state_to_the_host():
    model, x, _ = make("mlp", "adamw")
    plan = plan_with_host(model, x, torch.optim.AdamW, "least")
    wrapped = tr.nn.wrap(model, from_plan(plan))
    with pytest.warns(BudgetWarning, match=r"step_in_backward\(optimizer, offload=True\)"):
        wrapped(x).backward()
