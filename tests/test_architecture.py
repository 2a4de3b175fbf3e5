"""The page on architecture: its picture is what the imports say, its files and functions exist."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.draw_architecture import Room, Tower, find_first_sentence, find_imports

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchremat"
PAGE = ROOT / "docs" / "architecture.md"
# `remat/op/remat_op.py`, `remat/op/`, `remat/checkpointed.py:Checkpointed.prepare`
REFERENCE = re.compile(r"`([\w./-]+(?:\.py|/))(?::([\w.]+))?`")
ROOMS = sorted(path for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)


def find_missing(text: str, *folders: Path) -> list[str]:
    """The references to a file, or to a name in it, that lead nowhere from any of `folders`."""
    missing = []
    for path, name in REFERENCE.findall(text):
        found = [folder / path for folder in folders if (folder / path).exists()]
        if not found or (name and not has_name(found[0], name)):
            missing.append(f"{path}:{name}" if name else path)
    return missing


def has_name(file: Path, name: str) -> bool:
    scope: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    for part in name.split("."):
        inside = [child for node in scope for child in ast.iter_child_nodes(node)]
        scope = [node for node in inside if part in names_of(node)]
    return bool(scope)


def names_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    return [getattr(node, "name", "")]


@pytest.mark.parametrize("script", ["draw_architecture.py", "list_private_parts.py"])
def test_what_a_script_makes_of_the_source_is_of_today(script):
    command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_files_and_functions_of_the_page_exist():
    assert find_missing(PAGE.read_text(encoding="utf-8"), PACKAGE, ROOT) == []


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: str(path.parent.relative_to(PACKAGE)))
def test_the_files_that_a_room_names_exist(room):
    text = ast.get_docstring(ast.parse(room.read_text(encoding="utf-8")))
    assert find_missing(text, room.parent, ROOT) == []


def test_the_files_that_the_example_names_exist():
    text = (ROOT / "examples" / "autodidax.py").read_text(encoding="utf-8")
    paths = re.findall(r"torchremat/[\w/]+\.py", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_missing_file_or_function_is_found():
    text = "`config.py` `no.py` `remat/` `config.py:least_offload_nbytes` `config.py:nothing`"
    assert find_missing(text, PACKAGE) == ["no.py", "config.py:nothing"]


def test_imports_count_wherever_they_stand():
    text = (
        "from p import a\nfrom p.b.c import d\nimport q.e\n"
        "def f():\n    import p.g\nif TYPE_CHECKING:\n    from p.h import i\n"
    )
    assert find_imports(ast.parse(text), "p") == {"a", "b", "g", "h"}


def make_tower(**uses: str) -> Tower:
    return Tower({n: Room(n, "", 1, (), frozenset(names)) for n, names in uses.items()})


def test_a_floor_is_the_length_of_the_longest_path():
    tower = make_tower(a="bcd", b="cd", c="d", d="")
    assert [tower.floor_of(name) for name in "abcd"] == [3, 2, 1, 0]
    assert tower.order == ["a", "b", "c", "d"]
    assert tower.find_supports("a") == {"b"}


def test_a_circle_is_an_error():
    with pytest.raises(ValueError, match="in a circle: b -> c -> b"):
        make_tower(a="b", b="c", c="b").floor_of("a")


def test_the_first_sentence_has_no_marks():
    assert find_first_sentence("It runs `f`, as `jax.jit`.\nThen it stops.") == (
        "It runs f, as jax.jit."
    )
