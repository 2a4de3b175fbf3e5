"""No class name and no file name twice; functions begin with their verb."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache

import pytest

from tests.house.source import (
    FUNCTIONS,
    Source,
    Violation,
    plant,
    read_entries,
    read_package,
    refuse,
)

# a file name that several folders may have: why
SHARED_FILE_NAMES = {"__init__.py": "Python asks for it"}

# a class name that several files may have: why
SHARED_CLASS_NAMES = {
    "RematCallback": "public: each integration names its callback for a trainer so"
}

# past participles that do not end in -ed, without those that are spelled as their verb (put, split)
_IRREGULAR = """
awoken beaten become been begun bent bitten blown born borne bought bound bred broken brought built
caught chosen clung dealt done drawn driven drunk dug eaten fallen fed felt flown forbidden
forgotten fought found frozen given gone got gotten grown held hidden hung kept known laid learnt
led left lent lit lost made meant met mistaken outgrown overridden overwritten paid proven rebuilt
redone redrawn remade rewritten ridden risen said seen sent sewn shaken shown shrunk slept sold
sought spent spoken spun stolen stood struck stuck sunk swept sworn swum taken taught thought
thrown told torn undone understood unsaid unsent unspent woken withdrawn won worn wound woven
written
"""
IRREGULAR = set(_IRREGULAR.split())
# verbs and nouns that end in -ed
_VERBS = """
bed bleed breed embed exceed feed heed hundred need proceed red seed shed shred sled speed succeed
unembed wed weed
"""
VERBS = set(_VERBS.split())
# a name that others fixed: who
FIXED_NAMES: dict[str, str] = {
    "fused": "documented method of CostModel",
    "profiled": "documented method of CostModel",
}
# decorators that make a noun of a function
NOUNS = re.compile(r"(^|\.)(property|cached_property|setter|getter|deleter)$|property$")


def is_participle(name: str) -> bool:
    """Whether the first word of `name` is a past participle.

    Words end at underscores and digits: `_scattered_rows` begins with `scattered`.
    """
    first = re.match(r"_*([A-Za-z]*)", name)[1].lower()
    return first in IRREGULAR or (first.endswith("ed") and first not in VERBS and len(first) > 3)


@cache
def public_names() -> frozenset[str]:
    """What an `__all__` names or the reference documents: JAX and PyTorch fixed most of these."""
    found = {entry.rpartition(".")[2] for entry in read_entries()}
    for source in read_package():
        for node in source.tree.body:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else []
            targets += node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
                found.update(c.value for c in ast.walk(node.value) if isinstance(c, ast.Constant))
    return frozenset(found)


def find_participles(source: Source, public: frozenset[str] = frozenset()) -> Iterator[Violation]:
    for function in source.find(*FUNCTIONS):
        if function.name in public or function.name in FIXED_NAMES:
            continue
        nouns = any(NOUNS.search(ast.unparse(d)) for d in function.decorator_list)
        if not nouns and is_participle(function.name):
            yield source.violation(function, f"{function.name} begins with a participle")


def find_twice(sources: Sequence[Source]) -> Iterator[Violation]:
    """Class names and file names that stand twice."""
    classes, files = defaultdict(list), defaultdict(list)
    for source in sources:
        if source.name not in SHARED_FILE_NAMES:
            files[source.name].append((source, 1))
        for cls in source.find(ast.ClassDef):
            if cls.name not in SHARED_CLASS_NAMES:
                classes[cls.name].append((source, cls.lineno))
    for kind, places in (("file", files), ("class", classes)):
        for name, found in places.items():
            for source, line in found if len(found) > 1 else ():
                yield source.violation(line, f"{kind} {name} stands {len(found)} times")


def violations() -> Iterator[Violation]:
    yield from find_twice(read_package())
    for source in read_package():
        yield from find_participles(source, public_names())


def test_names():
    refuse(violations())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_taken", True),
        ("scattered_rows", True),
        ("__told2", True),
        ("take", False),
        ("embed_rows", False),
        ("put_back", False),
        ("is_taken", False),
        ("_is_scattered", False),
        ("redraw", False),
    ],
)
def test_participles_are_told_from_verbs(name, expected):
    assert is_participle(name) == expected


def test_participles_are_found():
    text = "class C:\n @property\n def kept(): 1\n @cached_property\n def made(): 1\n"
    text += " def given(): 1\ndef shared(): 1"
    found = find_participles(plant(text), frozenset({"shared"}))
    assert [v.text for v in found] == ["given begins with a participle"]


def test_names_that_stand_twice_are_found():
    text = "class A: 1\nclass B: 1"
    sources = [plant(text, "torchremat/a/x.py"), plant("class A: 1", "torchremat/b/x.py")]
    assert sorted({v.text for v in find_twice(sources)}) == [
        "class A stands 2 times",
        "file x.py stands 2 times",
    ]
