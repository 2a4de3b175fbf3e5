#!/usr/bin/env python
"""One buffer for all values of a step: its bytes beside those alive and those reserved.

    python scripts/bench_arena.py                      plans of 14 models on the meta device
    python scripts/bench_arena.py --models gpt-12 vit-12 --budgets 100% least

*Live* is the peak of the plan. An arena is planned with the schedule (`Timeline.place_values`), and
PyTorch's caching allocator reserves what its model says, in segments of a fixed size and in those
that grow (`Timeline.count_reserved_bytes`).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planning_models import MODELS
from planning_published import PUBLISHED

import torchremat as tr
from torchremat.errors import BudgetError
from torchremat.planning import Plan

ALL = MODELS | PUBLISHED
# Of each kind the small ones: they are planned in minutes.
USUAL = (
    "chain-8", "chain-12", "gpt-4", "gpt-5", "llama-4", "vit-4", "resnet-4", "resnet-18", "unet-2",
    "unet-4", "t5-2", "mixer-4", "moe-2", "densenet-6",
)  # fmt: skip


def make_plan(name: str, budget: str) -> Plan | None:
    model, args = ALL[name].build()
    try:
        return tr.plan(model, *args, budget=budget, device="h100")
    except BudgetError:
        return None


def measure(plan: Plan) -> tuple[list[float], int, float]:
    """Bytes of an arena and of segments beside those alive; the values; seconds to place them."""
    timeline = plan.timeline()
    start = time.perf_counter()
    arena = timeline.place_values()
    seconds = time.perf_counter() - start
    reserved = [timeline.count_reserved_bytes(expandable_segments=e) for e in (False, True)]
    ratios = [nbytes / timeline.peak for nbytes in (arena.nbytes, *reserved)]
    return ratios, len(arena.offsets), seconds


def show(names: Iterable[str], budgets: Iterable[str]) -> None:
    table = Table("model", "budget", "values", "live (MiB)", "arena", "segments", "growing", "s")
    found = []
    for name in names:
        for budget in budgets:
            plan = make_plan(name, budget)
            if plan is None:
                continue
            ratios, count, seconds = measure(plan)
            found.append(ratios)
            live = f"{plan.timeline().peak / 2**20:,.0f}"
            shown = [f"{ratio:.3f}" for ratio in ratios]
            table.add_row(name, budget, str(count), live, *shown, f"{seconds:.1f}")
    columns = list(zip(*found, strict=True))
    means = [f"{statistics.geometric_mean(column):.3f}" for column in columns]
    table.add_row("geometric mean", "", "", "", *means, "")
    table.add_row("most", "", "", "", *(f"{max(column):.3f}" for column in columns), "")
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=sorted(ALL), default=USUAL)
    parser.add_argument("--budgets", nargs="+", default=["100%", "70%", "least"])
    options = parser.parse_args()
    show(options.models, options.budgets)


if __name__ == "__main__":
    main()
