"""Rules of the project that no linter knows."""

import ast
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchremat"
PRIVATE_TORCH = re.compile(r"torch\._[a-z]|from torch\._|import torch\._")
SUFFIXES = {".py", ".md", ".sh", ".cfg", ".toml", ".yaml"}


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of what is reached through a private part of torch.

    Deeper than PRIVATE_TORCH, which sees comments and docstrings too: `torch.utils._x` counts here.
    """
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            # of a chain a._b.c only the part up to the private name, which is a node of its own
            end = "$" if isinstance(node, ast.Attribute) else ""
            if re.match(r"torch\.(?:\w+\.)*_(?!_)\w+" + end, name):
                yield node.lineno, name


def undocumented(tree: ast.Module) -> list[str]:
    """Names of the public module-level functions and classes without a docstring."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [
        node.name
        for node in tree.body
        if isinstance(node, kinds) and node.name[0] != "_" and not ast.get_docstring(node)
    ]


def machine_paths(text: str, roots: set[Path]) -> list[str]:
    """Lines of `text` with a path under one of `roots`."""
    prefixes = [f"{root}/" for root in roots]
    return [line for line in text.splitlines() if any(prefix in line for prefix in prefixes)]


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def text_files() -> list[Path]:
    folders = [".ci", "docs", "examples", "scripts", "tests", "torchremat"]
    found = [path for path in ROOT.iterdir() if path.is_file()]
    found += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for path in found if path.suffix in SUFFIXES or path == ROOT / ".ci" / "run"]


def test_private_torch_is_reached_in_one_file():
    found = []
    for path in package_files():
        if path == PACKAGE / "_torch.py":
            continue
        text = path.read_text(encoding="utf-8")
        lines = [i for i, line in enumerate(text.splitlines(), 1) if PRIVATE_TORCH.search(line)]
        found += [f"{path.relative_to(ROOT)}:{i}" for i in lines]
        found += [
            f"{path.relative_to(ROOT)}:{i} {name}" for i, name in private_names(ast.parse(text))
        ]
    assert found == []


def test_public_names_have_docstrings():
    found = [
        f"{path.relative_to(ROOT)} {name}"
        for path in package_files()
        for name in undocumented(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_no_machine_paths():
    # a checkout in the temporary directory or at the root would make every such path count
    roots = {ROOT.parent, Path.home()} - {Path("/"), Path(tempfile.gettempdir())}
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in text_files()
        for line in machine_paths(path.read_text(encoding="utf-8"), roots)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch._ops", [(1, "torch._ops")]),
        ("from torch.utils._pytree import tree_map", [(1, "torch.utils._pytree.tree_map")]),
        ("from torch.utils import _pytree", [(1, "torch.utils._pytree")]),
        ("import torch\nx = torch.fx._pytree.tree_map", [(2, "torch.fx._pytree")]),
        ("import torch\nx = torch.__version__", []),
        ("from ._torch import HigherOrderOperator", []),
    ],
)
def test_private_names_are_found(source, expected):
    assert list(private_names(ast.parse(source))) == expected


def test_undocumented_is_found():
    assert undocumented(ast.parse("def f(): 1\ndef _g(): 1\nclass C:\n 'doc'\n")) == ["f"]


def test_machine_paths_are_found():
    text = "see /a/b/c\n/usr/bin/env bash\n/a/bc"
    assert machine_paths(text, {Path("/a/b")}) == ["see /a/b/c"]
