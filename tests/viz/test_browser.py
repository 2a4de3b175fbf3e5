"""Pages in headless Chromium: they draw, fold, find, and link the timeline with the graph.

Needs Chromium on the path, and nothing else: `chromium.py` drives it.
"""

import pytest

from tests.viz.chromium import CHROMIUM, Page
from tests.viz.steps import mlp_plan, mlp_report
from torchremat import viz

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the path")

WHERE = """(() => {
  const view = torchremat.views[0], module = view.tree.modules.get("layers.1.up");
  return view.where(module, "forward");
})()"""
OPEN = 'torchremat.views[0].tree.modules.get("layers.1.up").open'


def opened(path, *steps):
    """What the page answers to each `ask`, without errors and requests."""
    answers = []
    with Page(path) as page:
        for step in steps:
            if "click" in step:
                page.click(step["click"])
            if "fill" in step:
                page.fill(*step["fill"])
            if "press" in step:
                page.press(step["press"])
            if "ask" in step:
                answers.append(page.ask(step["ask"]))
        assert page.errors == [] and page.requests == []
    return answers


def test_what_goes_wrong_in_a_page_is_noticed(tmp_path):
    (tmp_path / "bad.html").write_text("""<script>
      window.torchremat = true;
      console.error("said");
      setTimeout(() => { throw Error("raised"); });
      fetch("http://127.0.0.1:9/asked").catch(() => 0);
    </script>""")
    with Page(tmp_path / "bad.html") as page:
        while len(page.errors) < 3 or not page.requests:  # or the test runs out of time
            page.ask("1")
        assert page.requests == ["http://127.0.0.1:9/asked"]
        said, raised, refused = sorted(map(str, page.errors), key=lambda text: "said" not in text)
        assert "said" in said and "raised" in raised + refused
        with pytest.raises(AssertionError, match="nothing is not defined"):
            page.ask("nothing")


@pytest.fixture(scope="module")
def plan():
    return mlp_plan()


@pytest.fixture(scope="module")
def page(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "plan.html"
    viz.graph_html(plan, path)
    return path


def test_a_click_folds_and_unfolds_a_module(page):
    fold = {"press": "c", "ask": "torchremat.views[0].scene.boxes.size"}
    reveal = {"ask": 'torchremat.show("addmm_2"), ' + OPEN}
    assert opened(page, fold, reveal, {"click": WHERE, "ask": OPEN}, {"click": WHERE, "ask": OPEN})[
        1:
    ] == [True, False, True]


def test_search_finds_and_selects(page, plan):
    products = [n for n, decision in plan.decisions.items() if decision == "saved"]
    product = next(name for name in products if name.startswith("addmm"))
    number = int(product.partition("_")[2] or 0)  # each layer has two products: up and down
    module = f"layers.{number // 2}.{'down' if number % 2 else 'up'}"
    answers = opened(
        page,
        {"fill": ["#search", f"{module} addmm saved"], "ask": "torchremat.selected"},
        {"press": "Enter", "ask": "torchremat.selected?.module"},
        {"ask": "document.querySelector('#panel').innerText"},
    )
    assert answers[1] == module
    assert "aten.addmm.default" in answers[2] and "steps.py" in answers[2]


def test_a_click_on_the_peak_lights_up_what_is_alive(page, plan):
    click = "torchremat.views[0].timeline.wherePeak()"
    ask = """[[...torchremat.views[0].lit.values()].reduce((a, b) => a + b, 0),
              document.querySelector("#panel h2").innerText]"""
    (nbytes, heading), *_ = opened(page, {"click": click, "ask": ask})
    assert nbytes == plan.peak_bytes
    assert "alive at step" in heading


def test_a_click_on_a_value_marks_its_lifetimes(page):
    where = 'torchremat.views[0].where(torchremat.views[0].tree.leaves[{}], "forward")'
    number = 'torchremat.views[0].names.get("addmm_2").index'
    show = {"ask": 'torchremat.show("addmm_2"), torchremat.select(null), 1'}
    click = {"click": where.format(number), "ask": "torchremat.views[0].timeline.mark?.name"}
    assert opened(page, show, click) == [1, "addmm_2"]


def test_the_bytes_that_the_page_stacks_are_the_plans(page, plan):
    (stacks,) = opened(
        page,
        {
            "ask": """Object.fromEntries(Object.entries(torchremat.views[0].timeline.stacks)
                .map(([name, values]) => [name, [...values]]))"""
        },
    )
    found = {name: tuple(map(round, values)) for name, values in stacks.items()}
    assert found == plan.timeline().by_category()


@pytest.mark.parametrize("policy", [None, "dots"])
def test_the_bytes_of_a_page_are_the_reports(tmp_path, policy):
    report = mlp_report(policy)
    viz.graph_html(report, tmp_path / "report.html")
    ask = """[...torchremat.views[0].names.values()].filter((value) => value.kind === "saved")
        .reduce((sum, value) => sum + value.nbytes, 0)"""
    assert opened(tmp_path / "report.html", {"ask": ask}) == [report.total]


def test_no_boxes_overlap_but_those_of_modules_around(page):
    overlaps = """(() => {
      torchremat.setAll(true);
      const view = torchremat.views[0], found = [];
      for (const module of view.tree.modules.values())
        for (const side of ["forward", "backward"]) {
          const boxes = module.items.filter((item) => item.sides[side])
            .map((item) => view.scene.boxes.get(item)[side]);
          for (const [i, a] of boxes.entries())
            for (const b of boxes.slice(i + 1))
              if (a.x < b.x + b.w && b.x < a.x + a.w && a.y < b.y + b.h && b.y < a.y + a.h)
                found.push([module.path, a, b]);
        }
      return found;
    })()"""
    assert opened(page, {"ask": overlaps}) == [[]]


def test_a_difference_is_ringed_on_both_sides(tmp_path, plan):
    other = mlp_plan("100%")
    viz.diff_html(plan, other, tmp_path / "diff.html", titles=("70 %", "100 %"))
    names = {
        name
        for name in plan.decisions.keys() | other.decisions.keys()
        if plan.decisions.get(name) != other.decisions.get(name)
    }
    (found,) = opened(tmp_path / "diff.html", {"ask": "[...torchremat.views[1].differs]"})
    assert set(found) >= names


def test_a_timeline_alone_fills_the_page(tmp_path, plan):
    viz.timeline(plan, tmp_path / "step.html")
    ask = "torchremat.views[0].timeline.canvas.getBoundingClientRect().height"
    (height,) = opened(tmp_path / "step.html", {"ask": ask})
    assert height > 600


def test_a_narrow_window_shows_the_drawing_above_what_is_said_of_it(page):
    with Page(page, width=390, height=780) as narrow:
        assert narrow.ask("document.documentElement.scrollWidth") <= 390
        box = "torchremat.views[0].canvas.getBoundingClientRect()"
        assert narrow.ask(f"{box}.width") > 300
        assert narrow.ask(f"{box}.height") > 200
        panel = "document.getElementById('panel').getBoundingClientRect()"
        assert narrow.ask(f"{panel}.top") >= narrow.ask(f"{box}.bottom")
        assert narrow.errors == []
