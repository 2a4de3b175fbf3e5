"""The tables of `bench_planning.py`."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from planning_figure import KINDS, draw, kind_of
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

Record = dict[str, Any]
Table = tuple[str, Sequence[str], list[Sequence[str]]]
"""A title, the names of columns, and rows."""

LEAST_RATIO = 0.01
"""Less counts as this in means: where order alone meets a peak nothing is added."""


def tables_of(results: Record) -> list[Table]:
    """All tables."""
    models = results["models"]
    return [table for table in (*summaries_of(results), *map(_peers, models)) if table[2]]


def summaries_of(results: Record) -> list[Table]:
    """The tables that are not of one model."""
    models = results["models"]
    found = [_kinds(models), _overview(models), _least(models), _budgets(models)]
    if results["oracles"]:
        found.append(_oracle(results["oracles"]))
    return found


# --- what is compared ----------------------------------------------------------------------------


def ratios(models: Iterable[Record], kind: str | None = None) -> list[float]:
    """Our added time over a peer's, at each peak below the plain one that a peer reaches."""
    return [
        _over(peer["ours"]["added_seconds"], peer["added_seconds"])
        for model in models
        for peer in model["peers"]
        if "ours" in peer and kind in (None, kind_of(peer["name"]))
    ]


def least_ratios(models: Iterable[Record], kind: str) -> list[float]:
    """The proved bound over a peer's added time: no plan has a smaller ratio."""
    return [
        _over(peer["ours"]["bound_seconds"], peer["added_seconds"])
        for model in models
        for peer in model["peers"]
        if "ours" in peer and kind_of(peer["name"]) == kind
    ]


def over_bounds(models: Iterable[Record]) -> list[float]:
    """Our added time over the proved bound, at each requested budget."""
    found = []
    for model in models:
        asked = {p["ours"]["budget"]: p["ours"] for p in model["peers"] if "ours" in p}
        asked |= {b["budget"]: b for b in model["budgets"]}
        found += [
            _over(a["added_seconds"], a["bound_seconds"])
            for a in asked.values()
            if a["added_seconds"] is not None
        ]
    return found


def _over(ours: float | None, other: float) -> float:
    if ours is None:
        return math.inf
    if ours <= 1e-12:
        return LEAST_RATIO if other > 1e-12 else 1.0
    return math.inf if other <= 1e-12 else max(ours / other, LEAST_RATIO)


def mean(values: Sequence[float]) -> float:
    """The geometric mean of those that are finite."""
    finite = [v for v in values if v < math.inf]
    return math.exp(sum(map(math.log, finite)) / len(finite)) if finite else math.nan


# --- tables --------------------------------------------------------------------------------------


def _kinds(models: list[Record]) -> Table:
    rows = []
    for kind in KINDS:
        own = ratios(models, kind)
        if own:
            least = mean(least_ratios(models, kind))
            above = f"{sum(r > 1 + 1e-6 for r in own)} of {len(own)}"
            rows.append([kind, _ratio(mean(own)), _ratio(max(own)), above, _ratio(least)])
    columns = ["peer", "ours over it", "worst", "above it", "no plan below"]
    return "Added time at the peaks that each peer reaches: geometric means", columns, rows


def _overview(models: list[Record]) -> Table:
    rows = []
    for group in [*([m] for m in models), models]:
        own, bounds = ratios(group), over_bounds(group)
        is_all = group is models
        cells = [
            "all" if is_all else group[0]["model"],
            "" if is_all else str(group[0]["nodes"]),
            *(_ratio(mean(ratios(group, kind))) for kind in KINDS),
            _ratio(mean(own)),
            _ratio(max(own, default=math.nan)),
            f"{sum(r > 1 + 1e-6 for r in own)} of {len(own)}",
            _ratio(mean(bounds)),
            _ratio(max(bounds, default=math.nan)),
            str(sum(b < 1 - 1e-6 for b in bounds)),
            f"{_longest(group):.1f}",
        ]
        rows.append(cells)
    names = [f"over {kind}" for kind in KINDS]
    columns = [
        "model",
        "nodes",
        *names,
        "over all",
        "worst",
        "above a peer",
        "over bound",
        "worst",
        "bound above plan",
        "longest plan (s)",
    ]
    return "Added time at the peaks that peers reach: geometric means", columns, rows


def _longest(models: Iterable[Record]) -> float:
    return max(
        (
            plan["plan_seconds"]
            for model in models
            for plan in [*model["budgets"], *(p["ours"] for p in model["peers"] if "ours" in p)]
        ),
        default=0.0,
    )


def _least(models: list[Record]) -> Table:
    rows = []
    for model in models:
        plain = model["plain"]["peak"]
        least: dict[str, float] = {}
        for peer in model["peers"]:
            kind = kind_of(peer["name"])
            least[kind] = min(peer["peak"], least.get(kind, math.inf))
        rows.append(
            [
                model["model"],
                _mb(plain),
                *(f"{least[kind] / plain:.3f}" if kind in least else "-" for kind in KINDS),
                f"{model['least_ours'] / plain:.3f}",
                f"{model['least_ours'] / min(least.values()):.3f}",
                f"{model['floor'] / plain:.3f}",
                f"{model['least_bound'] / plain:.3f}",
            ]
        )
    columns = [
        "model",
        "plain (MB)",
        *KINDS,
        "ours",
        "over the least peer",
        "floor of the order",
        "proved of our orders",
    ]
    return "The least peak, as a fraction of the plain one", columns, rows


def _budgets(models: list[Record]) -> Table:
    rows = []
    for model in models:
        for plan in model["budgets"]:
            rows.append(
                [
                    model["model"],
                    f"{plan['fraction']:.2f}",
                    *_plan_cells(plan, model),
                    f"{plan['plan_seconds']:.1f}",
                ]
            )
    columns = [
        "model",
        "budget",
        "peak",
        "added (% of forward)",
        "bound (%)",
        "over bound",
        "added GFLOP",
        "repeated",
        "plan (s)",
    ]
    return "Budgets as fractions of the plain peak", columns, rows


def _plan_cells(plan: Record, model: Record) -> list[str]:
    forward = model["forward_seconds"]
    bound = f"{100 * plan['bound_seconds'] / forward:.1f}"
    if "error" in plan:
        return [f"failed: {plan['error'][:40]}", "", bound, "", "", ""]
    if plan["added_seconds"] is None:
        least = plan["least_peak"] / model["plain"]["peak"]
        return [f"not met, least {least:.3f}", "", bound, "", "", ""]
    return [
        f"{plan['peak'] / model['plain']['peak']:.3f}",
        f"{100 * plan['added_seconds'] / forward:.1f}",
        bound,
        _ratio(_over(plan["added_seconds"], plan["bound_seconds"])),
        f"{plan['added_flops'] / 1e9:.2f}",
        str(plan["repeated"]),
    ]


def _oracle(oracles: list[Record]) -> Table:
    rows = []
    for o in oracles:
        ours, best = o["ours_seconds"], o["optimum_seconds"]
        first, then = o["operators"]
        rows.append(
            [
                o["model"],
                f"{first} -> {then}",
                f"{o['fraction']:.2f}",
                "not met" if ours is None else f"{ours * 1e6:.2f}",
                f"{o['bound_seconds'] * 1e6:.2f}",
                "none" if best is None else f"{best * 1e6:.2f}",
                _proof(o),
                "" if ours is None or best is None else _ratio(_over(ours, best)),
                f"{o['plan_seconds']:.1f}",
                f"{o['oracle_seconds']:.1f}",
            ]
        )
    columns = [
        "model",
        "operators",
        "budget",
        "ours (us)",
        "our bound",
        "Checkmate (us)",
        "",
        "ratio",
        "ours took (s)",
        "it took (s)",
    ]
    return "Checkmate's program on coarse graphs", columns, rows


def _proof(o: Record) -> str:
    if o["is_proved"]:
        return "proved"
    bound = f">= {o['optimum_bound_seconds'] * 1e6:.2f}"
    return f"{bound}, prompt" if o["is_prompt_optimum"] else bound


def _peers(model: Record) -> Table:
    plain = model["plain"]["peak"]
    together: dict[tuple, list[Record]] = {}
    for peer in model["peers"]:
        key = peer["peak"], round(peer["added_seconds"] * 1e9)
        together.setdefault(key, []).append(peer)
    rows = []
    for _, peers in sorted(together.items(), reverse=True):
        peer = peers[0]
        ours = peer.get("ours")
        cells = [
            ", ".join(p["name"] for p in peers),
            _mb(peer["saved"]),
            f"{peer['peak'] / plain:.3f}",
            f"{100 * peer['added_seconds'] / model['forward_seconds']:.1f}",
            f"{peer['added_flops'] / 1e9:.2f}",
        ]
        if ours is None:
            cells += ["", "", "", ""]
        elif ours["added_seconds"] is None:
            cells += [
                "not met",
                "",
                f"{100 * ours['bound_seconds'] / model['forward_seconds']:.1f}",
            ]
            cells += [""]
        else:
            cells += [
                f"{100 * ours['added_seconds'] / model['forward_seconds']:.1f}",
                f"{ours['added_flops'] / 1e9:.2f}",
                f"{100 * ours['bound_seconds'] / model['forward_seconds']:.1f}",
                _ratio(_over(ours["added_seconds"], peer["added_seconds"])),
            ]
        rows.append(cells)
    columns = [
        "peers",
        "saved (MB)",
        "peak",
        "added (% of forward)",
        "GFLOP",
        "ours (%)",
        "GFLOP",
        "bound (%)",
        "ratio",
    ]
    title = f"{model['model']}: {model['nodes']} nodes, plain peak {_mb(plain)} MB"
    return title, columns, rows


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}"


def _ratio(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "not met" if value == math.inf else f"{value:.2f}"


# --- where they go -------------------------------------------------------------------------------


def print_tables(console: Console, tables: Iterable[Table]) -> None:
    """Print tables, the first column of each to the left."""
    for title, columns, rows in tables:
        table = RichTable(title=title, box=box.SIMPLE, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def print_report(results: Record) -> None:
    """Print all tables."""
    console = Console(width=180)
    print_tables(console, tables_of(results))
    console.print(f"costs of {results['device']}; the run took {results['seconds']:.0f} s")


def write_docs(results: Record, folder: Path) -> None:
    """Write `planning.md` and `planning.png` into `folder`."""
    folder.mkdir(exist_ok=True)
    draw(results["models"], folder / "planning.png")
    parts = [_TITLE, summary(results), _FIGURE]
    parts += [_markdown(table) for table in summaries_of(results)]
    missing = ", ".join(f"`{name}`" for name in results.get("not_run", ()))
    not_run = f"\nNot run for this page: {missing}." if missing else ""
    parts += [_HOW_MEASURED.format(**results | {"not_run": not_run}), "## Every peer\n"]
    parts += [_markdown(table, level=3) for table in map(_peers, results["models"]) if table[2]]
    (folder / "planning.md").write_text("\n".join(parts))


def summary(results: Record) -> str:
    """The result of the tables, in a few sentences.

    >>> summary({"models": []})
    'Not measured.'
    """
    models = results["models"]
    found, over = ratios(models), over_bounds(models)
    if not found:
        return "Not measured."
    finite = [ratio for ratio in over if ratio < math.inf]
    without = len(over) - len(finite)
    no_bound = f", and {without} of {len(over)} budgets without a bound" if without else ""
    return (
        f"At the same peak our plans add {mean(found):.2f} of the time that a peer adds (geometric "
        f"mean of {len(found)} peaks, {max(found):.2f} at worst). That is {mean(over):.2f} of the "
        f"proved lower bound ({max(finite):.2f} at worst{no_bound})."
    )


_TITLE = "# The planner and its peers\n"
_FIGURE = "\n![added time against peak](planning.png)\n"
_HOW_MEASURED = """## How it was measured

Made in {seconds:.0f} s by the following; `--from` with the files of `--json` writes it again.

    {command}

The small models are of many kinds (`gpt-4` to `moe-6`). Others are of the kinds that papers measure
(`densenet-6` to `penalty-12`); three of these take gradients inside of the loss. Real sizes are
Llama 3 with 8 and 70 billion parameters, and four of its layers at 131,072 tokens. So are routed
experts, and the U-Net of a diffusion model. `steps` are chains, and `layered` are random networks,
drawn as Gagrani et al. (2022) draw them; both are numbers from the start.{not_run}

Each model is traced once, on the meta device. All figures are of that one joint graph. The values
that a peer saves, and its order of the backward pass, become a schedule of it. One simulator and
one cost model judge all schedules: {device}. Peaks count activations, gradients and
outputs, not inputs and parameters. The simulator gives one peak, to the byte, for a schedule in
numbers and for the two graphs of PyTorch's partitioner that it came from. Otherwise the run says
so.

- *torch.compile*: the minimum-cut partitioner, plain, aggressive, and with each budget (0.9 to 0)
  and solver, planning by flops. Without `--fused`, bytes and time count as if no operators were
  fused. Common subexpressions stay as they are, for everybody.
- *checkpoint*: `torch.utils.checkpoint` on each block. *selective*: the same with what matrix
  products, convolutions and attention give saved; with every second of them saved.
- *DTR*: dynamic tensor rematerialization (Kirisame et al. 2021), written anew: eviction by the
  seconds of a value and its evicted neighbourhood, over bytes and staleness. Its peak is what it
  holds at most, which is more than its schedule needs: it does not know what is never read again.
- *torchtitan*: the greedy and the integer policy of its memory-budget planner (pull requests 3881,
  3975, 4636), written anew, without offloading. Layers are the blocks of *checkpoint*.
- *REVOLVE*: the optimum for chains of equal steps (Griewank and Walther 2000).
- *Checkmate*: the program of `scripts/checkmate.py`, of the graph with neighbours made one
  operator, for it and for us alike. "proved": the optimum. "prompt": the optimum of schedules that
  compute nothing before the stage that reads it, and the lower bound of all others.
- *bound*: proved by our own solver; no schedule that meets the budget adds less. *No plan below*:
  the bound over what the peer adds.
- *floor of the order*: what the backward operators need by themselves, in the traced order.
  *proved of our orders*: no schedule in an order of ours has a lower peak, but for values of less
  than 0.5 %. Recomputed operators run in the order of the forward pass.
- Ours may run the backward operators in another order (gradients of parameters early).
- A peer is compared where it spares more than a millionth of the plain peak.
- The seconds of our plans are those of one core, whatever else the machine does.
- Ratios below 0.01 count as 0.01. Peaks within half a percent share one plan, that for the smaller.
"""


def _markdown(table: Table, level: int = 2) -> str:
    title, columns, rows = table
    lines = [f"{'#' * level} {title}", "", "| " + " | ".join(columns) + " |"]
    lines.append("|" + "---|" * len(columns))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, ""])
