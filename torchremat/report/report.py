"""Reports: what becomes of each value of a forward pass, as rows, totals, text and JSON."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from torchremat.core.avals import Aval, dtype_name
from torchremat.core.formatting import WIDTH, _shortened, human_bytes, table
from torchremat.core.source import Source
from torchremat.errors import ArgumentTypeError
from torchremat.remat.program.decisions import Decision

HELD: tuple[Decision, ...] = ("saved", "constant")
"""What autograd holds of its own on the device: not what is there anyway, inputs and parameters."""


_ORDER: tuple[Decision, ...] = (
    "saved", "offloaded", "constant", "recomputed", "input", "parameter",
)  # fmt: skip


_TITLES: dict[Decision, str] = {
    "input": "inputs",
    "parameter": "parameters",
    "constant": "constants",
}


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of one value.

    Attributes:
        name: its `checkpoint_name`, else `{module}.{op}`, with a number from the second on; of an
            input what the user calls it (`x['w'][0]`, `layers.0.weight`).
        op: the operator that computes it (`mm`), `''` for an input.
        module: the qualified name of the `nn.Module` that ran the operator, `''` outside any.
        source: the user's line, if known.
        shape: its shape.
        dtype: its dtype.
        nbytes: the bytes of its storage, which may be more than its shape needs.
        decision: `saved`, `recomputed`, `offloaded`, `input`, `parameter` or `constant`.
        reason: which policy decided so, or why it had to be.
    """

    name: str
    op: str
    module: str
    source: Source | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    decision: Decision
    reason: str

    @property
    def aval(self) -> str:
        """Shape and dtype, as in `f32[8,16]`."""
        return str(Aval(self.shape, self.dtype))


@dataclass(frozen=True)
class Report:
    """Every value of a forward pass that matters to the backward: a `Row` each, in program order.

    Iterating gives the rows; inputs and parameters come first.

    >>> import torch
    >>> import torchremat as tr
    >>> report = tr.explain(lambda x, w: torch.tanh(x @ w), torch.ones(2, 3), torch.ones(3, 4))
    >>> [(row.name, row.decision, row.nbytes) for row in report]
    [('x', 'input', 24), ('w', 'input', 48), ('tanh', 'saved', 32)]
    >>> report.total
    32
    """

    rows: tuple[Row, ...]
    program: Any = field(default=None, repr=False, compare=False)
    """What can be drawn: the program, if one policy decides on the whole function; else the call,
    or the programs of modules that have run."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled report has its rows alone."""
        return type(self), (self.rows,)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def total(self) -> int:
        """The bytes that autograd holds: each storage once, inputs and parameters apart.

        What is offloaded is not among them, see `offloaded_total`.
        """
        return sum(row.nbytes for row in self.rows if row.decision in HELD)

    @property
    def offloaded_total(self) -> int:
        """The bytes that the host holds."""
        return sum(row.nbytes for row in self.rows if row.decision == "offloaded")

    def by_decision(self) -> dict[str, int]:
        """The bytes of each decision, in a fixed order; those of no value are left out."""
        found: dict[str, int] = {}
        for decision in _ORDER:
            rows = [row for row in self.rows if row.decision == decision]
            if rows:
                found[decision] = sum(row.nbytes for row in rows)
        return found

    def by_module(self) -> dict[str, int]:
        """The bytes that autograd holds of what each module computed; their sum is `total`.

        >>> import torch
        >>> import torchremat as tr
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Tanh())
        >>> tr.explain(model, torch.ones(2, 4)).by_module()
        {'1': 32, '2': 32}
        """
        found: dict[str, int] = {}
        for row in self.rows:
            if row.decision in HELD:
                found[row.module] = found.get(row.module, 0) + row.nbytes
        return found

    def diff(self, other: "Report") -> "Diff":
        """What `other` decides otherwise than this report; values go by module and name.

        Raises `TypeError` if `other` is no report.

        >>> import torch
        >>> import torchremat as tr
        >>> def f(x):
        ...     return torch.tanh(torch.tanh(x))
        >>> plain = tr.explain(f, torch.ones(3))
        >>> print(plain.diff(tr.explain(f, torch.ones(3), policy="full")))
        24 B held -> 0 B (24 B less), 3 values decided otherwise
          12 B  saved  ->  recomputed  tanh    f32[3]
          12 B  saved  ->  recomputed  tanh_1  f32[3]
          12 B  -      ->  input       x       f32[3]
        """
        if not isinstance(other, Report):
            raise ArgumentTypeError(
                f"diff takes another Report, but it was given {other!r} ({type(other).__name__}): "
                "explain(f, x).diff(explain(f, x, policy=policy))"
            )
        before, after = _by_identity(self.rows), _by_identity(other.rows)
        changes = [
            Change(row, row.decision, after[key].decision if key in after else None)
            for key, row in before.items()
        ]
        changes += [
            Change(row, None, row.decision) for key, row in after.items() if key not in before
        ]
        return Diff(tuple(c for c in changes if c.before != c.after), self.total, other.total)

    def to_json(self) -> str:
        """The report as JSON: `total`, `by_decision` and `rows`; equal reports give equal text."""
        rows = [
            asdict(replace(row, source=None))
            | {"source": row.source and str(row.source), "dtype": dtype_name(row.dtype)}
            for row in self.rows
        ]
        content = {"total": self.total, "by_decision": self.by_decision(), "rows": rows}
        return json.dumps(content, indent=1)

    def __str__(self) -> str:
        sections = [_summary(self)]
        for decision in _ORDER:
            rows = [row for row in self.rows if row.decision == decision]
            for heading, group in _grouped(rows).items():
                sections.append(_section(decision, heading, group))
        return "\n".join(sections)


@dataclass(frozen=True, slots=True)
class Change:
    """A value that two reports decide differently; `None` where one has no row for it."""

    row: Row
    before: Decision | None
    after: Decision | None


@dataclass(frozen=True)
class Diff:
    """How one report differs from another: the `changes`, and the bytes held in both."""

    changes: tuple[Change, ...]
    total_before: int
    total_after: int

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __str__(self) -> str:
        change = self.total_after - self.total_before
        less = f"{human_bytes(abs(change))} {'less' if change < 0 else 'more'}"
        number = len(self.changes)
        summary = (
            f"{human_bytes(self.total_before)} held -> {human_bytes(self.total_after)} ({less}), "
            f"{number} value{'s' * (number != 1)} decided otherwise"
        )
        by_kind: dict[Any, list[Row]] = {}
        for c in self.changes:
            by_kind.setdefault((c.before, c.after), []).append(c.row)
        cells = [
            (human_bytes(sum(r.nbytes for r in fold.rows)), before or "-", "->", after or "-",
             fold.times, fold.text, fold.rows[0].aval)
            for (before, after), rows in by_kind.items()
            for fold in folded(rows)
        ]  # fmt: skip
        return "\n".join([summary, *table(cells, numeric=(0,))])


@dataclass(frozen=True)
class Fold:
    """Rows that differ in nothing but a number in their module's name, and one name for all."""

    text: str
    rows: tuple[Row, ...]

    @property
    def times(self) -> str:
        """How often it is there, `''` if once."""
        return f"x{len(self.rows)}" if len(self.rows) > 1 else ""


def folded(rows: Sequence[Row]) -> list[Fold]:
    """Put the rows of identical layers together.

    >>> fc = [f"layers.{i}.fc" for i in range(12)]
    >>> rows = [Row(f"{m}.mm", "mm", m, None, (2,), torch.float32, 8, "saved", "") for m in fc]
    >>> [(fold.text, fold.times) for fold in folded(rows)]
    [('layers.0-11.fc.mm', 'x12')]
    """
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        pattern = tuple("#" if part.isdigit() else part for part in _shown_name(row).split("."))
        alike = replace(row, name="", module="", source=None)
        groups.setdefault((pattern, row.source, alike), []).append(row)
    return [fold for group in groups.values() for fold in _folds(group)]


def _folds(rows: list[Row]) -> list[Fold]:
    """One fold of `rows` if their numbers are a full range in each place, else several."""
    names = [_shown_name(row).split(".") for row in rows]
    numbers = [i for i, part in enumerate(names[0]) if part.isdigit()]
    values = {i: list(dict.fromkeys(int(name[i]) for name in names)) for i in numbers}
    count = 1
    for found in values.values():
        count *= len(found)
    if count == len(rows) and len({tuple(name) for name in names}) == len(rows):
        parts = [_ranges(values[i]) if i in values else part for i, part in enumerate(names[0])]
        return [Fold(".".join(parts), tuple(rows))]
    varied = [i for i in numbers if len(values[i]) > 1]
    if not varied:
        return [Fold(".".join(names[0]), tuple(rows))]
    first = varied[0]
    found_folds = []
    for value in values[first]:
        found_folds += _folds(
            [row for row, name in zip(rows, names, strict=True) if int(name[first]) == value]
        )
    return found_folds


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    texts = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        texts.append(f"{found[0]}-{found[-1]}" if len(found) > 1 else f"{found[0]}")
    return ",".join(texts)


def _shown_name(row: Row) -> str:
    """The name, after the module if it is one that the user gave and so does not tell it."""
    if not row.op or not row.module or row.name.startswith(f"{row.module}."):
        return row.name
    return f"{row.module}.'{row.name}'"


def _grouped(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows by reason, as far as its first colon: what follows is of one row."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.reason.partition(": ")[0], []).append(row)
    return groups


def _summary(report: Report) -> str:
    held = [row for row in report.rows if row.decision in HELD]
    text = f"held for the backward pass: {human_bytes(report.total)} in {_counted(held)}"
    away = [row for row in report.rows if row.decision == "offloaded"]
    if away:
        text += f"; by the host: {human_bytes(report.offloaded_total)} in {_counted(away)}"
    again = [row for row in report.rows if row.decision == "recomputed"]
    if again:
        nbytes = human_bytes(sum(row.nbytes for row in again))
        text += f"; computed again: {nbytes} in {_counted(again)}"
    return text


def _counted(rows: Sequence[Row]) -> str:
    return f"{len(rows)} tensor{'s' * (len(rows) != 1)}"


def _section(decision: Decision, heading: str, rows: list[Row]) -> str:
    title = f"{_TITLES.get(decision, decision)}: {heading}" if heading else decision
    nbytes = human_bytes(sum(row.nbytes for row in rows))
    cells = [
        (human_bytes(sum(r.nbytes for r in fold.rows)), fold.times, fold.text,
         fold.rows[0].aval, str(fold.rows[0].source or ""))
        for fold in folded(rows)
    ]  # fmt: skip
    if not _fits(cells):  # names tell more than functions do
        cells = [(*cell[:-1], cell[-1].partition(" (")[0]) for cell in cells]
    room = WIDTH - len(nbytes) - 2
    return "\n".join(["", f"{_shortened(title, room)}, {nbytes}", *table(cells, numeric=(0, 1))])


def _fits(rows: Sequence[Sequence[str]]) -> bool:
    """Whether a table of these rows, indented, shows every cell whole."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return sum(widths) + 2 * sum(map(bool, widths)) <= WIDTH


def _by_identity(rows: Iterable[Row]) -> dict[tuple[str, str, int], Row]:
    """Rows by module and name; one that is there again is the next of its kind."""
    found: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        number = 0
        while (row.module, row.name, number) in found:
            number += 1
        found[row.module, row.name, number] = row
    return found
