"""Results in a notebook: their text as a small piece of HTML, on a light and on a dark page."""

from html import escape

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
