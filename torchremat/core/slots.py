"""Attributes that are in `__slots__`, which the `__dict__` of an object lacks."""

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from types import MemberDescriptorType
from typing import Any

_NAMES: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def slots_of(kind: type) -> tuple[str, ...]:
    """The names of the slots of a class and its bases.

    >>> class Point:
    ...     __slots__ = ("x", "y")
    >>> slots_of(Point), slots_of(list)
    (('x', 'y'), ())
    """
    if kind not in _NAMES:
        members = [(name, value) for base in kind.__mro__ for name, value in vars(base).items()]
        found = [n for n, value in members if type(value) is MemberDescriptorType]
        _NAMES[kind] = tuple(dict.fromkeys(n for n in found if not n.startswith("__")))
    return _NAMES[kind]


def read_attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object itself, those in slots too."""
    attributes = getattr(value, "__dict__", None)
    found = dict(attributes) if type(attributes) is dict else {}
    return {**found, **Slots(value)} if slots_of(type(value)) else found


def write_attributes(value: Any, attributes: dict[str, Any]) -> None:
    """Set attributes of an object as they are, past its `__setattr__` and properties."""
    in_slots = attributes.keys() & slots_of(type(value))
    Slots(value).update({name: attributes[name] for name in in_slots})
    if len(in_slots) < len(attributes):
        value.__dict__.update({n: v for n, v in attributes.items() if n not in in_slots})


class Slots(MutableMapping[str, Any]):
    """The slots of an object as a mapping. It refers to the object weakly where it can.

    >>> class Point:
    ...     __slots__ = ("x", "y")
    >>> point = Point()
    >>> slots = Slots(point)
    >>> slots["x"] = 1
    >>> dict(slots), point.x
    ({'x': 1}, 1)
    """

    __slots__ = ("_get_owner",)

    _get_owner: Callable[[], Any]

    def __init__(self, owner: Any) -> None:
        try:
            self._get_owner = weakref.ref(owner)
        except TypeError:  # it has no slot for weak references
            self._get_owner = lambda: owner

    def __getitem__(self, name: str) -> Any:
        owner = self._get_owner()
        if name not in slots_of(type(owner)):
            raise KeyError(name)
        try:
            return object.__getattribute__(owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._get_owner(), name, value)  # of a frozen dataclass too

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        object.__delattr__(self._get_owner(), name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in slots_of(type(self._get_owner())) if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def identity(self) -> int:
        """One number for all views of an object."""
        return id(self._get_owner())


def identity_of(holder: Any) -> int:
    """The `id` of what holds values: that of the object, where they are in slots."""
    return holder.identity if type(holder) is Slots else id(holder)
