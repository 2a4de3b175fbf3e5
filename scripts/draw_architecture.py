"""Draw the rooms of the package, and who uses whom, from the imports in its files.

    python scripts/draw_architecture.py           write docs/_static/architecture.svg
    python scripts/draw_architecture.py --check   exit with 1 if that picture differs

A room is a folder of `torchremat/`, or a file beside the folders. Its floor is one above the
highest room that it imports from, so it uses only rooms below. Imports inside functions and under
`TYPE_CHECKING` count too. The picture has no date: equal imports give equal bytes.
"""

import argparse
import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchremat"
PICTURE = ROOT / "docs" / "_static" / "architecture.svg"

# --- rooms ---------------------------------------------------------------------------------------

# These two import nearly every room for the user: their rows would be full of dots.
LEFT_OUT = {"__init__", "__main__"}


@dataclass(frozen=True)
class Room:
    """A folder or a file of the package, with the rooms that it imports from."""

    name: str
    sentence: str
    num_files: int | None
    """`None` for a file."""
    inner: tuple[str, ...]
    """The folders directly inside."""
    uses: frozenset[str]


def read_rooms(package: Path) -> dict[str, Room]:
    """All rooms of a package, by name."""
    paths = [path.parent for path in package.glob("*/__init__.py")]
    paths += [path for path in package.glob("*.py") if path.stem not in LEFT_OUT]
    names = {path.stem for path in paths}
    return {path.stem: read_room(path, names) for path in sorted(paths)}


def read_room(path: Path, names: set[str]) -> Room:
    """One room; what it imports counts where it is among `names`."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    face = trees[files.index(path / "__init__.py")] if path.is_dir() else trees[0]
    uses = {name for tree in trees for name in find_imports(tree, path.parent.name)}
    return Room(
        path.stem,
        find_first_sentence(ast.get_docstring(face) or ""),
        len(files) if path.is_dir() else None,
        tuple(inner.parent.name for inner in sorted(path.glob("*/__init__.py"))),
        frozenset(uses & names - {path.stem}),
    )


def find_imports(tree: ast.Module, package: str) -> set[str]:
    """The names directly below `package` that a file imports, or imports from."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            continue
        parts = [target.split(".") for target in targets]
        found |= {names[1] for names in parts if names[0] == package and len(names) > 1}
    return found


def find_first_sentence(text: str) -> str:
    """The first sentence of a docstring, without marks of code."""
    paragraph = " ".join(text.partition("\n\n")[0].split()).replace("`", "")
    sentence, dot, _ = paragraph.partition(". ")
    return sentence + dot.strip()


@dataclass(frozen=True)
class Tower:
    """Rooms with their floors."""

    rooms: dict[str, Room]
    _floors: dict[str, int] = field(default_factory=dict)

    def floor_of(self, name: str, above: tuple[str, ...] = ()) -> int:
        """The length of the longest path of imports that begins at the room.

        Raises `ValueError` if rooms import one another in a circle.
        """
        if name in above:
            circle = " -> ".join([*above[above.index(name) :], name])
            raise ValueError(f"rooms import one another in a circle: {circle}")
        if name not in self._floors:
            below = [self.floor_of(used, (*above, name)) for used in self.rooms[name].uses]
            self._floors[name] = 1 + max(below, default=-1)
        return self._floors[name]

    @cached_property
    def order(self) -> list[str]:
        """The rooms from the top floor to the ground; on one floor folders before files."""
        rooms = self.rooms.values()
        keys = {r.name: (-self.floor_of(r.name), r.num_files is None, r.name) for r in rooms}
        return sorted(self.rooms, key=keys.__getitem__)

    @cached_property
    def used(self) -> list[str]:
        """The rooms that another one uses, from the ground up."""
        used = {name for room in self.rooms.values() for name in room.uses}
        return [name for name in reversed(self.order) if name in used]

    def reach(self, name: str) -> set[str]:
        """The rooms that a room uses, directly or through others."""
        uses = self.rooms[name].uses
        return set(uses).union(*map(self.reach, uses))

    def find_supports(self, name: str) -> set[str]:
        """The rooms that a room stands on: it uses them, and nothing else that it uses does."""
        uses = self.rooms[name].uses
        return set(uses).difference(*map(self.reach, uses))


# --- picture -------------------------------------------------------------------------------------

# Lengths are pixels of a page that shows the picture 800 px wide.
WIDTH, MARGIN, PAD, LINE = 800, 16, 7, 15
X_FLOOR, X_NAME, X_SENTENCE, X_GRID = 34, 54, 208, 496
COLUMN = 14  # dots of 8 px stay apart
LETTERS = 46  # of 12 px in a line of the sentence: some 260 px in Arial
MONO_LETTER = 6.1  # of 10 px

INK, GREY, HAIR, BAND = "#1c2733", "#66727f", "#d5dce3", "#f3f6f9"
STRONG, FAINT = "#0b5c8a", "#a9cde2"  # the blue of the pages, and a tint of it
SANS = "-apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
STYLE = f"""
text {{ font-family: {SANS}; font-size: 12px; fill: {INK}; }}
.room {{ font-family: {MONO}; font-size: 13px; font-weight: 600; }}
.file {{ font-family: {MONO}; font-size: 11px; }}
.inner {{ font-family: {MONO}; font-size: 10px; fill: {GREY}; }}
.small {{ font-size: 10.5px; fill: {GREY}; }}
.floor {{ font-size: 14px; fill: {GREY}; text-anchor: middle; }}
path {{ stroke: {HAIR}; fill: none; }}
"""


@dataclass(frozen=True)
class Row:
    """The place of a room in the picture."""

    room: Room
    top: int
    sentence: list[str]
    inner: list[str]

    @classmethod
    def of(cls, room: Room, top: int) -> "Row":
        """The row of a room, from a height downward."""
        return cls(room, top, wrap_evenly(room.sentence), wrap("  ".join(room.inner), LETTERS))

    @property
    def bottom(self) -> int:
        """Where the next row begins."""
        least = 1 if self.room.num_files is None else 2
        return self.top + 2 * PAD + LINE * max(len(self.sentence) + len(self.inner), least)

    @property
    def middle(self) -> float:
        """The height of the dots."""
        return (self.top + self.bottom) / 2


def wrap_evenly(text: str) -> list[str]:
    """The lines of a text, as few as can be and about as long as one another."""
    fewest = len(wrap(text, LETTERS))
    widths = range(1, LETTERS + 1)
    return next((lines for n in widths if len(lines := wrap(text, n)) <= fewest), [])


def draw(tower: Tower) -> str:
    """The picture as SVG."""
    rows: dict[str, Row] = {}
    top = MARGIN
    for name in tower.order:
        rows[name] = Row.of(tower.rooms[name], top)
        top = rows[name].bottom
    height = top + MARGIN
    columns = {name: X_GRID + COLUMN * i + 12 for i, name in enumerate(tower.used)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#fff"/>',
        *draw_floors(tower, rows),
        *(part for row in rows.values() for part in draw_words(row)),
        *(part for name in rows for part in draw_line(rows, columns, name)),
        *(part for row in rows.values() for part in draw_dots(tower, row, columns)),
        *draw_legend(height),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def draw_floors(tower: Tower, rows: dict[str, Row]) -> Iterable[str]:
    """The number of each floor, and a band behind every second one."""
    for floor in sorted({tower.floor_of(name) for name in rows}):
        on_it = [row for name, row in rows.items() if tower.floor_of(name) == floor]
        top, bottom = on_it[0].top, on_it[-1].bottom
        if floor % 2 == 0:
            size = f'width="{WIDTH - 2 * MARGIN}" height="{bottom - top}"'
            yield f'<rect x="{MARGIN}" y="{top}" {size} rx="4" fill="{BAND}"/>'
        yield draw_text("floor", X_FLOOR, (top + bottom) / 2 + 5, str(floor))


def draw_words(row: Row) -> Iterable[str]:
    """The name, the number of files, the sentence, and the folders inside."""
    room, base = row.room, row.top + PAD + 11
    if room.num_files is None:
        yield draw_text("file", X_NAME, base, f"{room.name}.py")
    else:
        yield draw_text("room", X_NAME, base, f"{room.name}/")
        count = "1 file" if room.num_files == 1 else f"{room.num_files} files"
        yield draw_text("small", X_NAME, base + LINE, count)
    for line in row.sentence:
        yield draw_text("", X_SENTENCE, base, line)
        base += LINE
    for line in row.inner:
        yield draw_text("inner", X_SENTENCE, base, line)
        base += LINE


def draw_line(rows: dict[str, Row], columns: dict[str, int], name: str) -> Iterable[str]:
    """The line of a room: along its row and, if it is used, up its column to the last user."""
    row = rows[name]
    start = f"M{X_GRID} {row.middle}"
    if name in columns:
        x = columns[name]
        highest = min(other.middle for other in rows.values() if name in other.room.uses)
        yield f'<path d="{start}H{x}V{highest}"/>'
        yield draw_square(x, row.middle)
        if x + 9 + MONO_LETTER * len(name) < WIDTH - MARGIN:  # else the row alone has the name
            yield draw_text("inner", x + 9, row.middle + 3.5, name)
    elif row.room.uses:
        yield f'<path d="{start}H{max(columns[used] for used in row.room.uses)}"/>'


def draw_dots(tower: Tower, row: Row, columns: dict[str, int]) -> Iterable[str]:
    """A dot for each room that the one of the row uses."""
    supports = tower.find_supports(row.room.name)
    for used in sorted(row.room.uses):
        yield draw_dot(columns[used], row.middle, STRONG if used in supports else FAINT)


def draw_legend(height: int) -> Iterable[str]:
    """The meaning of squares and dots, in the corner that stays empty."""
    x, y = 616, height - 74
    yield draw_square(x, y)
    yield draw_text("small", x + 11, y + 4, "a room, used along its column")
    yield draw_dot(x, y + 18, STRONG)
    yield draw_text("small", x + 11, y + 22, "the room of the row stands on it")
    yield draw_dot(x, y + 36, FAINT)
    yield draw_text("small", x + 11, y + 40, "and also uses it")


def draw_text(kind: str, x: float, y: float, text: str) -> str:
    """A line of text that begins at a point."""
    attributes = f'class="{kind}" x="{x}" y="{y}"' if kind else f'x="{x}" y="{y}"'
    spaced = escape(text).replace("  ", "\N{NO-BREAK SPACE} ")
    return f"<text {attributes}>{spaced}</text>"


def draw_dot(x: float, y: float, colour: str) -> str:
    """A dot round a point."""
    return f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>'


def draw_square(x: float, y: float) -> str:
    """A small square round a point."""
    return f'<rect x="{x - 4}" y="{y - 4}" width="8" height="8" rx="1.5" fill="{GREY}"/>'


def main() -> None:
    """Write the picture, or check it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare; exit with 1 if stale")
    is_check = parser.parse_args().check
    drawn = draw(Tower(read_rooms(PACKAGE)))
    if not is_check:
        PICTURE.write_text(drawn, encoding="utf-8")
    elif not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != drawn:
        sys.exit(f"{PICTURE.relative_to(ROOT)} is stale: run python scripts/draw_architecture.py")


if __name__ == "__main__":
    main()
