"""How long pages take to make and to draw, and how large they are.

    python scripts/bench_viz.py [--depths 4 12 40] [--keep FOLDER]

Models are GPTs of so many layers on the meta device, planned at the full budget: only the drawing
counts here. A page is opened in headless Chromium, where there is one (tests/viz/chromium.py drives
it). Three times are measured: until the folded page is drawn, until all modules are opened, laid
out and drawn, and that of a frame then.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from planning_models import Block, Gpt
from torch import nn

import torchremat as tr
from torchremat import viz
from torchremat.planning import Plan
from torchremat.viz.picture.build import picture_of

sys.path.append(str(Path(__file__).parent.parent))
from tests.viz.chromium import CHROMIUM, Page

OPEN_ALL = """(() => {
  const start = performance.now();
  torchremat.setAll(true);
  torchremat.views[0].context.getImageData(0, 0, 1, 1);
  return performance.now() - start;
})()"""

FRAME = """(() => {
  const start = performance.now();
  for (let i = 0; i < 10; i++) { torchremat.zoom(1.1); torchremat.draw(); }
  torchremat.views[0].context.getImageData(0, 0, 1, 1);
  return (performance.now() - start) / 10;
})()"""

READY = "performance.now()"


def planned(depth: int) -> Plan:
    with torch.device("meta"):
        layers: list[nn.Module] = [Block(256, 4, causal=True) for _ in range(depth)]
        model, tokens = Gpt(layers, 256, 1000), torch.zeros(4, 128, dtype=torch.long)
    return tr.plan(model, tokens, budget="100%", device="h100", solver="local")


def browsed(path: Path) -> list[float]:
    """Milliseconds: to the page drawn, to open all, to draw it again; none without Chromium."""
    if CHROMIUM is None:
        return []
    with Page(path) as page:
        return [page.ask(expression) for expression in (READY, OPEN_ALL, FRAME)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 12, 40])
    parser.add_argument("--keep", type=Path, help="a folder for the pages")
    options = parser.parse_args()
    print("layers  values  made      size    drawn folded  all open  a frame then")
    with tempfile.TemporaryDirectory() as scratch:
        for depth in options.depths:
            plan = planned(depth)
            page = (options.keep or Path(scratch)) / f"gpt-{depth}.html"
            start = time.perf_counter()
            viz.graph_html(plan, page)
            made = time.perf_counter() - start
            values = len(picture_of(plan).values)
            times = "".join(f"{t:10.0f} ms" for t in browsed(page)) or "   no Chromium"
            size = page.stat().st_size / 1e6
            print(f"{depth:6d} {values:7d} {made:5.2f} s {size:6.2f} MB {times}", flush=True)


if __name__ == "__main__":
    main()
