"""`torchremat residuals`."""

from dataclasses import dataclass

import click

from torchremat.cli.arguments.read_policies import OnePolicyOptions, apply_policy, check_select
from torchremat.cli.arguments.targets import Target
from torchremat.cli.terminal.output import show, show_progress_of, write_json, write_page
from torchremat.core.formatting import human_bytes, table
from torchremat.policies.policy import Policy
from torchremat.report.explain import explain
from torchremat.report.report import Report
from torchremat.report.residuals import saved_residuals


@dataclass(frozen=True)
class ResidualsOptions(OnePolicyOptions):
    """The options of `torchremat residuals`; `lines` and `by_module` exclude each other."""

    lines: bool = False
    by_module: bool = False


def run_residuals(options: ResidualsOptions) -> None:
    """Print which values the target saves for its backward pass, and why."""
    if options.lines and options.by_module:
        raise click.UsageError("--lines and --by-module are two ways to print: give one")
    target, chosen = options.load()
    check_select(target, options.select)
    if options.lines and options.json_path is None and options.html is None:
        show(_lines(target, chosen, options.select))
        return
    with show_progress_of("tracing"):
        report = explain(
            target.fun, *target.args, policy=chosen, select=options.select, **target.kwargs
        )
    if options.json_path != "-":
        show(
            _lines(target, chosen, options.select) if options.lines
            else _by_module(report) if options.by_module
            else str(report)
        )  # fmt: skip
    if options.html is not None:
        write_page(report, options.html)
    if options.json_path is not None:
        write_json(report.to_json(), options.json_path)


def _lines(target: Target, chosen: Policy | None, select: str | None) -> str:
    fun = apply_policy(target, chosen, select)
    with show_progress_of("tracing"):
        found = saved_residuals(fun, *target.args, **target.kwargs)
    return "\n".join(map(str, found))


def _by_module(report: Report) -> str:
    rows = [("held", "share", "module")]
    for module, nbytes in sorted(report.by_module().items(), key=lambda pair: (-pair[1], pair[0])):
        share = f"{100 * nbytes / report.total:.1f} %" if report.total else "-"
        rows.append((human_bytes(nbytes), share, module or "(outside any)"))
    rows.append((human_bytes(report.total), "", "in all"))
    return "\n".join(table(rows, numeric=(0, 1), indent=""))
