"""Shared by the rules: the files of the package, each parsed once, and how a violation reads."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ENTRY = re.compile(r"^\.\. (?:auto|py:)(?:function|class|data|exception)::\s+([\w.]+)", re.M)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


class Violation(NamedTuple):
    """One place that breaks a rule."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.text}"


@dataclass(frozen=True, eq=False)
class Source:
    """A file, or the text of one that a test plants; `path` is relative to the repository."""

    path: str
    text: str

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def _by_kind(self) -> dict[type, list[Any]]:
        found = defaultdict(list)
        for node in ast.walk(self.tree):
            found[type(node)].append(node)
        return found

    def find(self, *kinds: type) -> list[Any]:
        """All nodes of these kinds, wherever they stand."""
        return [node for kind in kinds for node in self._by_kind[kind]]

    @cached_property
    def comments(self) -> dict[int, str]:
        """Comments by line, without the `#`."""
        if "#" not in self.text:
            return {}
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {t.start[0]: t.string.lstrip("#! ") for t in tokens if t.type == tokenize.COMMENT}

    def is_comment(self, line: int) -> bool:
        """Whether nothing but a comment stands on `line`."""
        return line in self.comments and self.lines[line - 1].lstrip().startswith("#")

    def docstrings(self) -> Iterator[tuple[Any, ast.Constant]]:
        """Each documented module, class or function with the node of its docstring."""
        for node in self.find(*DOCUMENTED):
            if ast.get_docstring(node, clean=False) is not None:
                yield node, node.body[0].value

    def attribute_docstrings(self) -> Iterator[ast.Constant]:
        """The text below each field, constant or attribute of `self` that has one."""
        for owner in self.find(*DOCUMENTED):
            for pair in pairwise(owner.body):
                match pair:
                    case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str()) as text):
                        yield text

    def violation(self, where: ast.AST | int, text: str) -> Violation:
        return Violation(self.path, where if isinstance(where, int) else where.lineno, text)


def plant(text: str, path: str = "torchremat/room/planted.py") -> Source:
    """A source for the tests of a rule."""
    return Source(path, text)


@cache
def read_package() -> tuple[Source, ...]:
    """Every Python file of the package, in order of its path."""
    paths = sorted((ROOT / "torchremat").rglob("*.py"))
    return tuple(Source(p.relative_to(ROOT).as_posix(), p.read_text("utf-8")) for p in paths)


@cache
def read_entries() -> list[str]:
    """The full names that the pages of the reference document."""
    pages = sorted((ROOT / "docs" / "reference").rglob("*.md"))
    return [name for page in pages for name in _ENTRY.findall(page.read_text("utf-8"))]


def refuse(violations: Iterable[Violation]) -> None:
    """Fail with every violation on a line of its own."""
    found = sorted(violations)
    assert not found, f"{len(found)} violations\n" + "\n".join(map(str, found))
