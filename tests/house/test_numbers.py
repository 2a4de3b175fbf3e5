"""A module-level number stands above its first use, with its reason."""

import ast
from collections.abc import Iterator

import pytest

from tests.house.source import Source, Violation, plant, read_package, refuse

WORDS_OF_A_REASON = 5


def is_number(node: ast.expr | None, numbers: set[str]) -> bool:
    """Whether `node` is a number, or arithmetic of numbers and of the names in `numbers`."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.Name(id=name):
            return name in numbers
        case ast.UnaryOp(operand=operand):
            return is_number(operand, numbers)
        case ast.BinOp(left=left, right=right):
            return is_number(left, numbers) and is_number(right, numbers)
    return False


def reason_of(source: Source, index: int) -> str:
    """What is said of the statement at `index`: above it, at the ends of its lines, or below."""
    node = source.tree.body[index]
    first = node.lineno
    while source.is_comment(first - 1):
        first -= 1
    lines = range(first, node.end_lineno + 1)
    words = [source.comments[line] for line in lines if line in source.comments]
    match source.tree.body[index + 1 : index + 2]:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            words.append(text)
    return " ".join(words)


def find_violations(source: Source) -> Iterator[Violation]:
    numbers: set[str] = set()
    uses: dict[str, int] = {}
    for use in source.find(ast.Name):
        if isinstance(use.ctx, ast.Load):
            uses[use.id] = min(use.lineno, uses.get(use.id, use.lineno))
    for index, node in enumerate(source.tree.body):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if not is_number(node.value, numbers):
                    continue
            case _:
                continue
        numbers.add(name)
        if (use := uses.get(name, node.lineno)) < node.lineno:
            yield source.violation(node, f"{name} stands below its first use, in line {use}")
        if len(reason_of(source, index).split()) < WORDS_OF_A_REASON:
            yield source.violation(node, f"{name} has no reason")


def violations() -> Iterator[Violation]:
    for source in read_package():
        yield from find_violations(source)


def test_numbers_have_reasons():
    refuse(violations())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("_A = 3", ["_A has no reason"]),
        ("_A: int = -1.5  # a reason of some words", []),
        ("_A = 1 << 20  # too short", ["_A has no reason"]),
        ("# a reason of some words,\n# on two lines\n_A = 3", []),
        ("# a reason of some words, but not here\n\n_A = 3", ["_A has no reason"]),
        ("_A = 3\n'''A reason of some words below.'''", []),
        (
            "def f(): return _A\n_A = 3  # a reason of some words",
            ["_A stands below its first use, in line 1"],
        ),
        ("_A = 2  # a reason of some words\n_B = 2 * _A", ["_B has no reason"]),
        ("_A = True\n_B = 'text'\n_C = f(3)", []),
    ],
)
def test_numbers_without_reasons_are_found(text, expected):
    assert [v.text for v in find_violations(plant(text))] == expected
