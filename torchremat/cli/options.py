"""The options that several commands share. Nothing here imports PyTorch: help is fast."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])
_Option = Callable[[_F], _F]


def _set_debug(context: click.Context, _: click.Parameter, value: bool) -> bool:
    if value:
        context.find_root().obj["debug"] = True
    return value


target = click.argument("target")

debug = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_set_debug,
    help="Show the traceback of an error.",
)

policy = click.option(
    "--policy",
    metavar="POLICY",
    help="What may be saved: none, full, dots, names:a,b, ops:aten.mm, modules:layers.*.attn, "
    "budget:2GiB, plan:file.json; joined with |.",
)

policies = click.option(
    "--policy",
    "policies",
    metavar="POLICY",
    multiple=True,
    help="A policy, as text: none, full, dots, names:a,b, ops:aten.mm, modules:layers.*.attn, "
    "plan:file.json, joined with |. Give it several times.",
)

budget = click.option(
    "--budget",
    metavar="BUDGET",
    help="Bytes of peak memory (2GiB), a share of the peak without (50%), least, or time:+10%.",
)

budgets = click.option(
    "--budget",
    "budgets",
    metavar="BUDGET",
    multiple=True,
    help="The same as --policy budget:BUDGET: bytes of peak memory (2GiB), a share of the peak "
    "without (50%), least, or time:+10%. Give it several times.",
)

select = click.option(
    "--select",
    metavar="MODULES",
    help="Put the policy on each of these modules rather than on the whole: layers.*, **.attn, "
    "every:2, first:3, joined with ',', excluded with '!'.",
)

device = click.option(
    "--device", metavar="DEVICE", help="Where the model is made; meta allocates nothing."
)

on = click.option(
    "--on",
    metavar="NAME",
    help="What the times are of: cpu, cuda, h100, a100, ... By default where the tensors are, or "
    "this machine.",
)

optimizer = click.option(
    "--optimizer",
    metavar="NAME",
    help="Count parameters, inputs and the state of this optimizer too: AdamW, SGD, ..., or "
    "package.module:Class.",
)

html = click.option(
    "--html", metavar="FILE", type=click.Path(dir_okay=False), help="Also write a page to open."
)

json = click.option(
    "--json",
    "json_path",
    metavar="FILE",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Also write JSON; - writes it to standard output, and nothing else.",
)


def examples(*lines: str) -> str:
    r"""An epilogue for a command's help; the lines stay as they are.

    >>> examples("torchremat env")
    '\x08\nExamples:\n  torchremat env'
    """
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
