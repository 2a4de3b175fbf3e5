"""Text in a figure: cut to a width, and placed beside a mark where it overlaps least."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, dist

from torchremat.viz.figure.figure import Points, Text

# The height of a line of text in pixels, for labels of 11 or 12 pixels.
_LINE = 13.0
# A line takes room as points that are this many pixels apart: less than a label is high.
_STRAY = 6.0

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """About how wide a line of text is, in pixels; most fonts are narrower.

    >>> width_of("peak memory", 12) < width_of("peak memory", 12, bold=True) < 100
    True
    """
    return (0.64 if bold else 0.57) * size * len(text)


def fit_text(text: str, size: float, width: float, *, bold: bool = False) -> str:
    """`text`, cut at its end to `width` pixels.

    >>> fit_text("time against peak memory", 12, 90), fit_text("knee", 12, 90)
    ('time against…', 'knee')
    """
    most = max(1, int(width / width_of("m", size, bold=bold)))
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


@dataclass
class TextLabels:
    """The boxes on `paper` that marks, lines and labels take, and places for labels in the rest."""

    paper: Box
    _taken: list[Box] = field(default_factory=list)

    def take(self, x: float, y: float, size: float) -> None:
        self._taken.append((x - size, y - size, x + size, y + size))

    def take_line(self, points: Points) -> None:
        for a, b in pairwise(points):
            count = ceil(dist(a, b) / _STRAY)
            for i in range(count):
                x, y = (p + (q - p) * i / count for p, q in zip(a, b, strict=True))
                self.take(x, y, 1)

    def beside(self, x: float, y: float, text: str, size: float, colour: str) -> Text:
        text = fit_text(text, size, self.paper[2] - self.paper[0])
        places = [Text(a, b, text, size, anchor, colour) for a, b, anchor in _places(x, y)]
        best = min(places, key=lambda place: self._count_hidden(_box(place)))
        self._taken.append(_box(best))
        return best

    def _count_hidden(self, box: Box) -> float:
        """The area of `box` that is outside the paper, ten times, and that overlaps other boxes."""
        outside = _area(box) - _area(_common(box, self.paper))
        return 10 * outside + sum(_area(_common(box, other)) for other in self._taken)


def _places(x: float, y: float) -> Iterator[tuple[float, float, str]]:
    """Places for a label, the best first: beside the mark, above and below, then farther."""
    for shift in _shifts(3):
        yield x + 11, y + 4 + shift, "start"
        yield x - 11, y + 4 + shift, "end"
        if shift == 0:
            yield x, y - 11, "middle"
            yield x, y + 20, "middle"


def _shifts(count: int) -> Iterable[float]:
    """0, one line up, one down, two up, ..."""
    return sorted((i * _LINE for i in range(-count, count + 1)), key=lambda s: (abs(s), s))


def _box(text: Text) -> Box:
    width = width_of(text.text, text.size)
    left = text.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[text.anchor] * width
    return (left, text.y - 0.8 * text.size, left + width, text.y + 0.25 * text.size)


def _common(a: Sequence[float], b: Sequence[float]) -> Box:
    return (max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))


def _area(box: Box) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])
