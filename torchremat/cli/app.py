"""The commands and their options; what they do is imported when one runs, for PyTorch is slow."""

# ruff: noqa: PLC0415  (a command imports what it needs of PyTorch; help needs nothing)

from typing import Any

import click

from torchremat.cli import options
from torchremat.cli.terminal.exit_codes import Command

_TARGET = """
    TARGET is package.module:name or path/to/file.py:name, where name is a function without
    arguments that returns (fun_or_module, args) or (fun_or_module, args, kwargs); or a module, a
    class of modules or a function with an example_inputs() beside it, which returns the arguments.
"""


def _with_target(function: click.decorators.FC) -> click.decorators.FC:
    function.__doc__ = f"{function.__doc__}\n{_TARGET}"
    return options.target(function)


@click.group(
    cls=Command,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=options.examples(
        "torchremat fit model.py:make --memory 24GiB --max batch",
        "torchremat plan model.py:make --budget 50% --save plan.json",
        "torchremat residuals model.py:make --policy dots --select 'layers.*'",
        "torchremat compare model.py:make --policy full --policy dots --device meta",
        "torchremat env",
    ),
)
@click.version_option(package_name="torchremat", message="%(prog)s %(version)s")
@options.debug
def main() -> None:
    """Show and plan which values a PyTorch model saves for its backward pass.

    Activation checkpointing (gradient checkpointing, recomputation, rematerialisation) for a model
    in a file of yours: which values are saved for the backward pass, what a policy or a budget
    changes, and what it costs.
    """


@main.command(
    short_help="Plan what to save within a budget of peak memory.",
    epilog=options.examples(
        "torchremat plan model.py:make --budget 50%",
        "torchremat plan model.py:make --budget 20GiB --optimizer AdamW --device meta --on h100",
        "torchremat plan my.models:make --budget 2GiB --save plan.json --html plan.html",
    ),
)
@_with_target
@click.option(
    "--budget",
    required=True,
    metavar="BUDGET",
    help="Bytes of peak memory (2GiB), a share of the peak without (50%), least, or time:+10%.",
)
@click.option(
    "--save",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write the plan; the policy plan:FILE replays it.",
)
@click.option(
    "--solver",
    type=click.Choice(["auto", "milp", "local"]),
    default="auto",
    show_default=True,
    help="milp: integer programs; local: without them.",
)
@options.optimizer
@options.device
@options.on
@options.html
@options.json
@options.debug
def plan(**given: Any) -> None:
    """Plan what to save and what to recompute within a budget of peak memory."""
    from torchremat.cli.commands.run_plan import PlanOptions, run_plan

    run_plan(PlanOptions(**given))


@main.command(
    short_help="Find the plan or the largest batch that fits a device.",
    epilog=options.examples(
        "torchremat fit model.py:make --memory 24GiB --max batch --optimizer AdamW --device meta",
        "torchremat fit model.py:make --memory 80GiB --on h100 --save plan.json",
        "torchremat fit model.py:make --memory 24GiB --max tokens.1",
    ),
)
@_with_target
@click.option(
    "--memory", required=True, metavar="BYTES", help="The memory of the device, in all: 24GiB."
)
@click.option(
    "--max",
    "maximize",
    metavar="DIMENSION",
    help="Find the largest size that fits: of batch (the leading dimension of the tensor "
    "arguments), length (their second), or of dimensions by number (tokens.1).",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="The time of the search for the largest size, roughly.",
)
@click.option(
    "--save",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write the plan, if one is needed; the policy plan:FILE replays it.",
)
@options.optimizer
@options.device
@options.on
@options.json
@options.debug
def fit(**given: Any) -> None:
    """Find the cheapest plan that fits the memory of a device, or the largest size that fits.

    The memory is that of the parameters, the arguments, the optimizer's state and the step.
    The model is not run. Exits with 1 if nothing fits, and says the least memory that would do.
    """
    from torchremat.cli.commands.run_fit import FitCommandOptions, run_fit

    run_fit(FitCommandOptions(**given))


@main.command(
    short_help="Show what is saved for the backward pass, and why.",
    epilog=options.examples(
        "torchremat residuals model.py:make",
        "torchremat residuals model.py:make --policy full --select 'layers.*'",
        "torchremat residuals model.py:make --lines | head",
    ),
)
@_with_target
@options.policy
@options.budget
@options.select
@click.option("--lines", is_flag=True, help="A line for each tensor that is saved, in order.")
@click.option("--by-module", is_flag=True, help="Bytes by the module that computed them.")
@options.device
@options.html
@options.json
@options.debug
def residuals(**given: Any) -> None:
    """Show what is saved from the forward pass for the backward, what is recomputed, and why."""
    from torchremat.cli.commands.run_residuals import ResidualsOptions, run_residuals

    run_residuals(ResidualsOptions(**given))


@main.command(
    short_help="Print or draw the traced graph.",
    epilog=options.examples(
        "torchremat graph model.py:make",
        "torchremat graph model.py:make --budget 50% --html graph.html",
    ),
)
@_with_target
@options.policy
@options.budget
@options.select
@click.option("--sources", is_flag=True, help="Print the user's line beside each equation.")
@options.device
@options.html
@options.json
@options.debug
def graph(**given: Any) -> None:
    """Print the traced graph with types, or draw it with its saved and recomputed values."""
    from torchremat.cli.commands.run_graph import GraphOptions, run_graph

    run_graph(GraphOptions(**given))


@main.command(
    short_help="Compare policies without running the model.",
    epilog=options.examples(
        "torchremat compare model.py:make --policy full --policy dots --budget 50%",
        "torchremat compare model.py:make --policy full --device meta --on h100",
    ),
)
@_with_target
@options.policies
@options.budgets
@options.select
@options.device
@options.on
@options.html
@options.json
@options.debug
def compare(**given: Any) -> None:
    """Compare policies side by side, without running the model.

    Bytes saved are exact; the peak is simulated to the byte, and the time is that of a cost model.
    bench measures both.
    """
    from torchremat.cli.commands.run_compare import CompareOptions, run_compare

    run_compare(CompareOptions(**given))


@main.command(
    short_help="Measure step time and peak memory of policies.",
    epilog=options.examples(
        "torchremat bench model.py:make --policy full --policy dots",
        "torchremat bench model.py:make --policy full --select 'layers.*' --rounds 30",
        "torchremat bench model.py:make --budget 70% --budget 50% --device cuda --json -",
    ),
)
@_with_target
@options.policies
@options.budgets
@options.select
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Steps that are timed of each policy.",
)
@options.device
@options.json
@options.debug
def bench(**given: Any) -> None:
    """Measure the time and the peak memory of a step under each policy, on this machine.

    A step is a forward pass and the backward pass from the sum of its outputs. Policies take turns,
    in another order each time. "plain again" is plain a second time: other ratios are no more exact
    than its distance from 1.00. "bit-equal" says whether outputs and gradients are those of plain
    to the last bit. "no" for "plain again" says that the model computes others each time.
    """
    from torchremat.cli.commands.run_bench import BenchOptions, run_bench

    run_bench(BenchOptions(**given))


@main.command(
    short_help="Compare two saved plans.",
    epilog=options.examples("torchremat diff before.json after.json --exit-code"),
)
@click.argument("before", type=click.Path(dir_okay=False))
@click.argument("after", type=click.Path(dir_okay=False))
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the plans differ.")
@options.json
@options.debug
def diff(**given: Any) -> None:
    """Compare two plans that plan --save wrote: their figures, and what they decide otherwise."""
    from torchremat.cli.commands.run_diff import DiffOptions, run_diff

    run_diff(DiffOptions(**given))


@main.command(
    short_help="Check that a saved plan holds for a model.",
    epilog=options.examples("torchremat check plan.json model.py:make --device meta"),
)
@click.argument("plan", type=click.Path(dir_okay=False))
@_with_target
@options.device
@options.json
@options.debug
def check(**given: Any) -> None:
    """Check that PLAN, a file that plan --save wrote, still holds for a model; it is not run.

    Exits with 1 if the model is traced to another graph, or if its peak is higher than planned.
    """
    from torchremat.cli.commands.run_check import CheckOptions, run_check

    run_check(CheckOptions(**given))


@main.command(
    short_help="Print what to put in a bug report.",
    epilog=options.examples("torchremat env", "torchremat env --json -", "torchremat env --check"),
)
@click.option(
    "--check",
    is_flag=True,
    help="Try the private parts of PyTorch and each feature, and say what works.",
)
@options.json
@options.debug
def env(json_path: str | None, check: bool) -> None:
    """Print what to put in a bug report: versions, processors, settings. Nothing secret is read.

    With --check, print instead which private parts this PyTorch lacks, and which features work.
    """
    if check:
        from torchremat.cli.commands.check_env import check_env

        check_env(json_path)
        return
    from torchremat.cli.commands.run_env import run_env

    run_env(json_path)
