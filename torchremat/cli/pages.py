"""Pages that show graphs, if the package that draws them is there."""

import importlib
from typing import Any

from torchremat.cli.output import check_writable, note
from torchremat.errors import NotAvailableError


def check_pages(path: str | None, function: str = "graph_html") -> None:
    """Before long work: whether a page can be drawn and written, if `path` asks for one.

    Raises `click.BadParameter`, and `NotAvailableError` (a `NotImplementedError`) where
    `torchremat.viz` lacks the function.
    """
    if path is not None:
        check_writable(html=path)
        _viz(function)


def write_page(drawn: Any, path: str) -> None:
    """Draw a plan, a graph or a report as a page. Raises `OSError` if it cannot be written."""
    _viz("graph_html")(drawn, path)
    note(f"wrote {path}")


def write_diff(before: Any, after: Any, path: str) -> None:
    """Draw two of them side by side."""
    _viz("diff_html")(before, after, path)
    note(f"wrote {path}")


def _viz(name: str) -> Any:
    try:
        return getattr(importlib.import_module("torchremat.viz"), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise NotAvailableError(f"--html: torchremat.viz.{name} is not in this version") from error
