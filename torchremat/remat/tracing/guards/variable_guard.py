"""The guard on variables: numbers and texts by value, objects by identity."""

import copy
from collections import deque
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch import Generator, Tensor

from torchremat.api_util import same_value
from torchremat.core.slots import identity_of
from torchremat.core.small_arrays import is_small_array
from torchremat.remat.escapes.escapes import Escapes
from torchremat.remat.escapes.read_watch import original_of
from torchremat.remat.tracing.guards.entries import (
    Binding,
    is_plain,
    keys_of,
    length_of,
)
from torchremat.remat.tracing.guards.references import Reference, is_same, reference_to


class VariableGuard:
    """Whether variables have the values that they had: numbers and strings, modules, functions."""

    def __init__(self, variables: Iterable[Binding]) -> None:
        self._values: list[tuple[Binding, Any]] = []
        self._objects: list[tuple[Binding, Reference]] = []
        self._entries: list[tuple[Binding, Any]] = []
        self.add(variables)

    def add(self, variables: Iterable[Binding]) -> None:
        """Guard these too, if they are not guarded yet."""
        known = [pair[0] for pair in (*self._values, *self._objects)]
        places = {(identity_of(v.holder), v.key) for v in known}
        for variable in variables:
            if (identity_of(variable.holder), variable.key) in places:
                continue
            value = variable.get()
            is_value = is_plain(value) or is_small_array(value)
            if is_value and type(value) is not Generator:
                self._values.append((variable, copy.deepcopy(value)))
            elif not isinstance(value, (Tensor, ModuleType)):
                self._objects.append((variable, reference_to(value)))
                if isinstance(value, _CONTAINERS):
                    self._entries.append((variable, _entries_in(value)))

    def _forget_edited(self, escapes: Escapes) -> None:
        """Forget where the function leaves tensors: the edits have guards of their own."""

        def stays(pair: tuple[Binding, Any]) -> bool:
            variable, value = pair[0], pair[0].get()
            slot = (identity_of(variable.holder), "" if variable.key is None else variable.key)
            is_forward = variable.key == "forward"  # which `ModuleGuard` checks
            return not (
                is_forward
                or slot in escapes.slots
                or id(value) in escapes.targets
                or identity_of(variable.holder) in escapes.targets | escapes.old
            )

        self._values = [pair for pair in self._values if stays(pair)]
        self._objects = [pair for pair in self._objects if stays(pair)]
        self._entries = [pair for pair in self._entries if stays(pair)]

    def forget_changed(self, escapes: Escapes) -> bool:
        """Forget what the function itself changed, a counter say, while it was traced; if any."""
        before = self._count()
        self._values = [pair for pair in self._values if _is_unchanged(*pair)]
        self._objects = [pair for pair in self._objects if is_same(pair[1], pair[0].get())]
        self._entries = [pair for pair in self._entries if _has_entries(*pair)]
        has_changed = self._count() < before
        if escapes:
            self._forget_edited(escapes)
        return has_changed

    def _count(self) -> int:
        return len(self._values) + len(self._objects) + len(self._entries)

    def find_objects(self) -> list[Any]:
        """The values that are guarded by what they are."""
        return [variable.get() for variable, _ in self._objects]

    def holds(self) -> bool:
        return self.what_changed() is None

    def what_changed(self) -> str | None:
        for variable, value in self._values:
            now = variable.get()
            if now is not value and not same_value(now, value):
                return f"the {variable.label}"
        for variable, same in self._objects:
            if not is_same(same, original_of(variable.get())):
                return f"the {variable.label}"
        for variable, entries in self._entries:
            if not _has_entries(variable, entries):
                return f"the {variable.label}"
        return None


def _has_entries(variable: Binding, entries: Any) -> bool:
    """Whether a list is as long as it was, a dict has the keys, a set the objects that it had."""
    value = variable.get()
    return isinstance(value, _CONTAINERS) and bool(_entries_in(value) == entries)


_CONTAINERS = (list, dict, deque, set)


def _entries_in(value: Any) -> Any:
    if isinstance(value, set):
        return frozenset(map(id, value))
    return keys_of(value) if isinstance(value, dict) else (type(value), length_of(value))


def _is_unchanged(variable: Binding, value: Any) -> bool:
    return same_value(variable.get(), value)
