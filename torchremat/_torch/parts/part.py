"""A row of the table of private parts, and how one is looked up."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import torch


@dataclass(frozen=True)
class PrivatePart:
    """Private or experimental names of PyTorch that one purpose needs.

    >>> part = PrivatePart("torch.nn.Module(): _buffers, _lost", "To show.", "none", "Nothing.")
    >>> part.names
    ('torch.nn.Module()._buffers', 'torch.nn.Module()._lost')
    >>> part.find_missing()
    ['torch.nn.Module()._lost']
    """

    where: str
    """Names below a module, class or object: `torch._C: _x, _y`; `()` makes an object of a class.

    `marks: _x` are attributes that the library gives its own functions for Dynamo to read, and
    `objects: _x` those of objects that no expression makes.
    """

    use: str
    """The reason why the library needs them."""

    public: str
    """The public way that was tried, and the reason against it."""

    without: str
    """The loss without them."""

    since: str = "2.11"
    """The first PyTorch, among the supported ones, that needs them."""

    until: str = ""
    """The last PyTorch that needs them, if newer ones do without."""

    @property
    def names(self) -> tuple[str, ...]:
        place, _, names = self.where.partition(": ")
        return tuple(f"{place}.{name}" for name in names.split(", "))

    def find_missing(self) -> list[str]:
        """List the names that the installed PyTorch lacks."""
        version = _parse(torch.__version__)
        is_needed = _parse(self.since) <= version <= _parse(self.until or "999.0")
        if not is_needed or self.where.startswith(("marks: ", "objects: ")):
            return []
        return [name for name in self.names if not _exists(name)]


def _parse(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _exists(name: str) -> bool:
    first, *rest = name.split(".")
    value: object = sys.modules.get(first) or import_module(first)
    path = first
    for part in rest:
        word = part.removesuffix("()")
        path = f"{path}.{word}"
        if not hasattr(value, word) and not _can_import(path):
            return False
        value = getattr(value, word)
        value = value() if part != word else value  # type: ignore[operator]
    return True


def _can_import(path: str) -> bool:
    try:
        import_module(path)
    except ImportError:
        return False
    return True


def find_all_missing(parts: Iterator[PrivatePart]) -> dict[str, PrivatePart]:
    """Map each missing name to the row that it is in."""
    return {name: part for part in parts for name in part.find_missing()}
