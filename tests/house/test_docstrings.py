"""Public functions and classes of a module say what they are for."""

import ast
from collections.abc import Iterator

from tests.house.source import FUNCTIONS, Source, Violation, plant, read_package, refuse


def find_undocumented(source: Source) -> Iterator[Violation]:
    """Public module-level functions and classes without a docstring."""
    for node in source.tree.body:
        public = isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name[0] != "_"
        if public and not ast.get_docstring(node):
            yield source.violation(node, f"{node.name} has no docstring")


def violations() -> Iterator[Violation]:
    for source in read_package():
        yield from find_undocumented(source)


def test_public_names_have_docstrings():
    refuse(violations())


def test_undocumented_names_are_found():
    found = find_undocumented(plant("def f(): 1\ndef _g(): 1\nclass C:\n 'doc'\n"))
    assert list(map(str, found)) == ["torchremat/room/planted.py:1 f has no docstring"]
