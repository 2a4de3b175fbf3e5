"""Docstrings of the package, in which `x` is code, for Sphinx, to which it is a reference.

A name of the public interface becomes a link, all else code.
"""

import inspect
import re
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from public_links import documented_name
from sphinx.application import Sphinx

SECTION = re.compile(r"(?:Args|Attributes|Raises|Returns|Warns|Yields):\n")
# between single backticks, over a line break too; of double backticks neither
QUOTED = re.compile(r"(?<![`:])`([^`]+)`(?!`)")


def as_reference(quoted: re.Match[str], own: frozenset[str]) -> str:
    """A link or code in reStructuredText, of what stands between backticks.

    `own` are the names that mean something else in this docstring: the parameters.
    """
    text = " ".join(quoted[1].split())
    name = None if text in own else documented_name(text)
    marked = f"``{text}``" if name is None else f":py:obj:`{text} <{name}>`"
    return marked + "\\ " * quoted.string[quoted.end() :][:1].isalnum()  # as in `Aval`s


def own_names(documented: Any) -> frozenset[str]:
    """The names of the parameters of a function or class, and the last part of its own."""
    try:
        parameters = list(inspect.signature(documented).parameters)
    except (TypeError, ValueError):
        parameters = []
    return frozenset([*parameters, getattr(documented, "__name__", "")])


def is_display(paragraph: str, before: str) -> bool:
    """Whether a paragraph is indented to be shown as it is; what a section has is indented too."""
    lines = paragraph.splitlines()
    in_section = before[:1] == " " or SECTION.match(before) is not None
    return bool(lines) and all(line.startswith("    ") for line in lines) and not in_section


def converted(paragraphs: list[str], own: frozenset[str]) -> Iterator[str]:
    """The paragraphs of a docstring in reStructuredText; examples are so already."""
    replace = partial(as_reference, own=own)
    for before, paragraph in pairwise(["", *paragraphs]):
        if paragraph.lstrip().startswith(">>>"):
            yield paragraph
        elif is_display(paragraph, before):
            yield f"::\n\n{paragraph}"
        else:
            yield QUOTED.sub(replace, paragraph)


def convert(_app: Sphinx, what: str, name: str, obj: Any, _options: Any, lines: list[str]) -> None:
    """Convert the lines of a docstring."""
    if not name.startswith("torchremat"):
        return
    paragraphs = "\n".join(lines).split("\n\n")
    lines[:] = "\n\n".join(converted(paragraphs, own_names(obj))).split("\n")
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # or napoleon takes what stands before a colon for a type


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx. Before napoleon, which makes lists of the sections."""
    app.connect("autodoc-process-docstring", convert, priority=400)
    return {"parallel_read_safe": True}
