"""Attributes of modules that a traced function changes: found, undone, and set again."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchremat import _torch
from torchremat.api_util import same_value
from torchremat.graph.symbolic_sizes import SYMBOLIC

_CONTAINERS = (list, dict, set, deque, OrderedDict)
# Each trace copies and compares the containers of every module that runs. Chosen by hand: more
# items are data, not a cache or a log of the module.
_MOST_ITEMS = 4096
_HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_kwargs")))
"""Where a module has its hooks: one that is there after a trace makes the next call trace anew."""


class _NoAttribute:
    """No attribute."""


MISSING = _NoAttribute()


@dataclass(frozen=True, eq=False)
class AttributeChange:
    """One attribute of a module before a trace and after it.

    `place` is the dictionary that holds it. The items of a container are compared:
    `items_before` and `items_after`.
    """

    module: nn.Module
    name: str
    place: dict[str, Any]
    before: Any
    after: Any
    items_before: Any = None
    items_after: Any = None

    @property
    def is_of_trace(self) -> bool:
        held = self.items_after if self.items_after is not None else [self.after]
        values = held.values() if isinstance(held, dict) else held
        return any(is_of_trace(value) for value in values)

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.after, Tensor) and is_of_trace(self.after)

    def is_made(self) -> bool:
        items = {} if self.items_before is None else {self.name: self.items_before}
        values = {} if self.before is MISSING else {self.name: self.before}
        return _change(self.module, self.name, self.place, values, items) is not None

    def undo(self) -> None:
        self._set(self.before, self.items_before)

    def redo(self) -> None:
        self._set(self.after, self.items_after)

    def _set(self, value: Any, items: Any) -> None:
        if value is MISSING:
            self.place.pop(self.name, None)
            return
        if items is not None:
            value.clear()
            (value.update if isinstance(value, dict | set) else value.extend)(items)
        self.place[self.name] = value


class ModuleState:
    """The attributes of modules at some time: plain values, containers and tensors."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[nn.Module, list[dict[str, Any]], dict[str, Any]]] = {}
        self._hooks: list[tuple[dict[int, Any], set[int]]] = []

    def note(self, module: nn.Module) -> None:
        if id(module) in self._noted:
            return
        places = [dict(place) for place in _torch.attributes_of(module)]
        items = {
            name: value.copy()
            for name, value in places[0].items()
            if _is_container(value) and name not in ("_buffers", "_parameters", *_HOOKS)
        }
        self._noted[id(module)] = (module, places, items)
        hooks = (
            value for name, value in places[0].items() if name in _HOOKS and isinstance(value, dict)
        )
        self._hooks += ((place, set(place)) for place in hooks)

    def remove_new_hooks(self) -> None:
        """Remove the hooks that modules have got since, as where attributes say so are undone."""
        for place, before in self._hooks:
            for key in [key for key in place if key not in before]:
                del place[key]

    def changes(self) -> Iterator[AttributeChange]:
        for module, noted, items in self._noted.values():
            for place, values in zip(_torch.attributes_of(module), noted, strict=True):
                for name in list({**values, **place}):
                    change = _change(module, name, place, values, items)
                    if change is not None:
                        yield change

    def clear(self) -> None:
        self._noted.clear()
        self._hooks.clear()


def _change(
    module: nn.Module,
    name: str,
    place: dict[str, Any],
    values: dict[str, Any],
    items: dict[str, Any],
) -> AttributeChange | None:
    before, after = values.get(name, MISSING), place.get(name, MISSING)
    if before is after:
        if name not in items or not _is_container(after) or same_items(items[name], after):
            return None
        return AttributeChange(module, name, place, before, after, items[name], after.copy())
    if is_of_trace(before):
        return None  # `torch.func.functional_call` puts back what it changed itself
    if not is_of_trace(after) and _is_same(before, after):
        return None
    return AttributeChange(module, name, place, before, after)


def is_of_trace(value: Any) -> bool:
    """Whether `value` is a tensor or a size that means something only in a trace."""
    if isinstance(value, SYMBOLIC):
        return True
    return isinstance(value, Tensor) and isinstance(
        _torch.innermost_tensor(value), _torch.FakeTensor
    )


def _is_container(value: Any) -> bool:
    return type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS


def same_items(before: Any, after: Any) -> bool:
    """Whether two containers hold the same, by identity or as plain values."""
    if type(before) is not type(after) or len(before) != len(after):
        return False
    if isinstance(before, set):
        return bool(before == after)
    if isinstance(before, dict):
        return list(before) == list(after) and all(map(_is_same, before.values(), after.values()))
    return all(map(_is_same, before, after))


_SIMPLE = (int, float, bool, complex, str, bytes, tuple, type(None))


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, _SIMPLE) and same_value(a, b)
