"""The styles of the kinds of values: a colour, a hatch and an outline.

The colours differ in lightness too, and the hatches distinguish them in black and white. Pages,
figures and exports read this one table.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    """How a kind is drawn.

    Attributes:
        fill: the colour.
        ink: the colour of text on it.
        hatch: `none`, `diagonal`, `horizontal`, `vertical` or `dots`.
        shape: of its box: `box`, `cut`, `slanted`, `hexagon` or `round`.
        border: of its box: `plain`, `dashed` or `double`.
    """

    fill: str
    ink: str
    hatch: str = "none"
    shape: str = "box"
    border: str = "plain"


STYLES: Mapping[str, Look] = {
    "saved": Look("#2f7fc1", "#ffffff"),
    "offloaded": Look("#c58bb8", "#20121d", "dots", "slanted"),
    "recomputed": Look("#f2b84b", "#2b1d00", "diagonal", "cut", "dashed"),
    "tiled": Look("#8fb7a0", "#0b2216", "vertical", "cut"),
    "temporary": Look("#e4e7eb", "#1f2933"),
    "output": Look("#3b4654", "#ffffff", border="double"),
    "gradient": Look("#dd6f4f", "#2a0b02", "horizontal", border="double"),
    "input": Look("#69b591", "#06231a", shape="slanted"),
    "parameter": Look("#b9d8c6", "#10291d", shape="hexagon"),
    "constant": Look("#cfcabb", "#26231a", shape="hexagon"),
    "view": Look("#f7f8f9", "#52606d", shape="round"),
    "call": Look("#f7f8f9", "#1f2933", shape="round"),
    "resident": Look("#b9d8c6", "#10291d", "vertical"),
    "note": Look("#ffffff", "#1f2933"),
    "cotangent": Look("#9a8fd0", "#150f33", shape="slanted"),
}
"""By kind; those of timelines are here too."""

STACK = ("saved", "output", "gradient", "recomputed", "temporary", "cotangent")
"""The categories of a timeline, from the lowest up."""
