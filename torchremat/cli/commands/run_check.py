"""`torchremat check`: whether a saved plan still holds for a model, for CI."""

from dataclasses import dataclass
from typing import Any

import click

from torchremat.cli.arguments.targets import load_target
from torchremat.cli.commands.run_diff import load_plan
from torchremat.cli.terminal.output import check_writable, show, show_progress_of, write_json
from torchremat.core.formatting import human_bytes, percent
from torchremat.planning.estimate import estimate
from torchremat.planning.from_plan import from_plan


@dataclass(frozen=True)
class CheckOptions:
    """The arguments of `torchremat check`."""

    plan: str
    target: str
    device: str | None = None
    json_path: str | None = None


def run_check(options: CheckOptions) -> None:
    """Show whether a plan still holds for the target, and end with an exit code that says so."""
    check_writable(json=options.json_path)
    plan = load_plan(options.plan, "PLAN")
    with show_progress_of(f"loading {options.target}"):
        target = load_target(options.target, options.device)
    with show_progress_of("tracing"):  # it raises PlanError for another graph
        found = estimate(target.fun, *target.args, policy=from_plan(plan), **target.kwargs)
    figures: dict[str, Any] = {
        "peak_bytes": found.peak_bytes,
        "planned_peak_bytes": plan.peak_bytes,
        "budget": plan.budget,
        "holds": found.peak_bytes <= plan.peak_bytes,
    }
    if options.json_path is not None:
        write_json(figures, options.json_path)
    if not figures["holds"]:
        raise click.ClickException(
            f"{options.plan} no longer holds for {options.target}: the peak is "
            f"{human_bytes(found.peak_bytes)}, and was {human_bytes(plan.peak_bytes)} when it was "
            "planned. Plan again with torchremat plan"
        )
    if options.json_path != "-":
        added = percent(plan.recompute_seconds, plan.baseline.seconds)
        show(
            f"{options.plan} holds for {options.target}: peak {human_bytes(plan.peak_bytes)} of a "
            f"budget of {human_bytes(plan.budget)}, {added} of the step's time added"
        )
