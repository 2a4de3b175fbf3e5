"""No text of the project names a path of the machine that it was written on."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import ROOT, Violation, refuse

FOLDERS = [".ci", "docs", "examples", "scripts", "tests", "torchremat"]
SUFFIXES = {".py", ".md", ".sh", ".cfg", ".toml", ".yaml"}


def find_paths(path: str, text: str, roots: set[Path]) -> Iterator[Violation]:
    """Lines of `text` with a path under one of `roots`."""
    for number, line in enumerate(text.splitlines(), 1):
        if any(f"{root}/" in line for root in roots):
            yield Violation(path, number, line)


def text_files() -> list[Path]:
    found = [path for path in ROOT.iterdir() if path.is_file()]
    found += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for path in found if path.suffix in SUFFIXES or path == ROOT / ".ci" / "run"]


def violations() -> Iterator[Violation]:
    # a checkout in the temporary directory or at the root would make every such path count
    roots = {ROOT.parent, Path.home()} - {Path("/"), Path(tempfile.gettempdir())}
    for path in text_files():
        yield from find_paths(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"), roots)


def test_no_machine_paths():
    refuse(violations())


def test_machine_paths_are_found():
    found = find_paths("x.md", "see /a/b/c\n/usr/bin/env bash\n/a/bc", {Path("/a/b")})
    assert list(map(str, found)) == ["x.md:1 see /a/b/c"]
