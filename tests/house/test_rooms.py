"""A folder, a file, a function and a class fit into a reader's head."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from tests.house.source import FUNCTIONS, Source, Violation, plant, read_package, refuse

FILES_OF_A_FOLDER = 14
LINES_OF_A_FILE = 450
LINES_OF_A_FUNCTION = 40
METHODS_OF_A_CLASS = 20
# every error of the package stands in one file, with its docstring
LONG_FILES = {"torchremat/errors.py"}


def count_lines(function: ast.FunctionDef) -> int:
    """Lines from `def` to the last one, without those of the docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        doc = function.body[0]
        lines -= doc.end_lineno - doc.lineno + 1
    return lines


def has_paragraph(tree: ast.Module) -> bool:
    """Whether the docstring has two sentences at least before its first example."""
    text = (ast.get_docstring(tree) or "").split(">>>")[0]
    return len(re.findall(r"[.!?](?=\s|$)", text)) >= 2


def find_in_file(source: Source) -> Iterator[Violation]:
    num_lines = len(source.lines)
    if num_lines > LINES_OF_A_FILE and source.path not in LONG_FILES:
        yield source.violation(1, f"has {num_lines} lines")
    if source.name == "__init__.py" and not has_paragraph(source.tree):
        yield source.violation(1, "has no docstring of two sentences that introduces the folder")
    for function in source.find(*FUNCTIONS):
        if (lines := count_lines(function)) > LINES_OF_A_FUNCTION:
            yield source.violation(function, f"{function.name} has {lines} lines")
    for cls in source.find(ast.ClassDef):
        methods = {member.name for member in cls.body if isinstance(member, FUNCTIONS)}
        if len(methods) > METHODS_OF_A_CLASS:
            yield source.violation(cls, f"{cls.name} has {len(methods)} methods and properties")


def find_violations(sources: Sequence[Source]) -> Iterator[Violation]:
    for folder, num_files in Counter(source.folder for source in sources).items():
        if num_files > FILES_OF_A_FOLDER:
            yield Violation(folder, 0, f"has {num_files} Python files")
    for source in sources:
        yield from find_in_file(source)


def violations() -> Iterator[Violation]:
    return find_violations(read_package())


def test_rooms_are_small():
    refuse(violations())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n" * 451, ["has 451 lines"]),
        ("def f():\n" + "    x\n" * 40, ["f has 41 lines"]),
        ("def f():\n    '''" + "a\n" * 45 + "'''\n    x", []),
        (
            "class C:\n" + "".join(f"    def f{i}(): 1\n" for i in range(21)),
            ["C has 21 methods and properties"],
        ),
        ("class C:\n" + "    def f(): 1\n" * 21, []),
    ],
)
def test_large_rooms_are_found(text, expected):
    assert [v.text for v in find_violations([plant(text)])] == expected


def test_full_folders_are_found():
    sources = [plant("", f"torchremat/room/{i}.py") for i in range(15)]
    assert list(map(str, find_violations(sources))) == ["torchremat/room:0 has 15 Python files"]


@pytest.mark.parametrize(
    ("text", "num_found"),
    [
        ("One.", 1),
        ("One.\n\nTwo.", 0),
        ("One.\n\n>>> 1\n1\n\nTwo. Three.", 1),
        ("One. Two.", 0),
        ("One.\nTwo.\n\nMore.", 0),
    ],
)
def test_rooms_without_introduction_are_found(text, num_found):
    face = plant(f'"""{text}"""', "torchremat/a/__init__.py")
    assert len(list(find_violations([face]))) == num_found
