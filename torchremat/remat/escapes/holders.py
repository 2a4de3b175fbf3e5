"""Reading and writing the slots of dicts, classes, cells and context variables, and items of lists.

Subclasses of dict and list may have methods of their own. Here they are read and written past them.
"""

from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from types import CellType
from typing import Any


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()
"""Stands for a value where there is none."""


def read_holder(target: Any, names: frozenset[str] | None = None) -> Any:
    """A copy of the slots of a dict, class, cell or context variable; the items of a list or set.

    >>> read_holder({"a": 1, "b": 2}, frozenset({"b", "c"}))
    {'b': 2}
    """
    if isinstance(target, list | deque | set):
        return list(target)
    if isinstance(target, CellType):
        try:
            return {"": target.cell_contents}
        except ValueError:
            return {}
    if isinstance(target, ContextVar):
        value = target.get(ABSENT)
        return {} if value is ABSENT else {"": value}
    slots: Any = vars(target) if isinstance(target, type) else target
    kind = _kind_of(slots)
    if names is None:
        return dict(kind.items(slots))
    return {n: value for n in names if (value := kind.get(slots, n, ABSENT)) is not ABSENT}


def write_slot(target: Any, key: Any, value: Any) -> None:
    """Write `value` into a slot of `target`, or empty the slot if it is `ABSENT`."""
    if isinstance(target, CellType):
        if value is ABSENT:
            del target.cell_contents
        else:
            target.cell_contents = value
    elif isinstance(target, ContextVar):
        target.set(None if value is ABSENT else value)
    elif isinstance(target, type):
        if value is ABSENT:
            delattr(target, key)
        else:
            setattr(target, key, value)
    elif value is ABSENT:
        _kind_of(target).pop(target, key, None)
    else:
        _kind_of(target).__setitem__(target, key, value)


def write_items(target: Any, items: Sequence[Any]) -> None:
    """Let `items` be those of a list, deque or set."""
    kind = _kind_of(target)
    kind.clear(target)
    (kind.update if isinstance(target, set) else kind.extend)(target, items)


def _kind_of(target: Any) -> Any:
    """The class of a container, or the class of Python's own that it is derived from."""
    if not isinstance(target, dict | list | deque | set):
        return type(target)
    return next(k for k in type(target).__mro__ if k.__module__ in ("builtins", "collections"))
