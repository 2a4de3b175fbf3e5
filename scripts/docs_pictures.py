"""Draws the pictures of the documentation, all but those of measurements, into docs/_static.

    python scripts/docs_pictures.py [--into FOLDER]

They are of the model of the start page. Pages are photographed in headless
Chromium, which tests/viz/chromium.py drives.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import torchremat as tr
from torchremat import viz

sys.path.append(str(Path(__file__).parent.parent))
from tests.viz.chromium import CHROMIUM, Page

ROOT = Path(__file__).parent.parent

LARGEST = 200_000
"""Bytes of a picture."""


def make_model() -> tuple[nn.Module, torch.Tensor]:
    """The model of the start page, and its argument."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return model, torch.randn(16, 128, 256)


def photograph(page_path: Path, path: Path) -> None:
    """A PNG of a page as it opens."""
    with Page(page_path, width=1160, height=760) as page:
        page.picture(path)
        assert page.errors == [], page.errors


def named_policies(model: nn.Module, x: torch.Tensor) -> dict[str, tuple[int, float]]:
    """Peak and added time of policies, on the whole model and on each layer."""
    plain = tr.estimate(model, x)
    found = {}
    for policy in ("full", "dots"):
        found[policy] = tr.estimate(model, x, policy=policy)
        found[f"{policy}, each layer"] = tr.estimate(model, x, policy=policy, select="layers.*")
    return {name: (e.peak_bytes, e.seconds - plain.seconds) for name, e in found.items()}


def draw(into: Path) -> list[Path]:
    """Draw all pictures."""
    model, x = make_model()
    plan = tr.plan(model, x, budget="50%")
    print(plan)
    drawn = {name: into / name for name in (
        "plan-page.png", "step.svg", "timeline-plain.svg", "timeline-half.svg", "pareto.svg"
    )}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "plan.html")
        viz.graph_html(plan, page, title="Four transformer layers within half of their memory")
        photograph(page, drawn["plan-page.png"])
    plain = tr.explain(model, x, policy="none")
    viz.timeline(plain, drawn["timeline-plain.svg"], title="Plain PyTorch")
    viz.timeline(
        plan,
        drawn["step.svg"],
        title="One training step of four transformer layers",
        against={"plain PyTorch": plain},
    )
    viz.timeline(plan, drawn["timeline-half.svg"], title="Planned for half of that peak")
    viz.pareto(
        tr.planning.pareto(model, x, points=12),
        drawn["pareto.svg"],
        named=named_policies(model, x),
        title="Added time against peak memory: plans, and policies",
    )
    return list(drawn.values())


def main() -> None:
    """Draw the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "_static")
    into = parser.parse_args().into
    if CHROMIUM is None:
        raise SystemExit("there is no chromium on the path")
    into.mkdir(parents=True, exist_ok=True)
    for path in draw(into):
        size = path.stat().st_size
        print(f"{path}: {size / 1000:.0f} KB")
        assert size < LARGEST, path


if __name__ == "__main__":
    main()
