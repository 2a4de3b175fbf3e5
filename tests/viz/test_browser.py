"""Pages in headless Chromium: they draw, fold, find, and link the timeline with the graph.

Needs `chromium` on the path, and `node` with the package `playwright-core`, in the folder that the
environment variable `PLAYWRIGHT_CORE` names or where node finds it.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.viz.steps import mlp_plan
from torchremat import viz

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NODE = shutil.which("node")
PLAYWRIGHT = os.environ.get("PLAYWRIGHT_CORE", "playwright-core")

WHERE = """(() => {
  const view = torchremat.views[0], module = view.tree.modules.get("layers.1.up");
  return view.where(module, "forward");
})()"""
OPEN = 'torchremat.views[0].tree.modules.get("layers.1.up").open'


def can_open_pages():
    if CHROMIUM is None or NODE is None:
        return False
    found = subprocess.run(
        [NODE, "-e", f"require({PLAYWRIGHT!r})"], capture_output=True, check=False
    )
    return found.returncode == 0


pytestmark = pytest.mark.skipif(
    not can_open_pages(), reason="needs chromium, and node with the package playwright-core"
)


def opened(page, *steps):
    """What the page answers, without errors and requests."""
    script = Path(__file__).with_name("browser.js")
    done = subprocess.run(
        [NODE, script, CHROMIUM, PLAYWRIGHT, page],
        input=json.dumps(steps),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["errors"] == [] and found["requests"] == []
    return found["answers"]


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


def test_search_finds_and_selects(page):
    answers = opened(
        page,
        {"fill": ["#search", "layers.2.up addmm saved"], "ask": "torchremat.selected"},
        {"press": "Enter", "ask": "torchremat.selected?.module"},
        {"ask": "document.querySelector('#panel').innerText"},
    )
    assert answers[1] == "layers.2.up"
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
