"""A plan that was made by the costs of one device, on another: a warning where it is worth one."""

import json
import re
import warnings
from dataclasses import replace

import pytest
import torch

import torchremat as tr
from tests.planning import models
from torchremat.checkpoint_policies import from_plan
from torchremat.errors import PlanError, PlanWarning
from torchremat.planning.cost_model import CostModel
from torchremat.planning.costs.device_rates import KNOWN_DEVICES, is_here
from torchremat.planning.costs.measured_rates import label_of


@pytest.fixture
def model():
    torch.manual_seed(0)
    return models.GPT(4, 256)


TOKENS = torch.zeros(8, 64, dtype=torch.long)


def run_twice(model, policy):
    """The warnings of two steps under a policy."""
    step = tr.checkpoint(model, policy=policy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(TOKENS).backward()
    return [str(w.message) for w in caught if issubclass(w.category, PlanWarning)]


def test_the_warning_says_what_a_plan_for_the_device_would_add(model):
    plan = tr.plan(model, TOKENS, budget="60%", device="h100")
    (message,) = run_twice(model, from_plan(plan))
    here = tr.plan(model, TOKENS, budget=plan.peak_bytes, device="cpu")
    figures = re.search(r"adds (\S+) ms to a step, and a plan for that device (\S+) ms", message)
    added, less = map(float, figures.groups())
    assert "made by the costs of NVIDIA H100 SXM. On a CPU of eight cores" in message
    assert less == pytest.approx(1e3 * here.recompute_seconds, rel=0.05)
    assert added > 1.1 * less


def test_a_plan_that_was_saved_warns_as_well(model, tmp_path):
    tr.plan(model, TOKENS, budget="60%", device="h100").save(tmp_path / "plan.json")
    assert len(run_twice(model, f"plan:{tmp_path / 'plan.json'}")) == 1


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_no_warning_where_no_other_plan_is_better(model, device):
    assert run_twice(model, from_plan(tr.plan(model, TOKENS, budget="95%", device=device))) == []
    here = tr.plan(model, TOKENS, budget="60%", device="cpu")
    assert run_twice(model, from_plan(here)) == []


def test_no_warning_where_the_rates_were_measured_here(model):
    name = f"{label_of(torch.device('cpu'))}, measured"
    measured = CostModel.of(replace(KNOWN_DEVICES["h100"], name=name))
    plan = tr.plan(model, TOKENS, budget="60%", cost_model=measured)
    assert run_twice(model, from_plan(plan)) == []


def test_a_cpu_that_was_measured_elsewhere_is_not_judged_by_a_cpu_in_general(model):
    rates = replace(KNOWN_DEVICES["cpu"], name="another CPU", bytes_per_second=1e9)
    plan = tr.plan(model, TOKENS, budget="60%", cost_model=CostModel.of(rates))
    assert run_twice(model, from_plan(plan)) == []


def test_a_device_that_is_not_here_is_not_compared(model, monkeypatch):
    plan = tr.plan(model, TOKENS, budget="60%", device="h100")
    monkeypatch.setattr("torchremat.planning.from_plan.is_here", lambda device: False)
    assert run_twice(model, from_plan(plan)) == []
    assert is_here(torch.device("cpu")) and not is_here(torch.device("cuda", 99))


def test_a_plan_that_was_saved_without_rates_runs(model):
    content = json.loads(tr.plan(model, TOKENS, budget="60%", device="h100").to_json())
    del content["rates"]
    plan = tr.planning.Plan.from_json(json.dumps(content))
    assert plan.rates is None
    assert run_twice(model, from_plan(plan)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matmul_f64": -1.0}, "matmul_f64=-1.0"),
        ({"speed": 1.0}, r"rates\.speed is 1\.0, but there are only name, matmul_f64"),
        ({"name": None}, r"rates\.name is None, but it is to be text"),
    ],
)
def test_rates_that_are_none_are_refused(model, change, message):
    content = json.loads(tr.plan(model, TOKENS, budget="60%").to_json())
    content["rates"] |= change
    with pytest.raises(PlanError, match=message):
        tr.planning.Plan.from_json(json.dumps(content))


def test_rates_that_lack_one_are_refused(model):
    content = json.loads(tr.plan(model, TOKENS, budget="60%").to_json())
    del content["rates"]["pointwise"]
    with pytest.raises(PlanError, match="pointwise"):
        tr.planning.Plan.from_json(json.dumps(content))
