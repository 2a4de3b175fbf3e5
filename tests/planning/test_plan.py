"""`plan`, `pareto`, `estimate`: figures, files, bad input."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import in_kib
from tests.planning.models import GPT, MODELS
from torchremat import planning
from torchremat.errors import (
    BudgetError,
    BudgetSpellingError,
    ConcretizationError,
    PlanError,
    TraceError,
)
from torchremat.measure import LiveBytes

TOKENS = torch.randint(0, 64, (2, 32))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return GPT()


@pytest.fixture(scope="module")
def plan(model):
    return tr.plan(model, TOKENS, budget=0.7)


def test_figures_agree_with_the_graphs_that_run(model, plan):
    timeline = planning.simulate(plan.forward_graph, plan.backward_graph)
    assert plan.peak_bytes == timeline.peak == plan.timeline().peak <= plan.budget
    assert plan.saved_bytes == timeline.saved_bytes < plan.baseline.saved_bytes
    assert 0 < plan.lower_bound_seconds <= plan.recompute_seconds
    assert 0 <= plan.gap < 1
    assert plan.recompute_flops >= 0
    assert set(plan.decisions.values()) == {"saved", "recomputed"}
    names = {n.name for g in (plan.forward_graph, plan.backward_graph) for n in g.graph.nodes}
    assert set(plan.decisions) <= {name.removesuffix("_again") for name in names}
    with LiveBytes() as memory:
        torch.autograd.grad(model(TOKENS), list(model.parameters()))
    assert plan.baseline.peak_bytes == memory.peak


def test_recomputed_flops_are_those_that_pytorch_counts(model, plan):
    from torch.utils.flop_counter import FlopCounterMode

    fun = tr.checkpoint(model, policy=tr.checkpoint_policies.from_plan(plan))
    fun(TOKENS)
    counts = []
    for call in (model, fun):
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(call(TOKENS), list(model.parameters()))
        counts.append(counter.get_total_flops())
    assert counts[0] == plan.baseline.flops
    assert counts[1] - counts[0] == plan.recompute_flops


def test_a_budget_as_large_as_the_peak_changes_nothing(model):
    for budget in (1.0, "100%", "1TiB"):
        found = tr.plan(model, TOKENS, budget=budget)
        assert found.recompute_seconds == found.gap == 0
        assert found.peak_bytes == found.baseline.peak_bytes


def test_the_summary_fits_a_page(plan):
    text = plan.summary()
    assert str(plan) == text
    assert max(map(len, text.splitlines())) <= 100
    assert {"peak", "saved", "time", "flops"} <= set(text.split())


def test_a_summary_explains_a_wide_gap(plan, tmp_path):
    reason = "so near the least peak, recomputation takes memory that the bound counts in part"
    wide = replace(plan, lower_bound_seconds=plan.recompute_seconds / 2, gap_reason=reason)
    last = str(wide).splitlines()[-1]
    assert last == f"gap 50 %: {reason}"
    assert len(last) <= 100
    wide.save(tmp_path / "wide.json")
    assert planning.Plan.load(tmp_path / "wide.json").gap_reason == reason


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(2)
def test_nothing_is_allocated_and_nothing_changes(name):
    make_model, make_input = MODELS[name]
    model, x = make_model(), make_input()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    generator = torch.get_rng_state()
    with LiveBytes() as memory:
        tr.plan(model, x, budget=0.8)
        tr.estimate(model, x, policy="full")
    assert memory.peak < 20_000  # states of generators, and small constants
    assert torch.equal(generator, torch.get_rng_state())
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])
    assert all(p.grad is None for p in model.parameters())


def test_a_function_is_differentiated_with_respect_to_its_floating_arguments():
    found = tr.plan(lambda x, n: torch.sin(x * n).sum(), torch.ones(256), 2, budget=1.0)
    assert found.baseline.saved_bytes == 1024


# --- optimizers and the whole step ---------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.SGD,
        lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    ],
)
def test_the_bytes_of_an_optimizer_are_those_it_keeps(model, make):
    parameters = list(model.parameters())
    real = make(parameters) if not isinstance(make, type) else make(parameters, lr=0.0)
    given = make if isinstance(make, type) else real
    found = tr.estimate(model, TOKENS, optimizer=given)
    real.param_groups[0]["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    real.step()
    kept = [v for state in real.state.values() for v in state.values() if torch.is_tensor(v)]
    assert found.optimizer_bytes == sum(v.untyped_storage().nbytes() for v in kept)
    for parameter in parameters:
        parameter.grad = None


def test_with_an_optimizer_the_budget_is_of_the_whole_step(model):
    whole = tr.estimate(model, TOKENS, optimizer=torch.optim.AdamW)
    found = tr.plan(model, TOKENS, budget=0.9, optimizer=torch.optim.AdamW)
    assert found.baseline.peak_bytes == whole.total_bytes
    assert found.peak_bytes <= found.budget == int(0.9 * whole.total_bytes)
    with pytest.raises(BudgetError, match=r"of it there anyway"):
        tr.plan(model, TOKENS, budget="100KB", optimizer=torch.optim.AdamW)
    with pytest.raises(TypeError, match=r"='AdamW' is text: give its class, torch.optim.AdamW"):
        tr.plan(model, TOKENS, budget="100%", optimizer="AdamW")
    with pytest.raises(TypeError, match=r"optimizer=3 is none"):
        tr.plan(model, TOKENS, budget=0.9, optimizer=3)


# --- estimates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, "none", "full", "dots", "budget:80%"])
def test_estimates_are_what_is_measured(model, policy):
    found = tr.estimate(model, TOKENS, policy=policy)
    fun = model if policy is None else tr.checkpoint(model, policy=policy)
    fun(TOKENS)
    with LiveBytes() as memory:
        torch.autograd.grad(fun(TOKENS), list(model.parameters()))
    assert found.peak_bytes == memory.peak
    parameters = sum(p.nbytes for p in model.parameters())
    assert found.parameter_bytes == found.gradient_bytes == parameters
    assert found.input_bytes == TOKENS.nbytes
    assert found.total_bytes == memory.peak + parameters + TOKENS.nbytes
    assert found.fits(found.total_bytes)
    assert not found.fits(found.total_bytes - 1)
    assert found.seconds > 0


@pytest.mark.parametrize("policy", ["full", "dots", "none"])
def test_without_a_policy_the_checkpoints_inside_decide(policy):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    tr.nn.wrap(model, policy, select="layers.*")
    x = torch.randn(2, 8, 16)
    found = tr.estimate(model, x)
    model(x)
    with LiveBytes() as memory:
        y = model(x)
        torch.autograd.grad(y, list(model.parameters()), torch.ones_like(y))
    assert found.saved_bytes == tr.explain(model, x).total
    # autograd holds the cotangent of a checkpoint until its backward pass has ended
    assert memory.peak - y.nbytes <= found.peak_bytes <= memory.peak


@pytest.mark.parametrize(("policy", "select"), [("full", None), ("dots", "layers.*")])
def test_a_plan_decides_on_what_is_in_the_checkpoints_inside(policy, select):
    model = GPT()
    alone = tr.plan(model, TOKENS, budget="60%")
    wrapped = tr.plan(tr.nn.wrap(model, policy, select=select), TOKENS, budget="60%")
    assert wrapped.fingerprint == alone.fingerprint
    assert wrapped.peak_bytes <= wrapped.budget == alone.budget
    run = tr.checkpoint(model, policy=tr.checkpoint_policies.from_plan(wrapped))
    parameters = list(model.parameters())
    expected = torch.autograd.grad(tr.nn.unwrap(model)(TOKENS), parameters)
    with LiveBytes() as memory:
        found = torch.autograd.grad(run(TOKENS), parameters)
    assert memory.peak <= wrapped.budget
    assert all(map(torch.equal, found, expected))


def test_estimates_say_what_does_not_fit_a_page(model):
    assert max(map(len, str(tr.estimate(model, TOKENS)).splitlines())) <= 60
    with pytest.raises(TypeError, match=r"fits\(0.5\): memory is bytes"):
        tr.estimate(model, TOKENS).fits(0.5)


# --- the curve -----------------------------------------------------------------------------------


def test_less_memory_never_takes_less_time(model):
    curve = planning.pareto(model, TOKENS, points=5)
    assert len(curve) == 5
    seconds = [point.recompute_seconds for point in curve]
    assert seconds == sorted(seconds)
    assert seconds[0] == 0
    assert all(point.peak_bytes <= point.budget for point in curve)
    assert str(curve).count("\n") >= 5


@pytest.mark.parametrize(
    ("points", "error"),
    [(0, ValueError), ("80%", TypeError), (2.5, TypeError), ([2.0], ValueError)],
)
def test_points_that_are_none(model, points, error):
    with pytest.raises(error):
        planning.pareto(model, TOKENS, points=points)


# --- files ---------------------------------------------------------------------------------------


def test_a_plan_is_read_as_it_was_written(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    again = planning.Plan.load(tmp_path / "plan.json")
    assert again == plan and hash(again) == hash(plan)
    assert again.to_json() == plan.to_json()
    assert again.fingerprint == plan.fingerprint
    assert again.summary() == plan.summary()
    with pytest.raises(PlanError, match=r"a plan that was loaded has no graphs"):
        again.timeline()


def _changed(**changes):
    return lambda text: json.dumps({**json.loads(text), **changes})


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (
            lambda text: text[: len(text) // 2],
            r"plan.json is not a plan: it is not JSON, or was cut off",
        ),
        (lambda text: "[1, 2]", r"is not a plan of torchremat, though it is JSON"),
        (_changed(version=99), r"of version 99, and this torchremat reads version 1"),
        (_changed(graph=["x"]), r"was changed: its fingerprint does not fit"),
        (_changed(baseline={}), r"lacks something"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(plan, tmp_path, spoil, match):
    path = tmp_path / "plan.json"
    path.write_text(spoil(plan.to_json()))
    with pytest.raises(PlanError, match=match):
        planning.Plan.load(path)


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "match"),
    [
        ("2GBi", r"'GBi' is not a unit, nearest: 'GiB'"),
        ("much", r"it is not a number with a unit"),
        ("100", r"it has no unit: write '100GiB', or '100B'"),
        (-1, r"positive number of bytes, but it is -1"),
        ("-1GiB", r"a budget is positive"),
        (0, r"positive"),
        (1.5, r"in \(0, 1\], but it is 1.5. For bytes give an int"),
        (0.0, r"in \(0, 1\]"),
        (float("nan"), r"in \(0, 1\]"),
        ("150%", r"in \(0, 1\], but it is '150%'"),
    ],
)
def test_budgets_that_are_none(budget, match):
    for use in (
        lambda: tr.plan(torch.sin, torch.ones(3), budget=budget),
        lambda: tr.checkpoint_policies.memory_budget(budget),
    ):
        with pytest.raises(BudgetSpellingError, match=match):
            use()


@pytest.mark.parametrize("budget", [None, True, [1], 1j])
def test_budgets_of_other_types(budget):
    with pytest.raises(TypeError, match=r"a budget is bytes .* a fraction .*'least' memory"):
        tr.plan(torch.sin, torch.ones(3), budget=budget)


@pytest.mark.parametrize(
    ("fun", "args", "error", "match"),
    [
        (3, (), TypeError, r"must be a function of tensors or an nn.Module"),
        (lambda x: x * 2, (torch.ones(3, dtype=torch.long),), TraceError, r"nothing to differ"),
        (
            lambda x: x * 2 if x.sum() > 0 else x,
            (torch.ones(3),),
            ConcretizationError,
            r"test_plan",
        ),
    ],
)
def test_functions_that_cannot_be_planned(fun, args, error, match):
    with pytest.raises(error, match=match):
        tr.plan(fun, *args, budget=0.5)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"solver": "simplex"}, ValueError, r"solver='simplex' is none"),
        ({"device": "h10000"}, ValueError, r"h10000"),
        ({"cost_model": 3}, TypeError, r"cost_model=3 is none"),
    ],
)
def test_settings_that_are_none(settings, error, match):
    with pytest.raises(error, match=match):
        tr.plan(nn.Linear(3, 3), torch.ones(2, 3), budget=0.9, **settings)


def test_a_plan_draws_itself(plan, tmp_path):
    plan.to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert in_kib(plan.peak_bytes) in page
