"""`torchremat fit`."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from torchremat.cli.arguments.read_policies import option_errors, read_optimizer
from torchremat.cli.arguments.targets import load_target
from torchremat.cli.commands.run_plan import check_rates, figures_of
from torchremat.cli.terminal.output import (
    check_writable,
    print_note,
    show,
    show_progress_of,
    write_json,
)
from torchremat.nn.fit import Fit, fit
from torchremat.planning.budget import bytes_of_limit


@dataclass(frozen=True)
class FitCommandOptions:
    """The arguments of `torchremat fit`."""

    target: str
    memory: str
    maximize: str | None = None
    seconds: float | None = None
    save: str | None = None
    optimizer: str | None = None
    device: str | None = None
    on: str | None = None
    json_path: str | None = None


def run_fit(options: FitCommandOptions) -> None:
    """Find a plan, or the largest size, with which the target fits into a memory."""
    with option_errors("--memory"):
        memory = bytes_of_limit(options.memory, "memory")
    optimizer = read_optimizer(options.optimizer)
    check_rates(options.on)
    check_writable(save=options.save, json=options.json_path)
    with show_progress_of(f"loading {options.target}"):
        target = load_target(options.target, options.device)
    found = fit(
        target.fun,
        *target.args,
        memory=memory,
        optimizer=optimizer,
        maximize=options.maximize,
        device=options.on,
        seconds=options.seconds,
        **target.kwargs,
    )
    if options.json_path != "-":
        show(str(found))
    if options.save is not None and found.plan is not None:
        found.plan.save(options.save)
        print_note(f"wrote {options.save}: the policy plan:{options.save} replays it")
    if options.json_path is not None:
        write_json(figures_of_fit(found), options.json_path)


def figures_of_fit(found: Fit) -> dict[str, Any]:
    """The figures of `--json`, those of the plan among them."""
    plan = None if found.plan is None else figures_of(found.plan)
    figures = asdict(replace(found, plan=None))
    return figures | {"plan": plan, "fits": found.fits, "added_percent": found.added_percent}
