"""The figure of `bench_planning.py`."""

import itertools
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def kind_of(name: str) -> str:
    """The kind of a peer."""
    first = name.partition(" ")[0]
    return first if first in KINDS else "torch.compile"


KINDS = ("torch.compile", "checkpoint", "selective", "torchtitan", "DTR", "REVOLVE")


def draw(models: list[Record], path: Path) -> None:
    """Added time against peak: our curve, the points of peers, and what is proved impossible."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    columns = min(5, len(models))
    rows = -(-len(models) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(models) :]:
        axis.set_visible(False)
    for axis, model in zip(axes.flat, models, strict=False):
        _draw_model(axis, model)
    marks = {
        label: mark
        for axis in axes.flat
        for mark, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    axes.flat[0].legend(marks.values(), marks, fontsize=7)
    figure.supxlabel("peak, as a fraction of the peak without rematerialisation")
    figure.supylabel("added time, % of the forward pass")
    figure.savefig(path, dpi=110)
    plt.close(figure)


_MOST_ADDED = 250.0
"""Per cent of the forward pass: what is above, at a few small budgets, is cut off."""

_MARKS = {
    "torch.compile": ("x", "tab:red"),
    "checkpoint": ("s", "tab:orange"),
    "selective": ("^", "tab:purple"),
    "torchtitan": ("+", "tab:green"),
    "DTR": ("d", "tab:brown"),
    "REVOLVE": ("*", "tab:pink"),
}


def _draw_model(axis: Any, model: Record) -> None:
    plain, forward = model["plain"]["peak"], model["forward_seconds"] / 100
    for kind, (marker, colour) in _MARKS.items():
        points = [p for p in model["peers"] if kind_of(p["name"]) == kind]
        if not points:
            continue
        axis.scatter(
            [p["peak"] / plain for p in points],
            [p["added_seconds"] / forward for p in points],
            marker=marker,
            color=colour,
            s=18,
            label=kind,
        )
    plans = {p["ours"]["budget"]: p["ours"] for p in model["peers"] if "ours" in p}
    plans |= {plan["budget"]: plan for plan in model["budgets"]}
    by_budget = sorted(plans.items())
    # a plan serves every larger budget, a bound every smaller one: steps, not slopes
    met = [(b, plan) for b, plan in by_budget if plan["added_seconds"] is not None]
    axis.plot(
        [*(b / plain for b, _ in met), 1.0],
        [*(plan["added_seconds"] / forward for _, plan in met), 0.0],
        marker=".",
        drawstyle="steps-post",
        color="tab:blue",
        label="torchremat",
    )
    bounds = [plan["bound_seconds"] / forward for _, plan in by_budget]
    bounds = list(itertools.accumulate(reversed(bounds), max))[::-1]
    axis.fill_between(
        [0.0, *(b / plain for b, _ in by_budget), 1.0],
        [*(bounds[:1] or [0.0]), *bounds, 0.0],
        step="pre",
        color="tab:blue",
        alpha=0.15,
        label="proved impossible",
        linewidth=0,
    )
    axis.axvline(model["floor"] / plain, color="grey", linestyle=":", label="floor of the order")
    axis.set_title(model["model"], fontsize=9)
    axis.set_xlim(0, 1.05)
    axis.set_ylim(0, min(axis.get_ylim()[1], _MOST_ADDED))
