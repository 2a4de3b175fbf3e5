"""Weak references to values that a guard compares by identity."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Reference = Callable[[], Any] | None
"""A weak reference, or none: its `id` would not do, which another has once it is gone."""


def reference_to(value: Any) -> Reference:
    if value is None:
        return None
    try:
        return weakref.ref(value)
    except TypeError:
        return _Strong(value)


@dataclass(frozen=True, slots=True, eq=False)
class _Strong:
    """A reference of a class of its own, which a search for referrers knows."""

    value: Any

    def __call__(self) -> Any:
        return self.value


def is_same(reference: Reference, value: Any) -> bool:
    if reference is None or value is None:
        return reference is value
    return reference() is value
