"""Results: text on standard output, coloured on a terminal, JSON in files, and pages."""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.theme import Theme

from torchremat.errors import NotAvailableError

_THEME = Theme(
    {
        "remat.saved": "green",
        "remat.recomputed": "yellow",
        "remat.offloaded": "cyan",
        "remat.source": "dim",
        "remat.heading": "bold",
    }
)


class _Decisions(RegexHighlighter):
    base_style = "remat."
    highlights = (
        r"(?m)^(?P<saved>saved)\b",
        r"(?m)^(?P<recomputed>recomputed)\b",
        r"(?m)^(?P<offloaded>offloaded)\b",
        r"(?m)^(?P<heading>(policy|held for|plan on|inputs:|parameters:|constants:).*)$",
        r"(?P<source>\S+\.py:\d+ \(.*\))$",
    )


def show(text: str) -> None:
    """Print `text`, on a terminal with colours unless `NO_COLOR` or `TERM=dumb` forbids them."""
    if not sys.stdout.isatty():
        click.echo(text)
        return
    console = Console(theme=_THEME, highlighter=_Decisions())
    console.print(text, markup=False, emoji=False, soft_wrap=True)


def check_writable(**paths: str | None) -> None:
    """Raise `click.BadParameter` if a file, given by the option of its name, cannot be written.

    >>> check_writable(save="no/such/folder/plan.json")
    Traceback (most recent call last):
    click.exceptions.BadParameter: no/such/folder/plan.json: there is no folder no/such/folder
    """
    for option, path in paths.items():
        if path is None or path == "-":
            continue
        folder = Path(path).parent
        there = Path(path) if Path(path).exists() else folder
        if not folder.is_dir():
            raise click.BadParameter(
                f"{path}: there is no folder {folder}", param_hint=f"'--{option}'"
            )
        if not os.access(there, os.W_OK):
            raise click.BadParameter(f"{path}: it may not be written", param_hint=f"'--{option}'")


def write_json(content: Any, path: str) -> None:
    """Write `content`, JSON text or what `json` takes, to a file; `-` is standard output."""
    text = content if isinstance(content, str) else json.dumps(content, indent=1)
    if path == "-":
        click.echo(text)
        return
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{text}\n")
    print_note(f"wrote {path}")


def print_note(text: str) -> None:
    """Print a line on standard error: it is not a part of the result."""
    click.echo(text, err=True)


@contextmanager
def show_progress_of(what: str) -> Iterator[None]:
    """Show that work is under way in the block, if a person is looking at the terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    with Console(stderr=True).status(f"{what} ..."):
        yield


def check_pages(path: str | None, function: str = "graph_html") -> None:
    """Check before long work that a page can be drawn and written, if `path` is given."""
    if path is not None:
        check_writable(html=path)
        _viz(function)


def write_page(drawn: Any, path: str) -> None:
    """Draw a plan, a graph or a report as a page. Raises `OSError` if it cannot be written."""
    _viz("graph_html")(drawn, path)
    print_note(f"wrote {path}")


def write_diff(before: Any, after: Any, path: str) -> None:
    """Draw how two plans or reports differ. Raises `OSError` if it cannot be written."""
    _viz("diff_html")(before, after, path)
    print_note(f"wrote {path}")


def _viz(name: str) -> Any:
    try:
        return getattr(importlib.import_module("torchremat.viz"), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise NotAvailableError(f"--html: torchremat.viz.{name} is not in this version") from error
