"""Pages: a graph with its timeline as one HTML file that opens offline."""

import json
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from torchremat.errors import make_printable
from torchremat.planning.cost_model import CostModel
from torchremat.planning.memory.timeline import Timeline
from torchremat.viz.figure.files import PathLike, suffix_of, write_text
from torchremat.viz.figure.styles import STACK, STYLES
from torchremat.viz.picture.build import Drawable, picture_of
from torchremat.viz.picture.folding import groups_of
from torchremat.viz.picture.picture import KINDS, Picture

SCRIPTS = (
    "format",
    "styles",
    "model",
    "layout",
    "edges",
    "drawing",
    "pointer",
    "timeline",
    "panel",
    "main",
)
"""The scripts of the page in their order: they are one after the other in one `<script>`."""


def graph_html(
    plan_or_graph: Drawable,
    path: PathLike,
    *,
    title: str | None = None,
    cost_model: CostModel | None = None,
) -> Path:
    """Draw the forward and backward graph as a page, with the bytes alive over the step under it.

    The forward pass is the column at the left, read downwards; the backward pass the one at the
    right, read upwards. A module and its derivative stand side by side, and lines between them are
    the saved and the recomputed values. Modules fold and unfold by a click. The page is one file,
    loads nothing from the network, and is byte-equal whenever the same plan is drawn.

    Args:
        plan_or_graph: a `Plan`, a `Report` of `explain`, a `TypedGraph` of `make_graph`, or an
            `fx.GraphModule` of ATen operators.
        path: the file, with the suffix `.html`.
        title: what the page is of.
        cost_model: what the operators cost in seconds; by default that of the plan.

    Returns:
        The path of the page.

    Raises:
        TypeError: if there is nothing to draw in `plan_or_graph`.
        PlanError: (a `ValueError`) for a plan that was loaded, which has no graphs.
        ValueError: if the suffix is another.
        OSError: if the path cannot be written.

    >>> import tempfile, torch, torchremat as tr
    >>> def f(x, w):
    ...     return torch.tanh(x @ w).sum()
    >>> found = tr.plan(f, torch.ones(8, 8), torch.ones(8, 8), budget="100%")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = graph_html(found, folder + "/plan.html", title="a product")
    ...     "a product" in page.read_text(encoding="utf-8")
    True
    """
    suffix_of(path, (".html",), "a page")
    picture = picture_of(plan_or_graph, cost_model=cost_model, title=title)
    write_text(path, page_of(picture), "the page")
    return Path(path)


def diff_html(
    a: Drawable,
    b: Drawable,
    path: PathLike,
    *,
    titles: tuple[str, str] = ("before", "after"),
    cost_model: CostModel | None = None,
) -> Path:
    """Draw two plans, reports or graphs of one function side by side; what differs is ringed.

    Both fold, move and select together. Arguments and errors are those of `graph_html`.

    Args:
        a: what to draw at the left.
        b: what to draw at the right.
        path: the file, with the suffix `.html`.
        titles: what to call them.
        cost_model: what the operators cost in seconds.

    Returns:
        The path of the page.
    """
    suffix_of(path, (".html",), "a page")
    pictures = [
        picture_of(drawable, cost_model=cost_model, title=title)
        for drawable, title in zip((a, b), titles, strict=True)
    ]
    write_text(path, page_of(*pictures), "the page")
    return Path(path)


def page_of(*pictures: Picture, only_timeline: bool = False) -> str:
    data = {
        "format": 1,
        "kinds": dict(KINDS),
        "looks": {kind: asdict(look) for kind, look in STYLES.items()},
        "stack": STACK,
        "pictures": [pack_picture(p) for p in pictures],
    }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Template(_asset("page.html")).substitute(
        title=_escape(" | ".join(picture.title for picture in pictures)),
        shows="only-timeline" if only_timeline else "",
        style=_asset("page.css"),
        data=text.replace("<", "\\u003c"),
        script="\n".join(_asset(f"{name}.js") for name in SCRIPTS),
    )


def pack_picture(picture: Picture) -> dict[str, Any]:
    """A picture as JSON for the page: rows, in which texts are positions in a list of texts."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(make_printable(text), len(texts))

    groups = groups_of(picture.values)
    values = [
        [
            v.name, number(v.label), number(v.op), number(v.phase), number(v.kind),
            number(v.module), number(v.source), number(v.aval), v.nbytes,
            None if v.seconds is None else float(f"{v.seconds:.4g}"),
            number(v.reason), list(v.reads), number(group),
        ]
        for v, group in zip(picture.values, groups, strict=True)
    ]  # fmt: skip
    return {
        "title": make_printable(picture.title),
        "figures": picture.figures,
        "values": values,
        "texts": list(texts),
        "timeline": picture.timeline and _pack_timeline(picture, picture.timeline),
        "resident": picture.resident,
        "residentCounts": picture.resident_counts,
        "levels": picture.levels,
    }


def _pack_timeline(picture: Picture, timeline: Timeline) -> dict[str, Any]:
    points = timeline.points
    forward = [point.phase == "forward" for point in points]
    return {
        "points": [picture.position_of(point.name) for point in points],
        "live": timeline.live,
        "backward": sum(forward),
        "saved": timeline.saved_bytes,
        "lifetimes": [
            [picture.position_of(t.value.name), t.value.nbytes,
             STACK.index(t.value.category), t.first, t.last]
            for t in timeline.lifetimes
        ],
    }  # fmt: skip


@cache
def _asset(name: str) -> str:
    return (resources.files("torchremat.viz") / "assets" / name).read_text(encoding="utf-8")


def _escape(text: str) -> str:
    return make_printable(text).replace("&", "&amp;").replace("<", "&lt;")
