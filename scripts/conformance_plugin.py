"""Part of pytest in the processes of `test_conformance.py`: adapts what the tests import.

The environment says what to do: the module to adapt, and the names in it that come from elsewhere.
"""

import ast
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from types import CodeType, ModuleType
from typing import Any


class Adapter(ast.NodeTransformer):
    """Lets names of a module come from another place. All else stays, and so do the lines.

    Args:
        names: from a full name (`torch.func.grad`) to the full name that takes its place. Names
            that are read as attributes (`torch.func.grad(f)`) and names that are imported
            (`from torch.func import grad`) are found.

    >>> tree = ast.parse("from torch.func import grad, functional_call; torch.func.grad(f)")
    >>> print(ast.unparse(Adapter({"torch.func.grad": "ours.g"}).visit(tree)))
    from ours import g as grad
    from torch.func import functional_call
    ours.g(f)
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        """Import each name from its place."""
        kept, found = [], []
        for alias in node.names:
            new = self.names.get(f"{node.module}.{alias.name}")
            if new is None or node.level:
                kept.append(alias)
                continue
            module, _, name = new.rpartition(".")
            ours = ast.ImportFrom(module, [ast.alias(name, alias.asname or alias.name)], 0)
            found.append(_put_at(node, ours))
        return [
            *found,
            *([_put_at(node, ast.ImportFrom(node.module, kept, node.level))] if kept else []),
        ]

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Read an attribute from its place."""
        new = self.names.get(ast.unparse(node)) if isinstance(node.ctx, ast.Load) else None
        if new is None:
            return self.generic_visit(node)
        return _put_at(node, ast.parse(new, mode="eval").body)


def _put_at(place: ast.AST, node: ast.AST) -> ast.AST:
    for part in ast.walk(node):
        ast.copy_location(part, place)
    return node


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module, adapted; neither reads nor writes bytecode of it."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, which has the modules that its names come from."""
        places = {new.rpartition(".")[0] for new in NAMES.values()}
        vars(module).update({place: importlib.import_module(place) for place in places})
        super().exec_module(module)

    def get_code(self, fullname: str) -> CodeType:
        """Compile the adapted module, under the name of its own file."""
        path = self.get_filename(fullname)
        tree = Adapter(NAMES).visit(ast.parse(self.get_data(path)))
        return compile(tree, path, "exec", dont_inherit=True)


class Finder:
    """Finds the module of the tests."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Have the module of the tests loaded by `Loader`."""
        if name.rpartition(".")[2] != os.path.basename(FILE).removesuffix(".py"):
            return None
        return importlib.util.spec_from_file_location(name, FILE, loader=Loader(name, FILE))


def pytest_collection_finish() -> None:
    """From here on what JAX's shim lacks skips the test that uses it."""
    if "conformance_jax" in sys.modules:
        sys.modules["conformance_jax"].collecting = False  # type: ignore[attr-defined]


NAMES: Mapping[str, str] = json.loads(os.environ.get("CONFORMANCE_NAMES", "{}"))
FILE = os.environ.get("CONFORMANCE_FILE", "")
if NAMES:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
if os.environ.get("CONFORMANCE_PROJECT") == "jax":
    import conformance_jax

    conformance_jax.install()
