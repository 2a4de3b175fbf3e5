"""The tables of `bench_compile.py`."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planning_report import print_tables
from rich.console import Console

Record = dict[str, Any]
Table = tuple[str, Sequence[str], list[Sequence[str]]]
"""A title, the names of columns, and rows."""


def tables_of(results: Record) -> list[Table]:
    """All tables."""
    models = results["models"]
    return [_plain(models), *(_budgets(model) for model in models if "pairs" in model)]


def ratios(models: Sequence[Record]) -> list[float]:
    """The seconds of our step over a peer's, at the peak of each."""
    return [
        math.inf if pair["ours"] is None else pair["ours"]["seconds"] / pair["peer"]["seconds"]
        for model in models
        for pair in model.get("pairs", [])
    ]


def _plain(models: Sequence[Record]) -> Table:
    rows = []
    for model in models:
        default, none = model["plain"]["default"], model["plain"]["none"]
        compiled = [statistics.median(record["compiled"]) for record in (default, none)]
        rows.append(
            [
                model["model"],
                _seconds(default),
                _seconds(none),
                f"{none['seconds'] / default['seconds']:.3f}",
                f"{none['least_seconds'] / default['least_seconds']:.3f}",
                f"{compiled[0]:.1f}",
                f"{compiled[1]:.1f}",
                f"{compiled[1] / compiled[0]:.2f}",
                _mb(default["saved_bytes"], none["saved_bytes"]),
                _mb(default["peak_bytes"], none["peak_bytes"]),
            ]
        )
    columns = [
        "model",
        "default (ms)",
        "none (ms)",
        "ratio",
        "of the fastest",
        "compile (s)",
        "none (s)",
        "ratio",
        "saved (MB)",
        "peak (MB)",
    ]
    return 'The policy "none" and torch.compile\'s default', columns, rows


def _budgets(model: Record) -> Table:
    rows = []
    for pair in model["pairs"]:
        peer, own = pair["peer"], pair["ours"]
        cells = [peer["name"], _mb(peer["saved_bytes"]), _mb(peer["peak_bytes"]), _seconds(peer)]
        if own is None:
            cells += ["not met", "", _mb(pair["least_peak"]), "", "", ""]
        else:
            cells += [
                own["name"],
                _mb(own["saved_bytes"]),
                _mb(own["peak_bytes"]),
                _seconds(own),
                f"{own['seconds'] / peer['seconds']:.3f}",
                f"{own['least_seconds'] / peer['least_seconds']:.3f}",
            ]
        rows.append(cells)
    columns = [
        "peer",
        "saved (MB)",
        "peak (MB)",
        "step (ms)",
        "ours",
        "saved (MB)",
        "peak (MB)",
        "step (ms)",
        "ratio",
        "of the fastest",
    ]
    return f"{model['model']}: at the peak of each peer", columns, rows


def _seconds(record: Record) -> str:
    spread = (record["quartiles"][1] - record["quartiles"][0]) / 2
    return f"{1e3 * record['seconds']:.1f} ± {1e3 * spread:.1f}"


def _mb(*nbytes: float) -> str:
    return " -> ".join(f"{n / 1e6:.1f}" for n in nbytes)


def summary(results: Record) -> str:
    """The result of the tables, in a sentence or two."""
    found = ratios(results["models"])
    plain = [
        model["plain"]["none"]["seconds"] / model["plain"]["default"]["seconds"]
        for model in results["models"]
    ]
    met = [ratio for ratio in found if ratio < math.inf]
    text = f'The policy "none" takes {min(plain):.3f} to {max(plain):.3f} of the default\'s time. '
    if met:
        text += (
            f"At the peaks of {len(found)} peers ours is faster at {sum(r < 1 for r in met)}, "
            f"and does not meet {len(found) - len(met)}. The ratio of those met is "
            f"{statistics.geometric_mean(met):.3f} in the mean and {max(met):.3f} at worst."
        )
    return text


def print_report(results: Record) -> None:
    """Print all tables."""
    console = Console(width=160)
    print_tables(console, tables_of(results))
    for model in results["models"]:
        for note in model.get("notes", []):
            console.print(f"{model['model']}: {note}")
    console.print(summary(results))
    console.print(f"{results['device']}, PyTorch {results['torch']}; {results['seconds']:.0f} s")


def write_docs(results: Record, folder: Path) -> None:
    """Write `compile.md` into `folder`."""
    parts = [_TITLE, f"{summary(results)}\n"]
    parts += [_markdown(table) for table in tables_of(results)]
    notes = [f"- {m['model']}: {note}" for m in results["models"] for note in m.get("notes", [])]
    parts += ["## Notes of the run\n", *notes, ""] if notes else []
    parts.append(_HOW_MEASURED.format(**results))
    folder.mkdir(exist_ok=True)
    (folder / "compile.md").write_text("\n".join(parts))


def _markdown(table: Table) -> str:
    title, columns, rows = table
    lines = [f"## {title}", "", "| " + " | ".join(columns) + " |"]
    lines.append("|" + "---|" * len(columns))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, ""])


_TITLE = "# The compiled backend and torch.compile's own\n"
_HOW_MEASURED = """## How it was measured

Made by `{command}` in {seconds:.0f} s: {device}, {threads} threads, PyTorch {torch}, Python
{python}.

A step is a forward and a backward pass, compiled by inductor, without optimizer. All variants of a
model run in one process and take turns. Each round begins with another variant. The tables have the
median, half the distance of the quartiles, and the ratio of the fastest rounds beside that of the
medians. Compile times are of the first step, with nothing compiled before. Bytes "saved" are the
storages between the passes, without parameters and arguments. The peak is the most that a step
allocates at a time, with gradients and the workspace of kernels. On a GPU it is the allocator's own
figure, on a CPU the profiler's.

*budget* is `torch._functorch.config.activation_memory_budget`, *checkpoint*
`torch.utils.checkpoint` on each block, both under torch.compile's default backend. For each of them
up to three of our budgets are compiled. Each is chosen by the peaks of those before. Ours is the
fastest of all plans for that model with at most the peer's measured peak. The medians in the table
choose it, which favours it by a little noise. Peers that do not differ from another are left out.
On a machine with other work, differences of a few per cent mean nothing.
"""
