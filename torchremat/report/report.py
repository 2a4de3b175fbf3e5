"""Reports: the decision on each value of a forward pass, as rows, totals, text and JSON."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torchremat.core.avals import dtype_name
from torchremat.core.formatting import ShownInNotebook, human_bytes, table
from torchremat.errors import ArgumentTypeError
from torchremat.remat.program.decisions import Outcome
from torchremat.report.report_rows import DECISIONS, SAVED, Row, fold_rows, format_rows

__all__ = ["Change", "Diff", "Report"]


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclass(frozen=True)
class Report(ShownInNotebook):
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
    """The part that can be drawn: the program, if one policy decides on the whole function; else
    the call, or the programs of modules that have run."""
    plans: int = field(default=0, compare=False)
    """How many plans were made for budgets, by `nn.report` of all calls so far."""
    traces: int = field(default=0, compare=False)
    """How many traces were made, likewise."""
    budgets: tuple[str, ...] = field(default=(), compare=False)
    """A line for each budget: its bytes, where they come from, and its plans."""

    def __reduce__(self) -> tuple[Any, ...]:  # a pickled report has no program
        return type(self), (self.rows, None, self.plans, self.traces, self.budgets)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def total(self) -> int:
        """The bytes that autograd saves: each storage once, inputs and parameters apart.

        `offloaded_total` counts those that are offloaded.
        """
        return sum(row.nbytes for row in self.rows if row.decision in SAVED)

    @property
    def offloaded_total(self) -> int:
        """The bytes that are saved on the host."""
        return sum(row.nbytes for row in self.rows if row.decision == "offloaded")

    def by_decision(self) -> dict[str, int]:
        """The bytes of each decision that some value has, in a fixed order."""
        present = {row.decision for row in self.rows}
        return {
            decision: sum(row.nbytes for row in self.rows if row.decision == decision)
            for decision in DECISIONS
            if decision in present
        }

    def by_module(self) -> dict[str, int]:
        """The bytes that autograd saves of the values of each module; they sum to `total`.

        >>> import torch
        >>> import torchremat as tr
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Tanh())
        >>> tr.explain(model, torch.ones(2, 4)).by_module()
        {'1': 32, '2': 32}
        """
        found: dict[str, int] = {}
        for row in self.rows:
            if row.decision in SAVED:
                found[row.module] = found.get(row.module, 0) + row.nbytes
        return found

    def diff(self, other: "Report") -> "Diff":
        """The values that `other` decides otherwise; they are matched by module and name.

        Raises `TypeError` if `other` is no report.

        >>> import torch
        >>> import torchremat as tr
        >>> def f(x):
        ...     return torch.tanh(torch.tanh(x))
        >>> plain = tr.explain(f, torch.ones(3))
        >>> print(plain.diff(tr.explain(f, torch.ones(3), policy="full")))
        24 B saved -> 0 B (24 B less), 3 values decided otherwise
          12 B  saved  ->  recomputed  tanh    f32[3]
          12 B  saved  ->  recomputed  tanh_1  f32[3]
          12 B  -      ->  input       x       f32[3]
        """
        if not isinstance(other, Report):
            raise ArgumentTypeError(
                f"diff takes another Report, but it was given {other!r} ({type(other).__name__}): "
                "explain(f, x).diff(explain(f, x, policy=policy))"
            )
        before, after = _index_by_name(self.rows), _index_by_name(other.rows)
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

    def __repr__(self) -> str:
        return f"Report({len(self.rows)} rows, {human_bytes(self.total)} saved)"

    def __str__(self) -> str:
        return "\n".join([format_rows(self.rows), *self.budgets])


@dataclass(frozen=True, slots=True)
class Change:
    """A value that two reports decide differently; `None` where one has no row for it."""

    row: Row
    before: Outcome | None
    after: Outcome | None


@dataclass(frozen=True)
class Diff(ShownInNotebook):
    """How one report differs from another: the `changes`, and the bytes saved in both."""

    changes: tuple[Change, ...]
    total_before: int
    total_after: int

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __repr__(self) -> str:
        totals = f"{human_bytes(self.total_before)} -> {human_bytes(self.total_after)}"
        return f"Diff({len(self.changes)} changes, {totals} saved)"

    def __str__(self) -> str:
        change = self.total_after - self.total_before
        less = f"{human_bytes(abs(change))} {'less' if change < 0 else 'more'}"
        number = len(self.changes)
        summary = (
            f"{human_bytes(self.total_before)} saved -> {human_bytes(self.total_after)} ({less}), "
            f"{number} value{'s' * (number != 1)} decided otherwise"
        )
        by_kind: dict[Any, list[Row]] = {}
        for c in self.changes:
            by_kind.setdefault((c.before, c.after), []).append(c.row)
        cells = [
            (human_bytes(sum(r.nbytes for r in fold.rows)), before or "-", "->", after or "-",
             fold.times, fold.text, fold.rows[0].aval)
            for (before, after), rows in by_kind.items()
            for fold in fold_rows(rows)
        ]  # fmt: skip
        return "\n".join([summary, *table(cells, numeric=(0,))])


def _index_by_name(rows: Iterable[Row]) -> dict[tuple[str, str, int], Row]:
    found: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        number = 0
        while (row.module, row.name, number) in found:
            number += 1
        found[row.module, row.name, number] = row
    return found
