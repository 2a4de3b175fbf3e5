import copy

import pytest
import torch
from torch import nn

import torchremat as tr


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Tanh())
            for _ in range(4)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().sum()


SELECTS = {
    "pattern": "layers.*",
    "positions": "first:2,last:1",
    "class": nn.Sequential,
    "predicate": lambda name, module: name == "layers.2",
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


x = torch.ones(16, 8)


def wrapped(model, policy, select):
    return tr.nn.wrap(copy.deepcopy(model), policy, select=select)


@pytest.mark.parametrize("policy", [None, "full", "dots", "budget:96%"])
@pytest.mark.parametrize("select", SELECTS.values(), ids=list(SELECTS))
@pytest.mark.sampled(3)
def test_explain_of_a_selection_is_that_of_the_wrapped_model(model, policy, select):
    report = tr.explain(model, x, policy=policy, select=select)
    assert report.rows == tr.explain(wrapped(model, policy, select), x).rows
    assert report.total <= tr.explain(model, x).total


@pytest.mark.parametrize("policy", [None, "full", "dots", "budget:96%"])
@pytest.mark.parametrize("select", SELECTS.values(), ids=list(SELECTS))
@pytest.mark.sampled(3)
def test_estimate_of_a_selection_is_that_of_the_wrapped_model(model, policy, select):
    found = tr.estimate(model, x, policy=policy, select=select)
    assert found == tr.estimate(wrapped(model, policy, select), x)
    assert found.saved_bytes <= tr.estimate(model, x).saved_bytes


def test_compare_puts_each_policy_on_the_selection(model):
    found = tr.compare(model, x, policies=[None, "dots"], select="layers.*")
    assert [row.name for row in found] == ["plain", "nothing_saveable", "dots_saveable"]
    plain, full, dots = found
    assert plain.report.rows == tr.explain(model, x).rows
    assert full.report.rows == tr.explain(wrapped(model, None, "layers.*"), x).rows
    assert dots.report.rows == tr.explain(wrapped(model, "dots", "layers.*"), x).rows
    assert full.held < dots.held < plain.held
    assert full.peak < plain.peak


def test_the_rows_of_a_selection_are_what_the_step_reports(model):
    model = wrapped(model, "dots", "layers.*")
    model(x)
    ran = tr.nn.report(model)
    asked = tr.explain(Model(), x, policy="dots", select="layers.*")
    recomputed = [(r.name, r.nbytes, r.reason) for r in asked if r.decision == "recomputed"]
    assert recomputed == [(r.name, r.nbytes, r.reason) for r in ran if r.decision == "recomputed"]


def test_a_model_stays_as_it_is_and_what_was_wrapped_in_it_is_replaced(model):
    tr.nn.wrap(model, "dots", select="layers.0")
    before = model.layers[0].forward
    report = tr.explain(model, x, select="layers.0")
    assert model.layers[0].forward is before
    reasons = {row.reason for row in report if row.decision == "recomputed"}
    assert reasons == {"full does not let it be saved"}
    assert "forward" not in vars(model.layers[1])
    assert sum(p.grad is not None for p in model.parameters()) == 0


@pytest.mark.parametrize(
    "asked",
    [
        lambda f, select: tr.explain(f, x, policy="dots", select=select),
        lambda f, select: tr.estimate(f, x, policy="dots", select=select),
        lambda f, select: tr.compare(f, x, policies=["dots"], select=select),
    ],
    ids=["explain", "estimate", "compare"],
)
def test_errors_are_those_of_wrap(model, asked):
    for select in ("layer.*", "first:9", "layers.*,,", ["layers.0"], "layers"):
        with pytest.raises((TypeError, ValueError)) as by_wrap:
            tr.nn.wrap(model, "dots", select=select)
        with pytest.raises(type(by_wrap.value)) as raised:
            asked(model, select)
        assert str(raised.value) == str(by_wrap.value)
    with pytest.raises(TypeError, match=r"picks modules of an nn.Module, and .*step is none"):

        def step(x):
            return model(x)

        asked(step, "layers.*")
