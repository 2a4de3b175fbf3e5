"""Names of the public interface, written as code in pages and docstrings, lead to the reference.

`tr.plan`, `torchremat.plan`, `plan(...)` in a docstring of the package, `tr.planning.plan`: all
lead to where the object is documented, under whichever name that is.
"""

import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

import torchremat

REFERENCE = Path(__file__).parents[1] / "reference"
ENTRY = re.compile(
    r"^\.\. (?:auto|py:)(?:function|class|data|exception)::\s+([\w.]+)", re.MULTILINE
)
CALL = re.compile(r"^((?:tr|torchremat)(?:\.\w+)+|\w+(?:\.\w+)*)(\(.*\))?$", re.DOTALL)


def entries() -> list[str]:
    """The full names that the pages of the reference document."""
    pages = sorted(REFERENCE.rglob("*.md"))
    return [name for page in pages for name in ENTRY.findall(page.read_text(encoding="utf-8"))]


def resolve(name: str) -> Any:
    """The object that a dotted name from `torchremat` on means; `None` if there is none."""
    found: Any = torchremat
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return None if found is torchremat else found


@cache
def _documented() -> tuple[dict[str, str], dict[int, str]]:
    """Documented names, by themselves and by the last part if it is the only such; by object."""
    names: dict[str, str] = {}
    objects: dict[int, str] = {}
    for name in entries():
        names[name] = name
        names.setdefault(name.rpartition(".")[2], name)
        found = resolve(name)
        if not isinstance(found, bool | str | ModuleType | None):
            objects.setdefault(id(found), name)
    return names, objects


def documented_name(text: str) -> str | None:
    """Where the reference has what `text` names or calls, by the name of its entry."""
    call = CALL.match(text)
    if call is None:
        return None
    name = re.sub(r"^tr\.", "torchremat.", call[1])
    names, objects = _documented()
    if name in names:
        return names[name]
    for full in (name, f"torchremat.{name}"):
        if full.startswith("torchremat.") and (found := objects.get(id(resolve(full)))):
            return found
    return None


def link_code(app: Sphinx, doctree: nodes.document) -> None:
    """Make links of the code in a page that names something with its module: `tr.plan`."""
    docname = app.env.docname
    for literal in list(doctree.findall(nodes.literal)):
        text = literal.astext()
        if isinstance(literal.parent, nodes.reference | pending_xref | nodes.title):
            continue
        name = documented_name(text) if text.startswith(("tr.", "torchremat.")) else None
        if name is None:
            continue
        link = pending_xref(
            "", refdomain="py", reftype="obj", reftarget=name, refexplicit=True, refdoc=docname
        )
        literal.replace_self(link)
        link += literal


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("doctree-read", link_code)
    return {"parallel_read_safe": True}
