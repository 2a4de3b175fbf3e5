"""Seconds, bytes, shares and tables as text for people, and results as HTML in a notebook."""

from collections.abc import Sequence
from html import escape

from torchremat.errors import make_printable


def human_seconds(seconds: float) -> str:
    """A time for people.

    >>> human_seconds(0.0123), human_seconds(4.2e-6), human_seconds(3)
    ('12.3 ms', '4.20 us', '3.00 s')
    """
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    unit, size = next((u for u in units if abs(seconds) >= u[1]), units[-1])
    value = seconds / size
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f} {unit}"


def human_bytes(nbytes: int) -> str:
    """Bytes for people: three figures and a unit.

    >>> human_bytes(1023), human_bytes(1536), human_bytes(123456789)
    ('1023 B', '1.50 KiB', '118 MiB')
    """
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if abs(size) < 999.5 or unit == "TiB":
            break
    return f"{size:.{2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0}f} {unit}"


def percent(part: float, whole: float) -> str:
    """`part` of `whole` as text; a dash if there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


# Columns of the widest table. Chosen by hand: nothing depends on the exact value.
WIDTH = 100


def table(
    rows: Sequence[Sequence[str]], *, numeric: tuple[int, ...], indent: str = "  "
) -> list[str]:
    """Lines of aligned columns, of at most `WIDTH` columns: the widest cells are shortened.

    >>> table([("a", "1 B"), ("bb", "20 B")], numeric=(1,))
    ['  a    1 B', '  bb  20 B']
    """
    if not rows:
        return []
    columns = [list(map(make_printable, column)) for column in zip(*rows, strict=True)]
    columns, places = _drop_empty_columns(columns)
    widths = [max(map(len, column)) for column in columns]
    while sum(widths) + 2 * len(widths) > WIDTH:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for cells in zip(*columns, strict=True):
        texts = [shorten(cell, width) for cell, width in zip(cells, widths, strict=True)]
        texts = [
            text.rjust(width) if place in numeric else text.ljust(width)
            for text, width, place in zip(texts, widths, places, strict=True)
        ]
        lines.append((indent + "  ".join(texts)).rstrip())
    return lines


def _drop_empty_columns(columns: list[list[str]]) -> tuple[list[list[str]], list[int]]:
    kept = [i for i, column in enumerate(columns) if any(column)]
    return [columns[i] for i in kept], kept


def shorten(text: str, width: int) -> str:
    """`text` in `width` columns, its middle left out if it is longer.

    >>> shorten("layers.0.attention.query", 11)
    'layer…query'
    """
    if len(text) <= width:
        return text
    end = width // 2
    return f"{text[: width - end - 1]}…{text[len(text) - end :]}"


# Colours of the page are inherited, and lines are half transparent: both serve light and dark.
_BOX = (
    "display:inline-block;max-width:100%;overflow-x:auto;border:1px solid rgba(128,128,128,.4);"
    "border-radius:4px;padding:.5em .8em"
)
_TEXT = "margin:0;background:none;color:inherit;font:.85em/1.4 monospace"


class ShownInNotebook:
    """A result that a notebook shows as a titled box with its text. Nothing is loaded or run.

    >>> class Figures(ShownInNotebook):
    ...     def __str__(self):
    ...         return "a < b"
    >>> Figures()._repr_html_().startswith("<div style=")
    True
    >>> "<b>Figures</b>" in Figures()._repr_html_(), "a &lt; b" in Figures()._repr_html_()
    (True, True)
    """

    def _repr_html_(self) -> str:  # the name that notebooks look for
        return (
            f'<div style="{_BOX}"><b>{escape(type(self).__name__)}</b>'
            f'<pre style="{_TEXT}">{escape(str(self))}</pre></div>'
        )
