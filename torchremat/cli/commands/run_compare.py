"""`torchremat compare`."""

from dataclasses import dataclass
from typing import Any

import click

from torchremat.cli.arguments.read_policies import check_select, read_policies
from torchremat.cli.arguments.targets import Target, load_target
from torchremat.cli.commands.run_plan import check_rates
from torchremat.cli.terminal.output import (
    check_pages,
    check_writable,
    show,
    show_progress_of,
    write_diff,
    write_json,
)
from torchremat.core.progress import show_progress
from torchremat.planning.estimate import estimate
from torchremat.policies.policy import Policy
from torchremat.report.compare import Compared, Comparison
from torchremat.report.explain import explain


@dataclass(frozen=True)
class CompareOptions:
    """The arguments of `torchremat compare`."""

    target: str
    policies: tuple[str, ...] = ()
    budgets: tuple[str, ...] = ()
    select: str | None = None
    device: str | None = None
    on: str | None = None
    html: str | None = None
    json_path: str | None = None


def run_compare(options: CompareOptions) -> None:
    """Show what each policy saves and recomputes, side by side."""
    chosen = read_policies(options.policies, options.budgets)
    if options.html is not None and len(chosen) > 2:
        raise click.UsageError(
            f"--html sets two side by side, plain and one policy or two policies, and there are "
            f"{len(chosen)} policies"
        )
    check_rates(options.on)
    check_writable(json=options.json_path)
    check_pages(options.html, "diff_html")
    with show_progress_of(f"loading {options.target}"):
        target = load_target(options.target, options.device)
    found = _compare(target, chosen, options)
    if options.json_path != "-":
        show(str(found))
    if options.html is not None:
        before, after = list(found)[-2:]
        write_diff(before.report, after.report, options.html)
    if options.json_path is not None:
        write_json([_figures(row) for row in found], options.json_path)


def _compare(target: Target, chosen: dict[str, Policy], options: CompareOptions) -> Comparison:
    check_select(target, options.select)
    policies: dict[str, Policy | None] = {"plain": None, **chosen}
    rows: list[Compared] = []
    with show_progress("comparing") as tell:
        for number, (name, policy) in enumerate(policies.items()):
            row = _row(name, target, policy, options)
            if row.seconds is not None and rows and rows[0].seconds is not None:
                added = row.seconds - rows[0].seconds
                row = Compared(name, row.report, row.peak, row.seconds, added)
            rows.append(row)
            tell((number + 1) / len(policies))
    return Comparison(tuple(rows))


def _row(name: str, target: Target, policy: Policy | None, options: CompareOptions) -> Compared:
    under: dict[str, Any] = {"policy": policy}
    if policy is not None:
        under["select"] = options.select
    report = explain(target.fun, *target.args, **under, **target.kwargs)
    found = estimate(target.fun, *target.args, device=options.on, **under, **target.kwargs)
    return Compared(name, report, found.peak_bytes, found.seconds)


def _figures(row: Compared) -> dict[str, Any]:
    return {
        "policy": row.name,
        "held_bytes": row.held,
        "recomputed_bytes": row.recomputed,
        "peak_bytes": row.peak,
        "seconds": row.seconds,
        "added_seconds": row.added_seconds,
    }
