"""The rows of a report: identical layers folded into one, and the text of a section of rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from textwrap import wrap
from typing import Any, Literal

import torch

from torchremat.core.avals import Aval
from torchremat.core.formatting import WIDTH, human_bytes, table
from torchremat.core.source import Source
from torchremat.errors import make_printable
from torchremat.remat.program.decisions import Outcome

__all__ = ["Row"]


def __dir__() -> list[str]:
    return sorted(__all__)


SAVED: tuple[Outcome, ...] = ("saved", "constant")
"""Decisions that cost memory of the device: inputs and parameters are there anyway."""

DECISIONS: tuple[Outcome, ...] = (
    "saved", "offloaded", "constant", "recomputed", "tiled", "input", "parameter",
)  # fmt: skip

_TITLES = {"input": "inputs", "parameter": "parameters", "constant": "constants"}


@dataclass(frozen=True, slots=True)
class Row:
    """The decision on one value, with its reason.

    Attributes:
        name: its `checkpoint_name`, else `{module}.{op}`, with a number from the second on; of an
            input what the user calls it (`x['w'][0]`, `layers.0.weight`).
        op: the operator that computes it (`mm`), `''` for an input.
        module: the qualified name of the `nn.Module` that ran the operator, `''` outside any.
        source: the user's line, if known.
        shape: its shape.
        dtype: its dtype.
        nbytes: the bytes of its storage, which may be more than its shape needs.
        decision: `saved`, `recomputed`, `offloaded`, `tiled`, `input`, `parameter` or `constant`.
            Of a `tiled` value there is one tile at a time, whose shape and bytes these are.
        reason: which policy decided so, or why it had to be.
        way: `graph`, or `tape` for what a function did that cannot be one graph.
    """

    name: str
    op: str
    module: str
    source: Source | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    decision: Outcome
    reason: str
    way: Literal["graph", "tape"] = "graph"

    @property
    def aval(self) -> str:
        """Shape and dtype, as in `f32[8,16]`."""
        return str(Aval(self.shape, self.dtype))


@dataclass(frozen=True)
class Fold:
    text: str
    rows: tuple[Row, ...]

    @property
    def times(self) -> str:
        return f"x{len(self.rows)}" if len(self.rows) > 1 else ""


def fold_rows(rows: Sequence[Row]) -> list[Fold]:
    """Fold the rows of identical layers.

    >>> fc = [f"layers.{i}.fc" for i in range(12)]
    >>> rows = [Row(f"{m}.mm", "mm", m, None, (2,), torch.float32, 8, "saved", "") for m in fc]
    >>> [(fold.text, fold.times) for fold in fold_rows(rows)]
    [('layers.0-11.fc.mm', 'x12')]
    """
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        pattern = tuple("#" if part.isdigit() else part for part in _name_in_module(row).split("."))
        alike = replace(row, name="", module="", source=None)
        groups.setdefault((pattern, row.source, alike), []).append(row)
    return [fold for group in groups.values() for fold in _fold_alike(group)]


def _fold_alike(rows: list[Row]) -> list[Fold]:
    names = [_name_in_module(row).split(".") for row in rows]
    numbers = [i for i, part in enumerate(names[0]) if part.isdigit()]
    values = {i: list(dict.fromkeys(int(name[i]) for name in names)) for i in numbers}
    count = 1
    for found in values.values():
        count *= len(found)
    if count == len(rows) and len({tuple(name) for name in names}) == len(rows):
        parts = [
            _format_ranges(values[i]) if i in values else part for i, part in enumerate(names[0])
        ]
        return [Fold(".".join(parts), tuple(rows))]
    varied = [i for i in numbers if len(values[i]) > 1]
    if not varied:
        return [Fold(".".join(names[0]), tuple(rows))]
    first = varied[0]
    folds = []
    for value in values[first]:
        folds += _fold_alike(
            [row for row, name in zip(rows, names, strict=True) if int(name[first]) == value]
        )
    return folds


def _format_ranges(numbers: Iterable[int]) -> str:
    """Format runs of numbers as ranges.

    >>> _format_ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    texts = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        texts.append(f"{found[0]}-{found[-1]}" if len(found) > 1 else f"{found[0]}")
    return ",".join(texts)


def _name_in_module(row: Row) -> str:
    """The module comes first if the name is the user's, which does not contain it."""
    if not row.op or not row.module or row.name.startswith(f"{row.module}."):
        return row.name
    return f"{row.module}.'{row.name}'"


def _group_by_reason(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.reason.partition(": ")[0], []).append(row)
    return groups


def format_rows(rows: Sequence[Row]) -> str:
    sections = [_summarize(rows)]
    for decision in DECISIONS:
        decided = [row for row in rows if row.decision == decision]
        for heading, group in _group_by_reason(decided).items():
            sections.append(_format_section(decision, heading, group))
    return "\n".join(sections)


def _summarize(rows: Sequence[Row]) -> str:
    parts = [f"saved for the backward pass: {_measure(rows, SAVED)}"]
    for decision, title in (("offloaded", "by the host"), ("recomputed", "recomputed")):
        if any(row.decision == decision for row in rows):
            parts.append(f"{title}: {_measure(rows, (decision,))}")
    if any(row.way == "tape" for row in rows):
        parts.append("on a tape")
    return "; ".join(parts)


def _measure(rows: Sequence[Row], decisions: Sequence[str]) -> str:
    sizes = [row.nbytes for row in rows if row.decision in decisions]
    return f"{human_bytes(sum(sizes))} in {len(sizes)} tensor{'s' * (len(sizes) != 1)}"


def _format_section(decision: Outcome, heading: str, rows: list[Row]) -> str:
    title = f"{_TITLES.get(decision, decision)}: {heading}" if heading else decision
    nbytes = human_bytes(sum(row.nbytes for row in rows))
    cells = [
        (human_bytes(sum(r.nbytes for r in fold.rows)), fold.times, fold.text,
         fold.rows[0].aval, str(fold.rows[0].source or ""))
        for fold in fold_rows(rows)
    ]  # fmt: skip
    if not _fits(cells):  # a value's name tells more than the function in its source
        cells = [(*cell[:-1], cell[-1].partition(" (")[0]) for cell in cells]
    lines = wrap(
        make_printable(f"{title}, {nbytes}"), WIDTH, subsequent_indent="  ", break_on_hyphens=False
    )
    return "\n".join(["", *lines, *table(cells, numeric=(0, 1))])


def _fits(rows: Sequence[Sequence[str]]) -> bool:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return sum(widths) + 2 * sum(map(bool, widths)) <= WIDTH
