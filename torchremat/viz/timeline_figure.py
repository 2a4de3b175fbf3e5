"""Timelines as figures: the bytes alive over a step, stacked by what they are."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from torchremat.core.formatting import human_bytes
from torchremat.errors import PlanError
from torchremat.planning.cost_model import CostModel
from torchremat.planning.memory.timeline import Timeline
from torchremat.viz.figure.figure import (
    ACCENT,
    INK,
    LINE,
    QUIET,
    SUFFIXES,
    Area,
    Figure,
    Line,
    Mark,
    Shape,
    Text,
)
from torchremat.viz.figure.files import PathLike, suffix_of, write_text
from torchremat.viz.figure.styles import STACK
from torchremat.viz.figure.text_labels import fit_text, width_of
from torchremat.viz.figure.ticks import TickAxis, byte_ticks
from torchremat.viz.page import page_of
from torchremat.viz.picture.build import Drawable, picture_of
from torchremat.viz.picture.picture import Picture

WIDTH, HEIGHT = 960, 460
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 66, 40
# Values that the label of the peak names, the largest, so that it hides little. By hand.
_NAMED = 5


# Longer names of values are cut, so that the label of the peak stays narrow. Chosen by hand.
_LONGEST = 36


def timeline(
    plan: Drawable | Timeline,
    path: PathLike,
    *,
    title: str | None = None,
    against: Mapping[str, Drawable | Timeline] | None = None,
    inputs: bool = False,
    cost_model: CostModel | None = None,
) -> Path:
    """Draw the bytes alive over a step, stacked by what they are, with the largest at the peak.

    Args:
        plan: a `Plan`, or anything else that `graph_html` draws; or a `Timeline`.
        path: the file: `.svg`, `.png` (with matplotlib, the extra `plot`), or `.html`, a page in
            which each step tells what is alive.
        title: the title of the picture.
        against: other steps of the same model by name, such as the plain one. The outline of each
            is drawn over the picture, its passes as wide as those of `plan`.
        inputs: whether parameters and inputs, which are always alive, are drawn below.
        cost_model: what the operators cost in seconds, for the page.

    Returns:
        The path of the picture.

    Raises:
        TypeError: if there is nothing to draw in `plan` or `against`.
        PlanError: (a `ValueError`) if one of them has no timeline: a plan that was loaded, or a
            report of a function that no one policy decides on.
        ValueError: if the suffix is another, or `against` is given for a page.
        ImportError: for `.png` without matplotlib.
        OSError: if the path cannot be written.

    >>> import tempfile, torch, torchremat as tr
    >>> found = tr.plan(lambda x: x.sin().sin().sum(), torch.ones(256), budget="100%")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     picture = timeline(found, folder + "/step.svg")
    ...     "peak 3.01 KiB" in picture.read_text(encoding="utf-8")
    True
    """
    suffix = suffix_of(path, SUFFIXES, "a timeline")
    picture = _picture_with_timeline(plan, cost_model, title)
    others = {
        name: _timeline_of(_picture_with_timeline(other, cost_model, name))
        for name, other in (against or {}).items()
    }
    if suffix == ".html" and picture.values:
        if others:
            raise ValueError("a page draws one step: write against= as .svg or .png")
        write_text(path, page_of(picture, only_timeline=True), "the timeline")
    else:
        timeline_figure(picture, inputs=inputs, against=others).write(path, "a timeline")
    return Path(path)


def _picture_with_timeline(
    plan: Drawable | Timeline, cost_model: CostModel | None, title: str | None
) -> Picture:
    if isinstance(plan, Timeline):
        picture = Picture(title or "A step", (), (), plan)
    else:
        picture = picture_of(plan, cost_model=cost_model, title=title)
    if picture.timeline is None or not picture.timeline.points:
        raise PlanError(
            f"the {type(plan).__name__} has no timeline: it has no graphs, or those of modules "
            "alone, and not of what runs between them. Give a Plan (tr.plan(f, x, budget=...)), or "
            "the report of the whole step before it is run (tr.explain(f, x))"
        )
    return picture


def timeline_figure(
    picture: Picture, *, inputs: bool = False, against: Mapping[str, Timeline] | None = None
) -> Figure:
    return _TimelineDrawing(picture, _timeline_of(picture), inputs, against or {}).figure()


def _timeline_of(picture: Picture) -> Timeline:
    assert picture.timeline is not None
    return picture.timeline


class _TimelineDrawing:
    def __init__(
        self,
        picture: Picture,
        timeline: Timeline,
        inputs: bool,
        against: Mapping[str, Timeline],
    ) -> None:
        self.picture = picture
        self.timeline = timeline
        self.against = against
        self.floor = 0
        self.bands: list[tuple[str, int]] = []
        if inputs or picture.resident_counts:
            self.bands = [(name, nbytes) for name, nbytes in picture.resident if nbytes]
            self.floor = sum(nbytes for _, nbytes in self.bands)
        self.peak = timeline.peak + self.floor
        above = 0 if picture.resident_counts else self.floor
        self.marked = [(name, nbytes + above) for name, nbytes in picture.levels]
        highest = max(self.peak, *(self.floor + other.peak for other in against.values()), 0)
        near = [nbytes for _, nbytes in self.marked if nbytes <= 1.35 * highest]
        self.y = TickAxis(0, max([highest, *near]) * 1.06 or 1, HEIGHT - BOTTOM, TOP)
        self.x = TickAxis(0, len(timeline), LEFT, WIDTH - RIGHT)
        self.columns = _columns(timeline.live, int(self.x.end - self.x.start))

    def figure(self) -> Figure:
        shapes = [
            *self.axes(),
            *self.areas(),
            *self.outlines(),
            *self.levels(),
            *self.peak_label(),
            *self.legend(),
        ]
        return Figure(WIDTH, HEIGHT, self.picture.title, tuple(shapes))

    def axes(self) -> list[Shape]:
        shapes: list[Shape] = []
        for nbytes in byte_ticks(0, self.y.high):
            y = self.y(nbytes)
            shapes.append(Line([(LEFT, y), (WIDTH - RIGHT, y)], LINE))
            shapes.append(Text(LEFT - 8, y + 4, human_bytes(nbytes), 11, "end", QUIET))
        num_forward = _num_forward(self.timeline)
        bottom = HEIGHT - 16
        shapes.append(Text(LEFT, bottom, "forward →", 12, colour=QUIET))
        if num_forward < len(self.timeline):
            x = self.x(num_forward)
            shapes.append(Line([(x, TOP - 6), (x, HEIGHT - BOTTOM + 8)], QUIET))
            shapes.append(Text(x + 6, bottom, "backward →", 12, colour=QUIET))
        count = f"{len(self.timeline)} operators"
        shapes.append(Text(WIDTH - RIGHT, bottom, count, 11, "end", QUIET))
        return shapes

    def areas(self) -> list[Shape]:
        shapes: list[Shape] = []
        if self.floor:
            top, bottom = self.y(self.floor), self.y(0)
            corners = [(LEFT, top), (WIDTH - RIGHT, top), (WIDTH - RIGHT, bottom), (LEFT, bottom)]
            note = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in self.bands)
            shapes.append(Area(corners, "resident", note))
        stacks = self.timeline.by_category()
        base = [self.floor] * len(self.columns)
        for category in STACK:
            values = [stacks[category][step] for _, _, step in self.columns]
            if not any(values):
                continue
            above = [b + v for b, v in zip(base, values, strict=True)]
            outline = [*self._steps(above), *reversed(self._steps(base))]
            shapes.append(Area(outline, category, category))
            base = above
        return shapes

    def _steps(self, heights: list[int]) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        for (first, last, _), height in zip(self.columns, heights, strict=True):
            y = self.y(height)
            if found and found[-1][1] == y:
                found[-1] = (self.x(last), y)
            else:
                found += [(self.x(first), y), (self.x(last), y)]
        return found

    def outlines(self) -> list[Shape]:
        return [
            Line(self._outline(other), INK, 1.3, dashed=number > 0)
            for number, other in enumerate(self.against.values())
        ]

    def _outline(self, other: Timeline) -> list[tuple[float, float]]:
        """The bytes of another step, its passes stretched to the width of ours."""
        num_forward = _num_forward(other)
        border, end = self.x(_num_forward(self.timeline)), self.x(len(self.timeline))

        def place(step: int) -> float:
            if step <= num_forward:
                return LEFT + (border - LEFT) * step / max(num_forward, 1)
            return border + (end - border) * (step - num_forward) / (len(other) - num_forward)

        points: list[tuple[float, float]] = []
        for first, last, step in _columns(other.live, int(end - LEFT)):
            y = self.y(other.live[step] + self.floor)
            points += [(place(first), y), (place(last), y)]
        return points

    def levels(self) -> list[Shape]:
        shapes: list[Shape] = []
        above = []
        end = (0.0, 0.0)  # of the text before: the next at about this height stands beside it
        for name, nbytes in self.marked:
            text = f"{name} {human_bytes(nbytes)}"
            if nbytes > self.y.high:
                above.append(f"↑ {text}")
                continue
            y = self.y(nbytes)
            shapes.append(Line([(LEFT, y), (WIDTH - RIGHT, y)], INK, dashed=True))
            x = end[0] + 14 if abs(y - end[1]) < 14 else LEFT + 4
            shapes.append(Text(x, y - 5, text, 11))
            end = (x + 6 * len(text), y)
        rest = "   ".join(above)
        room = WIDTH - LEFT - RIGHT - width_of(rest, 11) - 14
        title = fit_text(self.picture.title, 16, room, bold=True)
        return [
            Text(LEFT, 26, title, 16, bold=True),
            Text(WIDTH - RIGHT, 26, rest, 11, "end", QUIET),
            *shapes,
        ]

    def peak_label(self) -> list[Shape]:
        where = self.timeline.live.index(self.timeline.peak)
        x, y = self.x(where + 0.5), self.y(self.peak)
        alive = [f"{human_bytes(v.nbytes)}  {self._name(v.name)} ({v.category})"
                 for v in self.timeline.at_peak]  # fmt: skip
        if rest := self.timeline.at_peak[_NAMED:]:
            nbytes = human_bytes(sum(value.nbytes for value in rest))
            alive = [*alive[:_NAMED], f"{nbytes}  in {len(rest)} more"]
        head = f"peak {human_bytes(self.peak)} at {self._name(self.timeline.points[where].name)}"
        width = max(7.5 * len(head), *(6.1 * len(line) for line in alive)) + 14
        left = x + 14 if x + 14 + width < WIDTH - RIGHT else x - 14 - width
        top = max(y - 8, TOP)
        if self.against:  # beside the mark it would hide most of the lower step
            left, top = WIDTH - RIGHT - width, TOP + 12
        corners = [(left, top), (left + width, top), (left + width, top + 24 + 15 * len(alive)),
                   (left, top + 24 + 15 * len(alive))]  # fmt: skip
        shapes: list[Shape] = [Area(corners, "note"), Text(left + 7, top + 16, head, 12, bold=True)]
        shapes += [Text(left + 7, top + 32 + 15 * i, t, 11) for i, t in enumerate(alive)]
        if self.against:
            shapes.append(Line([(x, y), (left, top + 12)], ACCENT))
        return [*shapes, Mark(x, y, ACCENT)]

    def _name(self, name: str) -> str:
        number = self.picture.position_of(name)
        if number is None:
            return name
        value = self.picture.values[number]
        text = f"{value.module}.{value.label}" if value.module else value.label
        return text if len(text) <= _LONGEST else f"…{text[-_LONGEST:]}"

    def legend(self) -> list[Shape]:
        shapes: list[Shape] = []
        stacks = self.timeline.by_category()
        named = [category for category in STACK if any(stacks[category])]
        x = float(LEFT)
        for kind in (["resident"] if self.floor else []) + named:
            text = ", ".join(name for name, _ in self.bands) if kind == "resident" else kind
            corners = [(x, 40.0), (x + 20, 40.0), (x + 20, 52.0), (x, 52.0)]
            shapes += [Area(corners, kind), Text(x + 26, 51, text, 12, colour=QUIET)]
            x += 46 + 6.6 * len(text)
        for number, name in enumerate(self.against):
            shapes += [Line([(x, 46.0), (x + 20, 46.0)], INK, 1.3, dashed=number > 0)]
            shapes += [Text(x + 26, 51, name, 12, colour=QUIET)]
            x += 46 + 6.6 * len(name)
        return shapes


def _num_forward(timeline: Timeline) -> int:
    return sum(point.phase == "forward" for point in timeline)


def _columns(live: tuple[int, ...], most: int) -> list[tuple[int, int, int]]:
    """Steps in at most `most` columns: each its first step, its end, and the one with most bytes.

    >>> _columns((1, 5, 2, 3), 2)
    [(0, 2, 1), (2, 4, 3)]
    """
    count = min(most, len(live))
    edges = [i * len(live) // count for i in range(count + 1)]
    return [
        (first, last, max(range(first, last), key=live.__getitem__))
        for first, last in pairwise(edges)
    ]
