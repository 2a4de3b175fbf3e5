"""Private parts of torch are reached in `torchremat/_torch/` alone, and patched in one file."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.source import Source, Violation, plant, read_package, refuse

PRIVATE_TORCH = re.compile(r"torch\._[a-z]|from torch\._|import torch\._")
# private attributes of torch's objects that the package has used
ATTRIBUTES = {
    "_backward_hooks",
    "_backward_pre_hooks",
    "_buffers",
    "_cdata",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_grad_fn",
    "_indices",
    "_is_view",
    "_modules",
    "_parameters",
    "_schema",
    "_values",
    "_version",
}
PATCHES = "torchremat/_torch/patches.py"


def is_torch_room(source: Source) -> bool:
    return source.path.startswith(("torchremat/_torch/", "torchremat/_torch.py"))


def find_private(source: Source) -> Iterator[Violation]:
    """What is reached through a private part of torch; comments and docstrings count too."""
    for line, text in enumerate(source.lines, 1):
        if PRIVATE_TORCH.search(text):
            yield source.violation(line, text.strip())
    for node in source.find(ast.Import, ast.ImportFrom, ast.Attribute):
        for name in _names_in(node):
            # of a chain a._b.c only the part up to the private name, which is a node of its own
            end = "$" if isinstance(node, ast.Attribute) else ""
            if re.match(r"torch\.(?:\w+\.)*_(?!_)\w+" + end, name):
                yield source.violation(node, name)
    for node in source.find(ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if node.attr in ATTRIBUTES and not own:
            yield source.violation(node, ast.unparse(node))


def _names_in(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]
    return [ast.unparse(node)]


def names_of_torch(source: Source) -> set[str]:
    """The names by which a file calls torch, or something of it."""
    found = set()
    for node in source.find(ast.Import, ast.ImportFrom):
        module = getattr(node, "module", None) or ""
        for alias in node.names:
            name = f"{module}.{alias.name}" if module else alias.name
            if name.startswith(("torch.", "torchremat._torch")) or name == "torch":
                found.add(alias.asname or alias.name.partition(".")[0])
    found.discard("torchremat")
    while True:  # `module = torch.fx` is a name of it too, and so is what is set to `module.graph`
        new = {name for name, value in _aliases(source) if _root(value) in found} - found
        if not new:
            return found
        found |= new


def _aliases(source: Source) -> Iterator[tuple[str, ast.expr]]:
    """Names that are assigned, or that a loop takes from a display, with their values."""
    for node in source.find(ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
    for node in source.find(ast.For):
        if isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Tuple | ast.List):
            yield from ((node.target.id, value) for value in node.iter.elts)


def _root(node: ast.AST) -> str | None:
    """The first name of `a.b.c`; of anything else, none."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def find_patches(source: Source) -> Iterator[Violation]:
    """Each assignment to an attribute of something of torch."""
    names = names_of_torch(source)
    for node in source.find(ast.Attribute):
        if not isinstance(node.ctx, ast.Load) and _root(node) in names:
            yield source.violation(node, f"{ast.unparse(node)} = ...")
    for node in source.find(ast.Call):
        function = ast.unparse(node.func)
        if node.args and re.search(r"(^|\.)(setattr|delattr|patch|patch\.object)$", function):
            first = node.args[0]
            of_torch = isinstance(first, ast.Constant) and str(first.value).startswith("torch.")
            if of_torch or _root(first) in names:
                yield source.violation(node, ast.unparse(node))


def violations() -> Iterator[Violation]:
    for source in read_package():
        if not is_torch_room(source):
            yield from find_private(source)
        if source.path != PATCHES:
            yield from find_patches(source)


def test_private_torch_is_reached_and_patched_in_one_place():
    refuse(violations())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# as torch._ops does", ["as torch._ops does"]),
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map"]),
        ("from torch.utils import _pytree", ["torch.utils._pytree"]),
        ("import torch\nx = torch.fx._pytree.tree_map", ["torch.fx._pytree"]),
        ("import torch\nx = torch.__version__", []),
        ("from ._torch import HigherOrderOperator", []),
        ("node.target._schema.arguments", ["node.target._schema"]),
        ("self._modules", []),
    ],
)
def test_private_names_are_found(text, expected):
    assert [v.text.removeprefix("# ") for v in find_private(plant(text))] == expected


@pytest.mark.parametrize(
    ("text", "num_found"),
    [
        ("import torch\ntorch.fx.Graph.lint = f", 1),
        ("import torch.fx as fx\ndel fx.Graph.lint", 1),
        ("from torch.utils import checkpoint as c\nsetattr(c.CheckpointFunction, 'apply', f)", 1),
        ("from torchremat._torch import Tracer\nTracer.trace += f", 1),
        ("from torchremat import _torch\n_torch.Tracer.trace = f", 1),
        ("import torch\nfor m in (torch.fx, torch.jit): m.trace = f", 1),
        ("import torch\ng = torch.fx.Graph\nh = g.node\nh.x = 1", 1),
        ("with mock.patch('torch.fx.Graph.lint', f): pass", 1),
        ("import torch\nwith patch.object(torch.fx.Graph, 'lint', f): pass", 1),
        ("import torch\nx = torch.ones(3)\nx.grad = None\nself.x = torch.fx", 0),
        ("import torchremat.remat\ntorchremat.remat.x = 1", 0),
    ],
)
def test_patches_are_found(text, num_found):
    assert len(list(find_patches(plant(text)))) == num_found
