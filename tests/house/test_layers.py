"""No circle between the files of the package, nor between its folders at depth 1, 2 and 3.

Every import counts: those for type checkers, those within functions, and `import_module("...")`.
Two decisions keep `__init__.py` from making circles that no reader would see:

- `from torchremat.room import name`, where the room's `__init__.py` has `name` from another file,
  counts as an import of that file;
- between folders, what an `__init__.py` imports from its own folder does not count: it is the
  folder's face, and what stands below the face need not know it.

import-linter checks which folder lies above which (`setup.cfg`).
"""

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.house.source import FUNCTIONS, Source, Violation, plant, read_package, refuse

# (importing module, imported module): why it imports upward. Six at most, each within a function.
LAZY_UPWARD = {
    ("torchremat.planning.plan", "torchremat.viz"): "Plan.to_html draws the plan, as viz does",
}


class Import(NamedTuple):
    source: Source
    line: int
    target: Source


class Modules:
    """The files by module name, and what their imports mean."""

    def __init__(self, sources: Sequence[Source]):
        self.by_name = {source.module: source for source in sources}

    def imports(self) -> list[Import]:
        """Every import of a file of the package by another one."""
        found = [
            Import(source, line, target)
            for source in self.by_name.values()
            for line, module, name in _statements(source)
            if (target := self._resolve(module, name)) and target is not source
        ]
        found = list(dict.fromkeys(found))  # a statement may bring several names of one file
        return [i for i in found if (i.source.module, i.target.module) not in LAZY_UPWARD]

    def _resolve(self, module: str, name: str | None, seen: tuple[str, ...] = ()) -> Source | None:
        """The file that defines `name` of `module`."""
        source = self.by_name.get(module)
        if source is None or name is None or module in seen:
            return source
        if source.name == "__init__.py":
            for _, origin, given in _statements(source, top_level=True):
                if given == name and origin != module:
                    return self._resolve(origin, given, (*seen, module))
        return self.by_name.get(f"{module}.{name}", source)


def _statements(source: Source, top_level: bool = False) -> Iterator[tuple[int, str, str | None]]:
    """Line, module and name of each import of something of the package."""
    everywhere = source.find(ast.Import, ast.ImportFrom, ast.Call)
    for node in source.tree.body if top_level else everywhere:
        if isinstance(node, ast.Import):
            found = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(source, node)
            found = [(module, alias.name) for alias in node.names]
        else:
            found = _dynamic(node)
        for module, name in found:
            if module.partition(".")[0] == "torchremat":
                yield node.lineno, module, name


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = source.folder.replace("/", ".").rsplit(".", node.level - 1)[0]
    return f"{package}.{node.module}" if node.module else package


def _dynamic(node: ast.AST) -> list[tuple[str, None]]:
    """The module of `import_module("torchremat.x")`."""
    if not isinstance(node, ast.Call) or not node.args:
        return []
    first = node.args[0]
    name = ast.unparse(node.func).rpartition(".")[2]
    if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
        return [(str(first.value), None)]
    return []


def place_at(source: Source, depth: int) -> str:
    """The folder of a file at most `depth` folders deep; the file itself at the top."""
    folders = source.folder.split("/")[1:]
    return "/".join(folders[:depth]) if folders else source.name


def find_circles(edges: set[tuple[str, str]]) -> list[set[str]]:
    """The sets of places that lead to each other."""
    after: dict[str, set[str]] = {}
    for start, end in edges:
        after.setdefault(start, set()).add(end)
    reached = {start: _reach(after, start) for start in after}
    circles = []
    for start in sorted(after):
        circle = {end for end in reached[start] if start in reached.get(end, ())}
        if circle and circle not in circles:
            circles.append(circle)
    return circles


def _reach(after: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = after.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def find_violations(sources: Sequence[Source]) -> Iterator[Violation]:
    """Each import that is part of a circle."""
    imports = Modules(sources).imports()
    yield from _in_circles([(i, i.source.path, i.target.path) for i in imports], "files")
    for depth in (1, 2, 3):
        placed = [
            (i, place_at(i.source, depth), place_at(i.target, depth))
            for i in imports
            if not (
                i.source.name == "__init__.py" and i.target.path.startswith(f"{i.source.folder}/")
            )
        ]
        yield from _in_circles(placed, f"folders at depth {depth}")


def _in_circles(placed: list[tuple[Import, str, str]], kind: str) -> Iterator[Violation]:
    placed = [(i, start, end) for i, start, end in placed if start != end]
    for circle in find_circles({(start, end) for _, start, end in placed}):
        for found, start, end in placed:
            if start in circle and end in circle:
                around = f"{kind}: {start} -> {end} in a circle of {len(circle)}"
                yield found.source.violation(found.line, around)


def violations() -> Iterator[Violation]:
    return find_violations(read_package())


def test_no_circles():
    refuse(violations())


def test_upward_imports_are_few_and_lazy():
    assert len(LAZY_UPWARD) <= 6
    modules = {source.module: source for source in read_package()}
    for importer, imported in LAZY_UPWARD:
        source = modules[importer]
        functions = [(f.lineno, f.end_lineno) for f in source.find(*FUNCTIONS)]
        lines = [line for line, module, _ in _statements(source) if module == imported]
        assert lines, f"{importer} imports {imported} no more"
        assert all(any(a <= line <= b for a, b in functions) for line in lines)


def _find(**texts: str) -> list[str]:
    sources = [plant(text, path.replace("__", "/") + ".py") for path, text in texts.items()]
    sources += [plant("", "torchremat/__init__.py")]
    return [str(v) for v in find_violations(sources)]


def test_circles_are_found():
    lazy = "def f():\n    from torchremat.a.x import y"
    typed = "if TYPE_CHECKING:\n    from torchremat.a.y import y"
    found = _find(torchremat__a__x=typed, torchremat__a__y=lazy)
    assert found == [
        "torchremat/a/x.py:2 files: torchremat/a/x.py -> torchremat/a/y.py in a circle of 2",
        "torchremat/a/y.py:2 files: torchremat/a/y.py -> torchremat/a/x.py in a circle of 2",
    ]


def test_circles_of_folders_are_found():
    found = _find(
        torchremat__a__deep__x="from torchremat.a.other.y import z",
        torchremat__a__other__y="",
        torchremat__a__other__z="import_module('torchremat.a.deep.x')",
    )
    assert [text.partition(" in ")[0] for text in found] == [
        f"torchremat/{start}.py:1 folders at depth {depth}: {where}"
        for depth in (2, 3)
        for start, where in [
            ("a/deep/x", "a/deep -> a/other"),
            ("a/other/z", "a/other -> a/deep"),
        ]
    ]


def test_a_name_of_a_package_is_in_the_file_that_defines_it():
    sources = [
        plant("from torchremat.a.x import name", "torchremat/a/__init__.py"),
        plant("name = 1", "torchremat/a/x.py"),
        plant("from torchremat.a import name", "torchremat/b.py"),
    ]
    assert ("torchremat/b.py", "torchremat/a/x.py") in {
        (i.source.path, i.target.path) for i in Modules(sources).imports()
    }
    assert list(find_violations(sources)) == []
