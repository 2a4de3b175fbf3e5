"""Figures: shapes in pixels, written as SVG by ourselves and as PNG by matplotlib."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from torchremat.errors import make_printable
from torchremat.viz.figure.files import PathLike, cannot_write, suffix_of, write_text
from torchremat.viz.figure.styles import STYLES

INK, QUIET, LINE, PAPER, ACCENT = "#1f2933", "#5f6c7b", "#dfe3e8", "#ffffff", "#c2185b"
SUFFIXES = (".svg", ".png", ".html")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Area:
    """A filled polygon in the look of a kind; `note` is said when the pointer is on it."""

    points: Points
    kind: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    points: Points
    colour: str = INK
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text; `anchor` is `start`, `middle` or `end`."""

    x: float
    y: float
    text: str
    size: float = 12
    anchor: str = "start"
    colour: str = INK
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    x: float
    y: float
    colour: str = ACCENT
    shape: str = "disc"
    size: float = 4.5
    note: str = ""


Shape = Area | Line | Text | Mark


@dataclass(frozen=True)
class Figure:
    """Shapes on paper, in the order in which they are drawn."""

    width: int
    height: int
    title: str
    shapes: tuple[Shape, ...]

    def write(self, path: PathLike, what: str) -> None:
        """Write the figure, in the format that the suffix of `path` says.

        Raises `ValueError` for another suffix than `.svg`, `.png` and `.html`, and
        `ImportError` for `.png` without matplotlib.
        """
        suffix = suffix_of(path, SUFFIXES, what)
        if suffix == ".png":
            write_png(self, path, what)
        elif suffix == ".svg":
            write_text(path, self.svg(), what)
        else:
            svg = self.svg().replace(_NAMESPACE, "", 1)  # which HTML needs not: no address in it
            write_text(path, _PAGE.format(title=_escape(self.title), svg=svg), what)

    def svg(self) -> str:
        kinds = dict.fromkeys(shape.kind for shape in self.shapes if isinstance(shape, Area))
        size = f'width="{self.width}" height="{self.height}"'
        return "\n".join(
            [
                f"<svg{_NAMESPACE} {size} "
                f'viewBox="0 0 {self.width} {self.height}" font-family="{_FONTS}">',
                f"<title>{_escape(self.title)}</title>",
                "<defs>",
                *(_svg_pattern(kind) for kind in kinds),
                "</defs>",
                f'<rect {size} fill="{PAPER}"/>',
                *map(_svg_of, self.shapes),
                "</svg>\n",
            ]
        )


_NAMESPACE = ' xmlns="http://www.w3.org/2000/svg"'
_FONTS = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ margin: 24px; background: #f8f9fb; }}
svg {{ max-width: 100%; height: auto; }}
</style>
</head>
<body>
{svg}</body>
</html>
"""

_HATCHES = {
    "diagonal": "M0 8L8 0M-2 2L2 -2M6 10L10 6",
    "horizontal": "M0 2H8M0 6H8",
    "vertical": "M2 0V8M6 0V8",
    "dots": "M1 2H3M5 6H7",
}


def _svg_pattern(kind: str) -> str:
    look = STYLES[kind]
    hatch = ""
    if look.hatch != "none":
        hatch = f'<path d="{_HATCHES[look.hatch]}" stroke="#000" stroke-opacity=".3"/>'
    return (
        f'<pattern id="{kind}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{look.fill}"/>{hatch}</pattern>'
    )


def _svg_of(shape: Shape) -> str:
    if isinstance(shape, Area):
        corners = " ".join(map(_pair, shape.points))
        note = f"<title>{_escape(shape.note)}</title>" if shape.note else ""
        return (
            f'<polygon points="{corners}" fill="url(#{shape.kind})" stroke="#52606d" '
            f'stroke-width=".5">{note}</polygon>'
        )
    if isinstance(shape, Line):
        dashes = ' stroke-dasharray="6 4"' if shape.dashed else ""
        corners = " ".join(map(_pair, shape.points))
        return (
            f'<polyline points="{corners}" fill="none" stroke="{shape.colour}" '
            f'stroke-width="{shape.width}"{dashes}/>'
        )
    if isinstance(shape, Mark):
        note = f"<title>{_escape(shape.note)}</title>" if shape.note else ""
        corners = " ".join(map(_pair, mark_points(shape)))
        style = f'fill="{shape.colour}" stroke="{PAPER}" stroke-width="1.2"'
        if shape.shape == "disc":
            where = f'cx="{_number(shape.x)}" cy="{_number(shape.y)}" r="{shape.size}"'
            return f"<circle {where} {style}>{note}</circle>"
        return f'<polygon points="{corners}" {style}>{note}</polygon>'
    weight = ' font-weight="600"' if shape.bold else ""
    return (
        f'<text x="{_number(shape.x)}" y="{_number(shape.y)}" font-size="{shape.size}" '
        f'text-anchor="{shape.anchor}" fill="{shape.colour}"{weight}>{_escape(shape.text)}</text>'
    )


def _escape(text: str) -> str:
    return escape(make_printable(text))


def mark_points(mark: Mark) -> Points:
    s = mark.size
    offsets = (
        [(-s, -s), (s, -s), (s, s), (-s, s)]
        if mark.shape == "square"
        else [(0, -1.3 * s), (1.3 * s, 0), (0, 1.3 * s), (-1.3 * s, 0)]
    )
    return [(mark.x + dx, mark.y + dy) for dx, dy in offsets]


def _pair(point: tuple[float, float]) -> str:
    return f"{_number(point[0])},{_number(point[1])}"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


_MPL_HATCHES = {"diagonal": "////", "horizontal": "---", "vertical": "|||", "dots": "..."}
_MPL_ANCHORS = {"start": "left", "middle": "center", "end": "right"}
# Dots per inch of a PNG: more than the 96 of a figure, so that text is sharp. Chosen by hand.
_DPI = 160
# Pixels per inch of a figure, as CSS and SVG define them.
_PIXELS = 96


def write_png(figure: Figure, path: PathLike, what: str) -> None:
    """Write `figure` with matplotlib. Raises `ImportError` without it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - optional
        from matplotlib.figure import Figure as MplFigure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            f"{what} as .png needs matplotlib, which is not installed: pip install "
            "'torchremat[plot]', or write it as .svg or .html"
        ) from error
    canvas = MplFigure(figsize=(figure.width / _PIXELS, figure.height / _PIXELS), facecolor=PAPER)
    FigureCanvasAgg(canvas)
    axes = canvas.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, figure.width), ylim=(figure.height, 0))
    axes.axis("off")
    for order, shape in enumerate(figure.shapes):
        _draw(axes, shape, order)
    try:
        canvas.savefig(path, dpi=_DPI, metadata={"Software": None, "Title": figure.title})
    except OSError as error:
        raise cannot_write(path, error, what) from error


def _draw(axes: Any, shape: Shape, order: int) -> None:
    if isinstance(shape, Area):
        look = STYLES[shape.kind]
        xs, ys = zip(*shape.points, strict=True)
        hatch = _MPL_HATCHES.get(look.hatch)
        axes.fill(xs, ys, facecolor=look.fill, hatch=hatch, edgecolor="#52606d", linewidth=0.4,
                  zorder=order)  # fmt: skip
    elif isinstance(shape, Line):
        xs, ys = zip(*shape.points, strict=True)
        axes.plot(xs, ys, color=shape.colour, linewidth=0.75 * shape.width,
                  linestyle="--" if shape.dashed else "-", zorder=order)  # fmt: skip
    elif isinstance(shape, Mark):
        marker = {"disc": "o", "square": "s", "diamond": "D"}[shape.shape]
        axes.plot([shape.x], [shape.y], marker=marker, color=shape.colour, zorder=order,
                  markersize=1.4 * shape.size, markeredgecolor=PAPER)  # fmt: skip
    else:
        axes.text(shape.x, shape.y, shape.text, fontsize=0.75 * shape.size, zorder=order,
                  color=shape.colour, ha=_MPL_ANCHORS[shape.anchor], va="baseline",
                  fontweight="bold" if shape.bold else "normal")  # fmt: skip
