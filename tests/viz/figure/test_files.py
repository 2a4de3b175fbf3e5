"""Files: byte-equal, self-contained, with the plan's numbers; errors say what to do."""

import json
import os
import pickle
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch

import torchremat as tr
from tests.helpers import in_kib
from tests.viz.steps import mlp_plan
from torchremat import viz
from torchremat.planning import Timeline
from torchremat.planning.memory.timeline import Lifetime, LiveValue, Point
from torchremat.viz.figure.figure import Figure
from torchremat.viz.pareto_figure import pareto_figure

EXPORTS = [viz.to_dot, viz.to_json, viz.to_perfetto, viz.to_model_explorer]


@pytest.fixture(scope="module")
def plan():
    return mlp_plan()


def draw(plan, folder):
    viz.graph_html(plan, folder / "graph.html")
    assert viz.diff_html(plan, plan, folder / "diff.html") == folder / "diff.html"
    viz.timeline(plan, folder / "step.svg")
    viz.timeline(plan, folder / "step.html")
    viz.pareto([(4, 1.0), (8, 0.0)], folder / "curve.svg", named={"full": (4, 2.0)})


def data_of(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_files_are_byte_equal_when_drawn_twice(plan, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        draw(plan, tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


@pytest.mark.slow
def test_files_are_byte_equal_when_planned_and_drawn_in_another_process(plan, tmp_path):
    code = (
        "from tests.viz.steps import mlp_plan; from torchremat import viz; import sys; "
        "viz.graph_html(mlp_plan(), sys.argv[1])"
    )
    viz.graph_html(plan, tmp_path / "here.html")
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, tmp_path / "there.html"], check=True, env=env)
    assert (tmp_path / "here.html").read_bytes() == (tmp_path / "there.html").read_bytes()


def test_pages_ask_nothing_of_the_network(plan, tmp_path):
    draw(plan, tmp_path)
    for file in tmp_path.iterdir():
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".svg":  # which is XML, and says of what kind
            text = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|\bsrc=|@import|url\((?!#)", text), file.name


def test_the_page_has_the_plans_numbers(plan, tmp_path):
    viz.graph_html(plan, tmp_path / "p.html")
    (picture,) = data_of(tmp_path / "p.html")["pictures"]
    figures = dict(map(tuple, picture["figures"]))
    assert figures["peak"] == in_kib(plan.peak_bytes)
    assert figures["saved"] == in_kib(plan.saved_bytes)
    assert tuple(picture["timeline"]["live"]) == plan.timeline().live
    assert picture["timeline"]["saved"] == plan.saved_bytes


def test_text_of_the_users_cannot_end_the_data(tmp_path):
    def f(x):
        return tr.checkpoint_name(x.sin(), "</script><b>").sum()

    path = tmp_path / "p.html"
    viz.graph_html(tr.plan(f, torch.ones(4), budget="100%"), path, title="</title>&<b>")
    assert data_of(path)["pictures"][0]["title"] == "</title>&<b>"
    assert "<b>" not in path.read_text().partition("<style>")[0]


# --- figures -------------------------------------------------------------------------------------


def test_the_timeline_names_the_peak_and_the_largest_alive(plan, tmp_path):
    viz.timeline(plan, tmp_path / "step.svg", title="a <step>")
    text = " ".join(ElementTree.parse(tmp_path / "step.svg").getroot().itertext())
    assert f"peak {in_kib(plan.peak_bytes)}" in text
    assert in_kib(plan.timeline().at_peak[0].nbytes) in text
    assert "a <step>" in text


@pytest.mark.parametrize("inputs", [False, True])
def test_a_timeline_with_inputs_stands_on_them(plan, tmp_path, inputs):
    viz.timeline(plan, tmp_path / "step.svg", inputs=inputs)
    assert ("parameters" in (tmp_path / "step.svg").read_text()) is inputs


def test_other_steps_are_outlined_at_the_scale_of_the_highest(plan, tmp_path):
    plain = mlp_plan(budget="100%")
    assert plain.timeline().peak > plan.timeline().peak
    others = {"<plain>": plain, "twice": plan}
    viz.timeline(plan, tmp_path / "step.svg", against=others)
    root = ElementTree.parse(tmp_path / "step.svg").getroot()
    lines = [e for e in root.iter("{http://www.w3.org/2000/svg}polyline")
             if e.get("stroke-width") == "1.3" and len(e.get("points").split()) > 2]  # fmt: skip
    heights = [[float(p.split(",")[1]) for p in line.get("points").split()] for line in lines]
    bottom = 420  # HEIGHT - BOTTOM
    ratio = (bottom - min(heights[0])) / (bottom - min(heights[1]))
    assert ratio == pytest.approx(plain.timeline().peak / plan.timeline().peak, rel=1e-3)
    assert "<plain>" in [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    with pytest.raises(ValueError, match="a page draws one step"):
        viz.timeline(plan, tmp_path / "step.html", against=others)


def test_a_timeline_by_itself_is_drawn(tmp_path):
    points = (Point("sin", "forward", 8, 8), Point("mul", "backward", 20, 12))
    lifetimes = (
        Lifetime(LiveValue("sin", 8, "saved"), 0, 1),
        Lifetime(LiveValue("mul", 12, "gradient"), 1, 1),
    )
    for suffix in (".svg", ".html"):
        viz.timeline(Timeline(points, lifetimes, 8), tmp_path / f"step{suffix}")
        assert "peak 20 B at mul" in (tmp_path / f"step{suffix}").read_text()


def test_a_curve_of_the_planner_is_drawn_with_its_bounds(tmp_path):
    def f(x):
        for _ in range(6):
            x = x.sin()
        return x.sum()

    curve = tr.planning.pareto(f, torch.ones(4096), points=4)
    viz.pareto(curve, tmp_path / "curve.svg", named={"full": curve[-1]})
    text = (tmp_path / "curve.svg").read_text()
    assert text.count("<circle") >= len(curve)
    assert "full" in text


@pytest.mark.parametrize(
    ("points", "has_knee"), [([(1, 9), (2, 1), (9, 0)], True), ([(1, 1)], False)]
)
def test_the_knee_of_a_curve_is_marked(points, has_knee):
    assert ("knee" in pareto_figure(points, {}, "").svg()) is has_knee


def test_png_is_written_or_says_what_is_missing(plan, tmp_path):
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"pip install 'torchremat\[plot\]'"):
            viz.timeline(plan, tmp_path / "step.png")
    else:
        viz.timeline(plan, tmp_path / "step.png")
        assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


# --- exports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("export", EXPORTS)
def test_exports_are_equal_when_made_twice(plan, export):
    assert export(plan) == export(plan)


def test_json_has_the_plans_numbers(plan):
    found = json.loads(viz.to_json(plan))
    assert found["timeline"]["peak"] == plan.peak_bytes
    assert found["totals"]["saved"] == plan.saved_bytes
    names = {value["name"] for value in found["values"]}
    assert all(set(value["reads"]) <= names for value in found["values"])


def test_a_trace_has_a_slice_and_a_count_of_bytes_for_each_operator(plan):
    events = json.loads(viz.to_perfetto(plan))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    counts = [sum(event["args"].values()) for event in events if event["ph"] == "C"]
    assert len(slices) == len(plan.timeline())
    assert tuple(counts) == plan.timeline().live
    assert {event["cat"] for event in slices} == {"forward", "recomputed", "backward"}


def test_edges_of_model_explorer_join_nodes_that_exist(plan):
    (graph,) = json.loads(viz.to_model_explorer(plan))["graphs"]
    ids = {node["id"] for node in graph["nodes"]}
    edges = [edge for node in graph["nodes"] for edge in node["incomingEdges"]]
    assert edges and {edge["sourceNodeId"] for edge in edges} <= ids


def test_dot_is_balanced_and_joins_what_reads(plan):
    text = viz.to_dot(plan)
    assert text.count("{") == text.count("}")
    assert text.count(" -> ") == sum(
        len(v["reads"]) for v in json.loads(viz.to_json(plan))["values"]
    )


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draw",
    [
        lambda plan, path: viz.graph_html(plan, path),
        lambda plan, path: viz.diff_html(plan, plan, path),
        lambda plan, path: viz.timeline(plan, path),
        lambda plan, path: viz.pareto([(1, 1.0)], path),
    ],
)
def test_other_suffixes_are_refused_with_those_there_are(plan, draw, tmp_path):
    with pytest.raises(ValueError, match=r"its suffix must be one of .*\.html"):
        draw(plan, tmp_path / "picture.pdf")


@pytest.mark.parametrize("name", ["graph.html", "step.svg"])
def test_a_path_that_cannot_be_written_is_named(plan, tmp_path, name):
    draw = viz.graph_html if name.endswith("html") else viz.timeline
    with pytest.raises(FileNotFoundError, match="cannot be written .*in a folder that exists"):
        draw(plan, tmp_path / "missing" / name)


def test_what_has_no_timeline_is_refused(tmp_path):
    report = tr.explain(lambda x: x.sin().sum(), torch.ones(3))
    report = pickle.loads(pickle.dumps(report))
    with pytest.raises(tr.errors.PlanError, match=r"the Report has no timeline: .*Give a Plan"):
        viz.timeline(report, tmp_path / "step.svg")
    with pytest.raises(tr.errors.PlanError, match="no timeline, which a trace is made of"):
        viz.to_perfetto(report)


@pytest.mark.parametrize("points", [[3], [("a", "b")], [(1, 2, 3)]])
def test_a_point_that_is_none_is_named(points, tmp_path):
    with pytest.raises(TypeError, match=r"a pair \(peak bytes, added seconds\)"):
        viz.pareto(points, tmp_path / "p.svg")


def test_a_curve_without_points_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no points to draw"):
        viz.pareto([], tmp_path / "p.svg")


def test_figures_escape_what_they_are_told():
    figure = Figure(10, 10, "<a & b>", ())
    assert "<title>&lt;a &amp; b&gt;</title>" in figure.svg()


def test_each_graph_of_a_plan_is_drawn_by_itself(plan, tmp_path):
    for graph in (plan.forward_graph, plan.backward_graph):
        viz.graph_html(graph, tmp_path / "graph.html")
        names = {row[0] for row in data_of(tmp_path / "graph.html")["pictures"][0]["values"]}
        assert {node.name for node in graph.graph.nodes if node.op == "call_function"} <= names


def test_a_curve_is_of_points(tmp_path):
    with pytest.raises(TypeError, match=r"takes the points of a curve.* 3 \(int\)"):
        viz.pareto(3, tmp_path / "curve.svg")
