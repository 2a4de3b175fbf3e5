"""An option that is misspelt does not go to a model that takes any keyword."""

import pytest
import torch

import torchremat as tr


class Takes(torch.nn.Linear):
    def forward(self, x, policie=1, **rest):
        return super().forward(x) * policie * rest.get("scale", 1)


TOOLS = {
    "estimate": (tr.estimate, {"optimzer": torch.optim.SGD}, "optimizer"),
    "plan": (tr.plan, {"budget": "100%", "solvr": "milp"}, "solver"),
    "pareto": (tr.planning.pareto, {"point": 2}, "points"),
    "explain": (tr.explain, {"polcy": "full"}, "policy"),
    "compare": (tr.compare, {"policies": ["full"], "policys": ["dots"]}, "policies"),
    "split_budget": (
        tr.nn.split_budget,
        {"budget": "1KiB", "select": "*", "devise": "h100"},
        "device",
    ),
}


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("kind", [Takes, torch.nn.Linear])
def test_it_is_named_with_the_nearest(name, kind):
    tool, options, nearest = TOOLS[name]
    with pytest.raises(
        TypeError, match=f"{name} has no option .*nearest: '{nearest}'.*{kind.__name__}"
    ):
        tool(kind(2, 2), torch.ones(2, 2), **options)


@pytest.mark.parametrize("given", [{"policie": 2}, {"scale": 2}, {"optimzer": torch.ones(2)}])
def test_what_the_model_takes_is_its_own(given):
    assert tr.estimate(Takes(2, 2), torch.ones(2, 2), **given).peak_bytes > 0
