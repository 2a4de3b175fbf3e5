"""The names by which a file reaches private and experimental parts of PyTorch."""

import ast
import re
from collections.abc import Iterator

from tests.house.source import Source

_PRIVATE = re.compile(r"_(?!_)\w")
_UNSTABLE = re.compile(r"(^|\.)(_(?!_)|experimental\b)")


def find_names(source: Source) -> Iterator[tuple[int, str]]:
    """Line and name of each: `torch._C._swap_tensor_impl`, or `._version` of an object."""
    aliases = dict(_imports(source))
    for line, name in _imported(source):
        if _UNSTABLE.search(name):
            yield line, name
    inner = {id(n.value) for n in source.find(ast.Attribute) if isinstance(n.value, ast.Attribute)}
    for node in source.find(ast.Attribute):
        root, parts = _chain(node)
        if root == "torch" or root in aliases:
            if id(node) not in inner:
                yield from ((node.lineno, n) for n in _shorten(aliases.get(root, root), parts))
        elif _PRIVATE.match(node.attr) and root not in ("self", "cls", "sys"):
            yield node.lineno, f".{node.attr}"
    for node in source.find(ast.Call):
        if ast.unparse(node.func) in ("getattr", "hasattr", "setattr") and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and _PRIVATE.match(str(name.value)):
                yield node.lineno, f".{name.value}"


def _imported(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.find(ast.Import, ast.ImportFrom):
        for alias in node.names:
            if isinstance(node, ast.Import):
                yield node.lineno, alias.name
            elif not node.level and node.module.partition(".")[0] == "torch":
                yield node.lineno, f"{node.module}.{alias.name}"


def _imports(source: Source) -> Iterator[tuple[str, str]]:
    """The names that `from torch... import name` gives, with their full names."""
    for node in source.find(ast.ImportFrom):
        for alias in node.names:
            if not node.level and node.module.partition(".")[0] == "torch":
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _chain(node: ast.Attribute) -> tuple[str, list[str]]:
    """The first name and the attributes of `a.b.c`; no name if it begins with something else."""
    parts: list[str] = []
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        parts.insert(0, value.attr)
        value = value.value
    return (value.id if isinstance(value, ast.Name) else ""), parts


def _shorten(root: str, parts: list[str]) -> Iterator[str]:
    """`torch._C._x.y.z` as `torch._C._x.y`: to the first name after private ones."""
    is_module = root.rpartition(".")[2].replace("_C", "_c").islower()
    if _UNSTABLE.search(root) and not is_module:
        return
    names = [*root.split("."), *(p for p in parts if not p.startswith("__"))]
    unstable = [i for i, name in enumerate(names) if _UNSTABLE.search(name)]
    if unstable:
        last = max(unstable[-1] + (names[1] != "ops"), root.count("."))
        if _UNSTABLE.search(root):
            last = max(last, root.count(".") + 1)
        yield ".".join(names[: last + 1])
