#!/usr/bin/env python
"""Write the page of the models that train from the rows that `tests/zoo` left in files.

python scripts/zoo_report.py ROWS [ROWS ...]
"""

import argparse
import importlib.metadata
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "measured" / "models.md"
NAMES = {
    "checkpoint": "`torch.utils.checkpoint`, each block",
    "blocks": "each block wrapped",
    "whole": "the whole model wrapped",
    "budget": "the whole model under a budget",
    "compile": '`torch.compile(backend="torchremat")`',
    "compiled budget": "the same under a budget",
}
ROUNDED = 0.001
"""Peaks are rounded so."""
RESULTS = ("bits", "rounding", "wrong", "refused")
MODEL_COLUMNS = ("checkpoint", "blocks", "whole", "budget", "compile", "compiled budget")
PEAK_COLUMNS = ("checkpoint", "blocks", "budget", "compiled budget")
HOW_MEASURED = """
## How it was measured

    scripts/test_zoo.sh

Each model is built with small sizes from its library's own class, in train mode with dropout. It
trains for three steps of SGD in plain PyTorch and in each way, from the same seeds. Losses, all
gradients, all buffers and the state of the random generator are compared. *Bits* is equal to the
bit, and *rounding* is within 0.001 of the largest entry of each tensor. *Wrong* is anything else,
and *refused* is an error.

Blocks are what the library marks as layers for checkpointing, or the members of its lists of
layers. The policy is `full`. The budget is half way between the peaks of plain PyTorch and of
`torch.utils.checkpoint`, for the model with its loss. Peaks are those of
`torchremat.measure.LiveBytes` in the second step; of `torch.compile` those that the allocator tells
the profiler, beside the same of plain PyTorch. Seconds are those of the first step, which traces
and plans, and the times of the third step are
parts of plain's. The models take milliseconds, on one thread of a CPU that did other work: times
say whether something is made anew in each step, and no more.

`torch.compile` is compared with plain PyTorch, too, with the policy `full` or the same budget, and
code in Python. The budget is one for all graphs between graph breaks.
Where it differs, and PyTorch's own backend `aot_eager` gives the same bits or refuses too, it is
counted under *as aot_eager*.

`torch.utils.checkpoint` runs a block twice. So batch norms update their statistics twice, and what
NumPy or Python draws differs: it is *wrong* for those.
"""


def read_rows(paths: list[Path]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """The rows by model, then by way; of a model that ran twice the last ones."""
    found: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found[row["model"]][row["way"]] = row
    return found


def result_of(row: Mapping[str, Any]) -> str:
    is_theirs = row["way"].startswith("compile") and row["reason"].startswith("so does aot_eager")
    return "as aot_eager" if is_theirs else str(row["result"])


def describe(models: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    ours = [row for ways in models.values() for way, row in ways.items() if way in NAMES]
    trained = {
        way: sum(result_of(row) == "bits" for row in ours if row["way"] == way) for way in NAMES
    }
    pairs = [
        (ways["blocks"]["peak"], ways["checkpoint"]["peak"])
        for ways in models.values()
        if ways["checkpoint"]["result"] != "refused" and ways["blocks"]["result"] != "refused"
    ]
    lower = sum(ours <= theirs for ours, theirs in pairs)
    near = sum(ours <= 1.05 * theirs for ours, theirs in pairs)
    libraries = Counter(next(iter(ways.values()))["library"] for ways in models.values())
    return (
        f"Of {len(models)} models of {len(libraries)} libraries {trained['blocks']} train block "
        f"by block as in plain PyTorch, to the bit, and {trained['whole']} as a whole. "
        f"`torch.utils.checkpoint` does it for {trained['checkpoint']}.\n"
        f"The peak is at most that of `torch.utils.checkpoint` for {lower} of {len(pairs)}, and "
        f"within 5 % of it for {near}.\n"
        + "".join(map(partial(describe_budgets, models), ("budget", "compiled budget")))
    )


def describe_budgets(models: Mapping[str, Mapping[str, Mapping[str, Any]]], way: str) -> str:
    """How many keep the budget, half way between the peaks of plain and of `checkpoint`."""
    pairs = [
        (ways[way]["peak"], (1 + ways["checkpoint"]["peak"]) / 2)
        for ways in models.values()
        if all(w in ways and ways[w]["result"] != "refused" for w in ("checkpoint", way))
    ]
    kept = sum(peak <= budget + ROUNDED for peak, budget in pairs)
    near = sum(peak <= 1.05 * budget for peak, budget in pairs)
    return (
        f"{NAMES[way][0].upper()}{NAMES[way][1:]}: {kept} of {len(pairs)} keep it, and {near} are "
        "within 5 % of it.\n"
    )


def write_summary(models: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    columns = (*RESULTS, "as aot_eager")
    lines = [f"| way | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for way, name in NAMES.items():
        counts = Counter(result_of(ways[way]) for ways in models.values() if way in ways)
        lines.append(f"| {name} | {' | '.join(str(counts[c] or '') for c in columns)} |")
    return "\n".join(lines)


def write_models(models: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    names = [*MODEL_COLUMNS, "runs as", *(f"peak, {way}" for way in PEAK_COLUMNS)]
    names += ["first step, whole (s)", "time, blocks", "time, whole"]
    lines = [
        f"| model | {' | '.join(names)} |",
        "|---|" + "---|" * (len(MODEL_COLUMNS) + 1) + "---:|" * (len(PEAK_COLUMNS) + 3),
    ]
    for name, ways in sorted(models.items(), key=lambda item: _sort_key(*item)):
        lines.append(f"| {_label(name, ways)} | {' | '.join(_cells(ways))} |")
    return "\n".join(lines)


def _sort_key(name: str, ways: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    return next(iter(ways.values()))["library"], name


def _label(name: str, ways: Mapping[str, Mapping[str, Any]]) -> str:
    library = next(iter(ways.values()))["library"]
    return name if ", " in name else f"{library}, {name}"


def _cells(ways: Mapping[str, Mapping[str, Any]]) -> list[str]:
    results = [result_of(ways[way]) if way in ways else "" for way in MODEL_COLUMNS]
    parts = " + ".join(sorted({p for w in ("blocks", "whole") for p in _parts(ways[w])}))
    figures = [
        *(_figure(ways, way, "peak") for way in PEAK_COLUMNS),
        _figure(ways, "whole", "first_seconds"),
        _figure(ways, "blocks", "time"),
        _figure(ways, "whole", "time"),
    ]
    return [*results, parts, *figures]


def _parts(row: Mapping[str, Any]) -> list[str]:
    return [part for part in row["parts"].split("+") if part]


def _figure(ways: Mapping[str, Mapping[str, Any]], way: str, what: str) -> str:
    row = ways.get(way)
    return "" if row is None or row["result"] == "refused" else f"{row[what]:.2f}"


def write_reasons(models: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    lines = [
        f"- {name}, {NAMES[way]}: {row['result']}.\n\n      {row['reason']}"
        for name, ways in sorted(models.items())
        for way, row in ways.items()
        if (way in ("blocks", "whole", "budget") and row["result"] != "bits")
        or (way == "compiled budget" and row["reason"].startswith("BudgetError"))
    ]
    return "\n".join(lines) or "None."


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", type=Path, nargs="+")
    models = read_rows(parser.parse_args().rows)
    first = [ways["whole"]["first_seconds"] for ways in models.values()]
    libraries = sorted({next(iter(ways.values()))["library"] for ways in models.values()})
    versions = "\n".join(f"- {name} {_version_of(name)}" for name in libraries)
    PAGE.write_text(
        f"# Models\n\n{describe(models)}\n{write_summary(models)}\n\n"
        f"The first step of a whole model takes {statistics.median(first):.1f} s in the median.\n\n"
        f"## What is not equal to the bit, and why\n\n{write_reasons(models)}\n\n"
        f"## Each model\n\nPeaks and times are parts of plain PyTorch's.\n\n"
        f"{write_models(models)}\n{HOW_MEASURED}\nReleases:\n\n{versions}\n"
    )


def _version_of(library: str) -> str:
    renamed = {"neuralop": "neuraloperator", "open_clip": "open_clip_torch"}
    return importlib.metadata.version(renamed.get(library, library))


if __name__ == "__main__":
    main()
