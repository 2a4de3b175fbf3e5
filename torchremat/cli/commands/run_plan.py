"""`torchremat plan`."""

from dataclasses import asdict, dataclass
from typing import Any

import click

from torchremat.cli.arguments.read_policies import check_budget, read_optimizer
from torchremat.cli.arguments.targets import load_target
from torchremat.cli.terminal.output import (
    check_pages,
    check_writable,
    print_note,
    show,
    show_progress_of,
    write_json,
    write_page,
)
from torchremat.planning.api import plan
from torchremat.planning.costs.device_rates import rates_of
from torchremat.planning.plan import Plan


@dataclass(frozen=True)
class PlanOptions:
    """The options of `torchremat plan`; the paths are `None` where nothing is written."""

    target: str
    budget: str
    save: str | None = None
    solver: str = "auto"
    optimizer: str | None = None
    device: str | None = None
    on: str | None = None
    html: str | None = None
    json_path: str | None = None


def run_plan(options: PlanOptions) -> None:
    """Plan a step of the target within the budget; print, save or draw the plan."""
    check_budget(options.budget)
    optimizer = read_optimizer(options.optimizer)
    check_rates(options.on)
    check_writable(save=options.save, json=options.json_path)
    check_pages(options.html)
    with show_progress_of(f"loading {options.target}"):
        target = load_target(options.target, options.device)
    found = plan(
        target.fun,
        *target.args,
        budget=options.budget,
        optimizer=optimizer,
        solver=options.solver,
        device=options.on,
        **target.kwargs,
    )
    if options.json_path != "-":
        show(found.summary())
    if options.save is not None:
        found.save(options.save)
        print_note(f"wrote {options.save}: the policy plan:{options.save} replays it")
    if options.html is not None:
        write_page(found, options.html)
    if options.json_path is not None:
        write_json(figures_of(found), options.json_path)


def check_rates(name: str | None) -> None:
    """`click.BadParameter` if `--on` names no device."""
    if name is not None:
        try:
            rates_of(name)
        except (ValueError, RuntimeError) as error:
            raise click.BadParameter(str(error), param_hint="'--on'") from error


def figures_of(found: Plan) -> dict[str, Any]:
    """The figures of `--json`: bytes, seconds, the bound, and each value's decision."""
    names = (
        "budget", "peak_bytes", "saved_bytes", "offloaded_bytes", "recompute_seconds",
        "recompute_flops", "lower_bound_seconds", "gap", "device",
    )  # fmt: skip
    figures = {name: getattr(found, name) for name in names}
    return figures | {"baseline": asdict(found.baseline), "decisions": dict(found.decisions)}
