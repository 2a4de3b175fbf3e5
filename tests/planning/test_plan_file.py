"""Files of plans: what they say is checked, and they serve steps that are no larger."""

import copy
import json
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import torchremat as tr
from tests.helpers import assert_same
from torchremat import planning
from torchremat.checkpoint_policies import from_plan
from torchremat.errors import BudgetWarning, PlanError


def build():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh()]
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(3) for layer in layers))


MODEL = build()
PLAN = tr.plan(MODEL, torch.ones(64, 16, requires_grad=True), budget="85%", device="h100")
TEXT = PLAN.to_json()


def run(model, rows):
    x = torch.linspace(-1, 1, rows * 16).view(rows, 16).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    found = [y, x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found


def spoilt(change):
    content = json.loads(TEXT)
    change(content)
    return json.dumps(content, indent=1)


def put(*where_and_value):
    *where, last, value = where_and_value

    def change(content):
        for key in where:
            content = content[key]
        content[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (put("order", "saved", 0, 999), r":\d+: order.saved\[0\] is 999, but there are \d+ nodes"),
        (put("order", "saved", 0, -1), r"order.saved is \[-1, .*but it is to be a list of pos"),
        (put("order", "forward", 1, 0), r":\d+: order.forward\[1\] is 0, but node 0 runs nothing"),
        (put("order", "saved", [9, 9]), r"order.saved\[1\] is 9, but positions rise, each once"),
        (put("order", "twice", []), r"order.twice is \[\], but there are only saved, forward"),
        (put("order", 3), r"order is 3, but it is to be an object"),
        (put("order", "saved", []), r"the length of order.saved is 0, but \d+ decisions say saved"),
        (put("decisions", "addmm", "lost"), r":\d+: decisions.addmm is 'lost', but it is to be"),
        (put("decisions", "addmm", ["saved"]), r"decisions.addmm is \['saved'\], but it is to"),
        (put("peak_bytes", 10**9), r":\d+: peak_bytes is 1000000000, but the budget is"),
        (put("peak_bytes", True), r"peak_bytes is True, but it is to be bytes"),
        (put("saved_bytes", 1.5), r"saved_bytes is 1.5, but"),
        (put("budget", 10**30), r"budget is 10+, but"),
        (put("baseline", "seconds", "fast"), r":\d+: baseline.seconds is 'fast', but it is to be"),
        (put("baseline", "colour", 1), r"baseline.colour is 1, but there are only"),
        (put("recompute_seconds", -1.0), r"recompute_seconds is -1.0, but it is to be seconds"),
        (put("recompute_seconds", 10**400), r"recompute_seconds is 10+\.\.\., but it is to be"),
        (put("lower_bound_seconds", 9.0), r"lower_bound_seconds is 9.0, but the plan adds"),
        (put("graph", 3, None), r"graph is \[.*, but it is to be a list of lines of text"),
        (put("device", None), r"device is None, but it is to be text"),
        (put("version", True), r"of version True"),
    ],
)
def test_what_no_plan_says_is_refused_with_its_line(change, match, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(spoilt(change))
    with pytest.raises(PlanError, match=match):
        planning.Plan.load(path)


def test_the_line_is_that_of_the_value(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(spoilt(put("order", "saved", 1, 999)))
    with pytest.raises(PlanError, match="999, but") as raised:
        planning.Plan.load(path)
    line = int(str(raised.value).partition("plan.json:")[2].partition(":")[0])
    assert path.read_text().splitlines()[line - 1].strip(" ,") == "999"


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, TEXT.replace('"recompute_flops": ', '"recompute_flops": NaN, "x": '),
     TEXT.replace('"budget": ', '"budget": ' + "9" * 5000), '{"format": "torchremat plan"}', "",
     TEXT.replace('"order": {', '"order": 3,\n "order": {')],
    ids=["nested", "nan", "digits", "empty plan", "empty", "twice"],
)  # fmt: skip
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(PlanError):
        planning.Plan.from_json(text)


def reordered():
    """The plan with one position dropped, exchanged with that before, or run once more."""
    for name in ("forward", "backward"):
        for i in range(len(PLAN.order.__dict__[name])):
            for change in (
                lambda order, i: order.pop(i),
                lambda order, i: order.insert(i, order.pop(i - 1)),
                lambda order, i: order.insert(i, order[i * 7 % len(order)]),
            ):
                content = json.loads(TEXT)
                change(content["order"][name], i)
                yield f"{name} {i}", content


def test_an_order_that_cannot_run_is_refused_and_any_other_gives_the_same_bits():
    expected, refused = run(MODEL, 64), 0
    for what, content in reordered():
        plan = planning.Plan.from_json(json.dumps(content))
        try:
            found = run(tr.nn.wrap(copy.deepcopy(MODEL), from_plan(plan)), 64)
        except PlanError as error:
            assert "before it is made. Make it again" in str(error)
            refused += 1
        else:
            assert_same(found, expected, what)
    assert refused >= len(PLAN.order.forward) + len(PLAN.order.backward)


def test_a_decision_that_the_order_does_not_make_is_refused():
    plan = planning.Plan.from_json(spoilt(put("decisions", "addmm", "offloaded")).replace(
        '"offloaded": []', f'"offloaded": [{PLAN.order.saved[-1] + 1}]'
    ))  # fmt: skip
    with pytest.raises(PlanError, match=r"decisions.addmm is 'offloaded', and by its order"):
        run(tr.nn.wrap(copy.deepcopy(MODEL), from_plan(plan)), 64)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@pytest.mark.filterwarnings("ignore:.*counts on updates in the backward pass")
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=150)
@given(st.data())
def test_a_spoilt_file_is_refused_or_trains_to_the_same_bits(data):
    """Whatever a file says, it is a `PlanError`, or the plan gives plain PyTorch's gradients."""
    content = json.loads(TEXT)
    place = content
    while True:
        key = data.draw(
            st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))
        )
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        place = inner
    if isinstance(place, list) and data.draw(st.booleans()):
        place.insert(key, data.draw(st.sampled_from(place)))
    elif data.draw(st.booleans()):
        del place[key]
    else:
        place[key] = data.draw(values)
    try:
        plan = planning.Plan.from_json(json.dumps(content, indent=1))
        wrapped = tr.nn.wrap(copy.deepcopy(MODEL), from_plan(plan))
        found = run(wrapped, 64)
    except PlanError:
        return
    assert_same(found, run(MODEL, 64))


def test_a_plan_serves_smaller_steps(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    wrapped = tr.nn.wrap(copy.deepcopy(MODEL), f"plan:{tmp_path / 'plan.json'}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        for rows in (64, 40, 56, 9, 64):
            assert_same(run(wrapped, rows), run(MODEL, rows), f"{rows} rows")


def test_a_smaller_step_keeps_within_the_plan():
    for rows in (64, 48, 9):
        model = copy.deepcopy(MODEL)
        x = torch.randn(rows, 16, requires_grad=True)
        found = tr.estimate(model, x, policy=from_plan(PLAN))
        assert found.peak_bytes <= PLAN.peak_bytes


def test_a_larger_step_is_refused_before_a_job_and_runs_within_one():
    wrapped = tr.nn.wrap(copy.deepcopy(MODEL), from_plan(PLAN))
    with pytest.raises(PlanError, match=r"input -> f32\[128,16\], and was input -> f32\[64,16\]"):
        run(wrapped, 128)
    run(wrapped, 64)
    with pytest.warns(BudgetWarning, match=r"larger than the one that was planned, 2 times in"):
        found = run(wrapped, 128)
    assert_same(found, run(MODEL, 128))


def test_a_plan_of_another_function_is_refused_at_any_size():
    other = nn.Sequential(*list(build())[:-1], nn.Sigmoid())
    with pytest.raises(PlanError, match=r"the plan is for another graph: node \d+ is"):
        run(tr.nn.wrap(other, from_plan(PLAN)), 4)
