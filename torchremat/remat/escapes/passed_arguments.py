"""Containers of a call's arguments, which its result may be or hold: the same object, no copy."""

from typing import Any

from torchremat.core.open_objects import is_opened
from torchremat.core.slots import read_attributes
from torchremat.remat.escapes.reach import Path

_Parts = list[tuple[Any, Path]]


def find_containers(arguments: Any) -> dict[int, Path]:
    """The lists, dicts and opened objects in a tree of arguments, by `id`, and the ways to them.

    >>> inner = {"a": 2}
    >>> find_containers(([1, inner], {}))[id(inner)].steps
    (('item', 0), ('item', 1))
    """
    found: dict[int, Path] = {}
    left: _Parts = [(arguments, Path("arguments"))]
    while left:
        value, place = left.pop()
        parts = _parts_of(value, place)
        if parts is not None and id(value) not in found:
            left += parts
            if not isinstance(value, tuple):  # equal tuples are as good as one
                found[id(value)] = place
    return found


def _parts_of(value: Any, place: Path) -> _Parts | None:
    """The items of a container, with the ways there; `None` for anything else."""
    if isinstance(value, list | tuple):
        return [(item, place.step("item", i)) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return [(item, place.step("item", key)) for key, item in value.items()]
    if is_opened(value):
        return [(x, place.step("open", name)) for name, x in read_attributes(value).items()]
    return None
