"""What pictures tell is what plans, reports and graphs say."""

import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.viz.steps import Block, Model, mlp_plan, mlp_report
from torchremat.viz.picture.backward_modules import Operators, backward_modules
from torchremat.viz.picture.build import picture_of
from torchremat.viz.picture.picture import KINDS


@pytest.fixture(scope="module")
def plan():
    return mlp_plan()


@pytest.fixture(scope="module")
def picture(plan):
    return picture_of(plan)


def test_what_is_saved_adds_up_to_the_plans_bytes(plan, picture):
    assert picture.totals()["saved"] == plan.saved_bytes


def test_kinds_are_the_plans_decisions(plan, picture):
    kinds = {value.name: value.kind for value in picture.values}
    decided = {name: what for name, what in plan.decisions.items() if kinds[name] != "output"}
    assert decided == {name: kinds[name] for name in decided}
    assert set(kinds.values()) <= set(KINDS)


def test_values_are_those_of_both_graphs_once(plan, picture):
    nodes = [*plan.forward_graph.graph.nodes, *plan.backward_graph.graph.nodes]
    names = {node.name for node in nodes if node.op != "output"}
    assert sorted(value.name for value in picture.values) == sorted(names)


def test_what_is_read_comes_before(picture):
    for i, value in enumerate(picture.values):
        assert all(read < i for read in value.reads)


def test_every_point_and_lifetime_of_the_timeline_is_a_value(picture):
    names = [point.name for point in picture.timeline]
    names += [lifetime.value.name for lifetime in picture.timeline.lifetimes]
    assert None not in map(picture.position_of, names)


def test_gradients_are_the_results_of_the_backward_pass(picture):
    gradients = [value for value in picture.values if value.kind == "gradient"]
    assert {value.phase for value in gradients} == {"backward"}
    parameters = [value for value in picture.values if value.kind == "parameter"]
    # the gradient of a bias may be a view of another
    assert 0 < len(gradients) <= len(parameters) + 1


@pytest.mark.parametrize("depth", [1, 3])
def test_backward_operators_belong_to_the_modules_of_their_parameters(depth):
    model = nn.Sequential(*[Block(8) for _ in range(depth)])
    x = torch.ones(64, 8)
    found = picture_of(tr.plan(lambda x: model(x).sum(), x, budget="100%"))
    products = [v for v in found.values if v.phase == "backward" and v.label == "mm"]
    for product in products:
        assert product.module.rpartition(".")[2] in ("up", "down")
    assert {v.module.split(".")[-2] for v in products} == {str(i) for i in range(depth)}


@pytest.mark.parametrize(
    ("reads", "views", "known", "name", "module"),
    [
        ({"dy": [], "a": ["dy", "w"]}, (), {"w": "fc"}, "a", "fc"),
        ({"t": ["w"], "dy": [], "a": ["dy", "t"]}, ("t",), {"w": "fc"}, "a", "fc"),
        ({"dy": [], "a": ["dy", "w"], "b": ["dy"]}, (), {"w": "fc"}, "b", "fc"),
        ({"zero": [], "a": ["zero", "w"]}, (), {"w": "fc"}, "zero", "fc"),
        (
            {"a": ["v"], "b": ["w"], "c": ["a", "b"]},
            (),
            {"v": "m.x", "w": "m.y"},
            "c",
            "m",
        ),
        ({"dy": []}, (), {}, "dy", ""),
    ],
)
def test_a_backward_operator_goes_with_what_it_reads(reads, views, known, name, module):
    all_reads = dict.fromkeys(known, ()) | reads
    operators = Operators(all_reads, frozenset(views), frozenset(known), known)
    assert backward_modules(operators)[name] == module


@pytest.mark.parametrize("policy", ["full", "dots", "none"])
def test_a_report_of_one_policy_is_drawn_with_its_graphs(policy):
    report = mlp_report(policy)
    picture = picture_of(report)
    assert picture.totals().get("saved", 0) == report.by_decision().get("saved", 0)
    assert picture.timeline is not None


@pytest.mark.parametrize("select", [None, "layers.*", "layers.1"])
def test_a_report_of_a_model_as_it_is_is_drawn_with_the_graphs_of_autograd(select):
    model, x = Model(), torch.ones(512, 16)
    if select is not None:
        tr.nn.wrap(model, "full", select=select)
    report = tr.explain(model, x)
    picture = picture_of(report)
    assert picture.totals()["saved"] == picture.timeline.saved_bytes == report.total
    assert picture.timeline.peak == tr.estimate(model, x).peak_bytes


def test_a_report_of_what_has_changed_since_is_not_drawn():
    model, x = Model(), torch.ones(512, 16)
    report = tr.explain(tr.nn.wrap(model, "full", select="layers.*"), x)
    tr.nn.unwrap(model)
    with pytest.raises(tr.errors.TraceError, match="has changed since it was explained: layers.0"):
        picture_of(report)


def test_a_report_keeps_no_memory_of_arguments():
    x = torch.ones(8)
    alive = weakref.ref(x.untyped_storage())
    report = tr.explain(torch.sin, x)
    del x
    assert alive() is None
    assert picture_of(report).timeline is not None


def test_the_report_of_a_step_is_drawn_with_its_graphs_if_one_program_ran():
    model = tr.nn.wrap(Model(), "dots")
    model(torch.ones(512, 16)).backward()
    report = tr.nn.report(model)
    totals = picture_of(report).totals()
    assert {kind: totals[kind] for kind in ("saved", "recomputed")} == {
        kind: report.by_decision()[kind] for kind in ("saved", "recomputed")
    }


def test_the_report_of_a_step_is_drawn_with_the_graphs_of_the_modules_that_ran():
    model = tr.nn.wrap(Model(), "dots", select="layers.*")
    model(torch.ones(512, 16)).backward()
    report = tr.nn.report(model)
    picture = picture_of(report)
    assert {kind: picture.totals()[kind] for kind in ("saved", "recomputed")} == {
        kind: report.by_decision()[kind] for kind in ("saved", "recomputed")
    }
    assert len(picture.positions) == len(picture.values)
    assert all(value.module.startswith("layers.") for value in picture.values)
    parameters = {value.label for value in picture.values if value.kind == "parameter"}
    assert parameters == {name for name, _ in model.named_parameters()}
    for place, value in enumerate(picture.values):
        layers = {picture.values[read].module.split(".")[1] for read in value.reads}
        assert layers <= {value.module.split(".")[1]}
        assert all(read < place for read in value.reads)
    phases = [(value.phase, value.module.split(".")[1]) for value in picture.values]
    assert list(dict.fromkeys(phases)) == [
        *(("forward", str(i)) for i in range(4)),
        *(("backward", str(i)) for i in reversed(range(4))),
    ]


def test_the_report_of_one_module_tells_of_it_as_the_model_does():
    model = tr.nn.wrap(Model(), "dots", select="layers.2")
    model(torch.ones(512, 16)).backward()
    picture = picture_of(tr.nn.report(model))
    assert {value.module for value in picture.values if value.kind == "saved"} <= {
        "layers.2.up",
        "layers.2.down",
    }
    assert picture.timeline is not None


def test_what_checkpoints_inside_keep_is_told_by_module_and_reason():
    model, x = tr.nn.wrap(Model(), "dots", select="layers.*"), torch.ones(512, 16)
    report = tr.explain(model, x)
    told = {}
    for value in picture_of(report).values:
        if value.kind == "saved":
            key = (value.module, value.reason, value.label)
            told[key] = told.get(key, 0) + value.nbytes
    said = {}
    for row in report:
        if row.decision == "saved" and row.reason == "dots":
            key = (row.module, row.reason, row.op)
            said[key] = said.get(key, 0) + row.nbytes
    assert said
    assert {key: told[key] for key in said} == said


def test_a_report_without_graphs_is_drawn_row_by_row():
    model = tr.nn.wrap(Model(), "full", select="layers.*")
    model(torch.ones(512, 16)).backward()
    report = pickle.loads(pickle.dumps(tr.nn.report(model)))
    picture = picture_of(report)
    assert [value.nbytes for value in picture.values] == [row.nbytes for row in report]
    assert picture.timeline is None


def test_what_a_plan_offloads_looks_so_and_says_why(plan):
    name = next(name for name, kind in plan.decisions.items() if kind == "saved")
    plan = replace(plan, decisions=plan.decisions | {name: "offloaded"})
    picture = picture_of(plan)
    value = picture.values[picture.positions[name]]
    assert value.kind == "offloaded"
    assert value.reason.startswith("the plan copies it to the host")


def test_a_typed_graph_tells_its_constants_from_its_inputs():
    w = torch.ones(3)
    picture = picture_of(tr.make_graph(lambda x: (x * w).sum())(torch.ones(3)))
    assert [value.kind for value in picture.values][:2] == ["parameter", "input"]
    assert picture.timeline.peak == 16


@pytest.mark.parametrize("thing", [3, None, "plan", torch.nn.Linear(1, 1)])
def test_what_cannot_be_drawn_is_refused_with_the_ways_to_make_one(thing):
    with pytest.raises(TypeError, match=r"cannot be drawn: give a Plan \(tr.plan"):
        picture_of(thing)


def test_a_loaded_plan_has_no_graphs_to_draw(plan):
    with pytest.raises(tr.errors.PlanError, match="loaded has no graphs"):
        picture_of(tr.planning.Plan.from_json(plan.to_json()))
