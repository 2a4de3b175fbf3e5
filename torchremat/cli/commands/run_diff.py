"""`torchremat diff`: two saved plans side by side."""

from dataclasses import dataclass

import click

from torchremat.cli.terminal.output import check_writable, show, write_json
from torchremat.core.formatting import human_bytes, human_seconds, table
from torchremat.errors import PlanError
from torchremat.planning.plan import Plan
from torchremat.planning.step.fingerprint import find_difference

# Names of one change that are printed; the JSON has all. Nothing depends on the exact value.
_NAMES = 6


@dataclass(frozen=True)
class DiffOptions:
    """The arguments of `torchremat diff`."""

    before: str
    after: str
    exit_code: bool = False
    json_path: str | None = None


def run_diff(options: DiffOptions) -> None:
    """Show how two plans differ: their figures, and the values that one of them saves."""
    check_writable(json=options.json_path)
    before, after = load_plan(options.before, "BEFORE"), load_plan(options.after, "AFTER")
    changes = find_changes(before, after)
    other = before.fingerprint != after.fingerprint
    if options.json_path != "-":
        show("\n".join(_describe(options, before, after, changes)))
    if options.json_path is not None:
        figures = {n: [getattr(before, n), getattr(after, n)] for n in _FIGURES}
        write_json({"same_graph": not other, "figures": figures, "changes": changes},
                   options.json_path)  # fmt: skip
    if options.exit_code and (other or before.order != after.order):
        raise click.exceptions.Exit(1)


def load_plan(path: str, argument: str) -> Plan:
    """The plan in a file; `click.BadParameter` if it is none."""
    try:
        return Plan.load(path)
    except (PlanError, OSError) as error:
        text = f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise click.BadParameter(text, param_hint=f"'{argument}'") from error


def find_changes(before: Plan, after: Plan) -> dict[str, list[str]]:
    """The names of values that are decided otherwise, by `saved -> recomputed` and the like."""
    changes: dict[str, list[str]] = {}
    for name in dict.fromkeys([*before.decisions, *after.decisions]):
        was, now = before.decisions.get(name, "-"), after.decisions.get(name, "-")
        if was != now:
            changes.setdefault(f"{was} -> {now}", []).append(name)
    return changes


_FIGURES = {
    "budget": ("budget", human_bytes),
    "peak_bytes": ("peak", human_bytes),
    "saved_bytes": ("saved", human_bytes),
    "offloaded_bytes": ("offloaded", human_bytes),
    "recompute_seconds": ("added time", human_seconds),
    "lower_bound_seconds": ("lower bound", human_seconds),
}


def _describe(
    options: DiffOptions, before: Plan, after: Plan, changes: dict[str, list[str]]
) -> list[str]:
    rows = [("", options.before, options.after)]
    for name, (title, write) in _FIGURES.items():
        rows.append((title, write(getattr(before, name)), write(getattr(after, name))))
    lines = table(rows, numeric=(1, 2), indent="")
    if before.fingerprint != after.fingerprint:
        lines.append(f"other graphs: {find_difference(before.graph, after.graph)}")
    number = sum(map(len, changes.values()))
    lines.append(f"{number} value{'s' * (number != 1)} decided otherwise")
    for change, names in changes.items():
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        lines.append(f"  {change}: {', '.join(names[:_NAMES])}{more}")
    return lines
