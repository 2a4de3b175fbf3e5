"""Curves of time against peak memory as figures: the planner's, with policies and peers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchremat.core.formatting import human_bytes, human_seconds
from torchremat.errors import ArgumentTypeError, ArgumentValueError
from torchremat.planning.plan import Pareto, ParetoPoint
from torchremat.viz.figure.figure import (
    ACCENT,
    INK,
    LINE,
    QUIET,
    SUFFIXES,
    Figure,
    Line,
    Mark,
    Shape,
    Text,
)
from torchremat.viz.figure.files import PathLike, suffix_of
from torchremat.viz.figure.text_labels import TextLabels, fit_text
from torchremat.viz.figure.ticks import TickAxis, byte_ticks, decimal_ticks

WIDTH, HEIGHT = 800, 480
LEFT, RIGHT, TOP, BOTTOM = 90, 40, 60, 60
CURVE, BOUND = "#2f7fc1", "#9ab8d3"
_PEERS = ("#dd6f4f", "#3b4654", "#8a5fb0", "#4b9a72", "#a9791c")
_SHAPES = ("square", "diamond", "disc")

PointLike = ParetoPoint | tuple[float, float]
"""A point: peak bytes, and the seconds that are added."""


def pareto(
    points: Pareto | Iterable[PointLike],
    path: PathLike,
    *,
    named: Mapping[str, PointLike] | None = None,
    title: str = "Time against peak memory",
) -> Path:
    """Draw the time that recomputation adds against peak memory.

    Args:
        points: the curve: the result of `planning.pareto`, or pairs (peak bytes, added seconds).
        path: the file: `.svg`, `.png` (with matplotlib, the extra `plot`) or `.html`.
        named: points of their own, by name: policies, or other libraries.
        title: what stands above.

    The knee is marked: the point farthest below the line from one end of the curve to the other. A
    thin line below the curve is the lower bound for any plan, where that is known.

    Returns:
        The path of the picture.

    Raises:
        TypeError: if a point is not a pair of numbers and no `ParetoPoint`.
        ValueError: if there are no points, or the suffix is another.
        ImportError: for `.png` without matplotlib.
        OSError: if the path cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     named = {"full": (2**29, 0.02)}
    ...     picture = pareto([(2**30, 0.0), (2**29, 0.012)], folder + "/p.svg", named=named)
    ...     "full" in picture.read_text(encoding="utf-8")
    True
    """
    suffix_of(path, SUFFIXES, "a curve")
    pareto_figure(points, named or {}, title).write(path, "a curve")
    return Path(path)


def pareto_figure(
    points: Pareto | Iterable[PointLike], named: Mapping[str, PointLike], title: str
) -> Figure:
    if not isinstance(points, Iterable):
        raise ArgumentTypeError(
            f"pareto takes the points of a curve, as planning.pareto(f, x) gives them, but it was "
            f"given {points!r} ({type(points).__name__})"
        )
    curve = sorted(_point(point) for point in points)
    peers = {name: _point(point) for name, point in named.items()}
    if not curve and not peers:
        raise ArgumentValueError(
            "pareto has no points to draw: give what planning.pareto(f, x) gives"
        )
    shapes = _ParetoDrawing(curve, peers).shapes()
    head = Text(LEFT, 30, fit_text(title, 16, WIDTH - LEFT - 10, bold=True), 16, bold=True)
    return Figure(WIDTH, HEIGHT, title, (head, *shapes))


@dataclass(frozen=True, order=True)
class _Point:
    peak: float
    seconds: float
    bound: float | None = None


def _point(point: PointLike) -> _Point:
    if isinstance(point, ParetoPoint):
        return _Point(point.peak_bytes, point.recompute_seconds, point.plan.lower_bound_seconds)
    try:
        peak, seconds = point
        return _Point(float(peak), float(seconds))
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            "a point of a curve is a pair (peak bytes, added seconds) or a ParetoPoint, but one "
            f"is {point!r} ({type(point).__name__})"
        ) from None


class _ParetoDrawing:
    def __init__(self, curve: Sequence[_Point], peers: Mapping[str, _Point]) -> None:
        self.curve, self.peers = curve, peers
        everything = [*curve, *peers.values()]
        peaks = [point.peak for point in everything]
        margin = 0.06 * (max(peaks) - min(peaks)) or 0.1 * max(peaks)
        self.x = TickAxis(max(0, min(peaks) - margin), max(peaks) + margin, LEFT, WIDTH - RIGHT)
        high = 1.1 * max(point.seconds for point in everything) or 1e-6
        self.y = TickAxis(0, high, HEIGHT - BOTTOM, TOP)

    def shapes(self) -> list[Shape]:
        return [*self.axes(), *self.lines(), *self.marks()]

    def axes(self) -> list[Shape]:
        found: list[Shape] = []
        for seconds in decimal_ticks(0, self.y.high):
            y = self.y(seconds)
            found.append(Line([(LEFT, y), (WIDTH - RIGHT, y)], LINE))
            text = human_seconds(seconds) if seconds else "0"
            found.append(Text(LEFT - 8, y + 4, text, 11, "end", QUIET))
        bottom = HEIGHT - BOTTOM
        for nbytes in byte_ticks(self.x.low, self.x.high):
            x = self.x(nbytes)
            found.append(Line([(x, bottom), (x, bottom + 5)], QUIET))
            found.append(Text(x, bottom + 20, human_bytes(nbytes), 11, "middle", QUIET))
        found.append(Line([(LEFT, bottom), (WIDTH - RIGHT, bottom)], QUIET))
        found.append(Text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "peak memory", 12, "middle"))
        found.append(Text(LEFT, TOP - 12, "time added by recomputation", 12))
        return found

    def lines(self) -> list[Shape]:
        bounds = [(self.x(p.peak), self.y(p.bound)) for p in self.curve if p.bound is not None]
        drawn: list[Shape] = []
        if len(bounds) > 1:
            drawn.append(Line(bounds, BOUND, 1.2, dashed=True))
        if len(self.curve) > 1:
            drawn.append(Line([self.at(p) for p in self.curve], CURVE, 2.2))
        return drawn

    def marks(self) -> list[Shape]:
        labels = TextLabels((LEFT + 2, TOP - 8, WIDTH - 4, HEIGHT - BOTTOM - 2))
        labels.take_line([self.at(p) for p in self.curve])
        found: list[Shape] = []
        for p in self.curve:
            note = f"{human_bytes(round(p.peak))}, {human_seconds(p.seconds)} added"
            found.append(Mark(*self.at(p), CURVE, note=note))
            labels.take(*self.at(p), 4.5)
        for i, (name, p) in enumerate(self.peers.items()):
            colour, shape = _PEERS[i % len(_PEERS)], _SHAPES[i % len(_SHAPES)]
            note = f"{name}: {human_bytes(round(p.peak))}, {human_seconds(p.seconds)} added"
            found.append(Mark(*self.at(p), colour, shape, 5.5, note))
            labels.take(*self.at(p), 7)
        if (knee := _knee([self.at(p) for p in self.curve])) is not None:
            x, y = self.at(self.curve[knee])
            found += [Mark(x, y, ACCENT, size=6), labels.beside(x, y - 6, "knee", 11, ACCENT)]
        found += [labels.beside(*self.at(p), name, 12, INK) for name, p in self.peers.items()]
        return found

    def at(self, point: _Point) -> tuple[float, float]:
        return self.x(point.peak), self.y(point.seconds)


def _knee(points: Sequence[tuple[float, float]]) -> int | None:
    """The point farthest below the line between the ends; `y` grows downwards.

    >>> _knee([(0, 0), (1, 8), (10, 10)]), _knee([(0, 0), (10, 10)])
    (1, None)
    """
    if len(points) < 3:
        return None
    (x0, y0), (x1, y1) = points[0], points[-1]
    below = [(x1 - x0) * (y - y0) - (y1 - y0) * (x - x0) for x, y in points]
    best = max(range(len(points)), key=below.__getitem__)
    return best if below[best] > 1e-9 else None
