"""Whether code reads a list, and does not only append to it: noted while a function is traced.

A list with plain appends keeps its trace at any length. Code may read a list under another name, in
a helper, or by a slice, so the list itself must tell. Its type is exchanged for a while, since a
copy in its place would be missed by other references to it.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torchremat import _torch

_READS: set[int] = set()
"""The identities of watched lists that were read."""
_WATCHED: list[list[Any]] = []
_QUIET = [0]


def _note(value: Any) -> None:
    if not _QUIET[0]:
        _READS.add(id(value))


class _WatchedList(list[Any]):
    """A list that notes each use but `append`, `extend` and `+=`. As large as a list."""

    __slots__ = ()

    def extend(self, items: Any) -> None:
        if items is self:
            _note(self)
        list.extend(self, items)

    def __iadd__(self, items: Any) -> Any:  # type: ignore[misc]
        self.extend(items)
        return self

    def __radd__(self, items: Any) -> Any:
        _note(self)
        return list.__add__(items, self)


def _make_noting(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _note(self)
        return method(self, *args, **kwargs)

    return call


_APPENDING = {"append", "__new__", "__init__", "__getattribute__", "__class_getitem__"}
for _name in set(vars(list)) - _APPENDING - set(vars(_WatchedList)):
    if callable(getattr(list, _name)):
        setattr(_WatchedList, _name, _make_noting(_name))
for _name in ("__reduce_ex__", "__reduce__"):  # of `object`: copies
    setattr(_WatchedList, _name, _make_noting(_name))


def _flatten(items: Any) -> tuple[list[Any], None]:
    _note(items)
    return list.__getitem__(items, slice(None)), None


_torch.register_pytree_node(_WatchedList, _flatten, lambda items, _: list(items))

# The type is the last field of the head of each object, in each build of CPython.
_TYPE_AT = object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p)


def _set_type(value: list[Any], kind: type) -> None:
    """Exchange the type of a list. Python itself refuses it, though the two have one layout."""
    ctypes.c_void_p.from_address(id(value) + _TYPE_AT).value = id(kind)
    count = ctypes.pythonapi.Py_DecRef if kind is list else ctypes.pythonapi.Py_IncRef
    count(ctypes.py_object(_WatchedList))  # an object counts as a reference to its type


@contextmanager
def watch_reads(lists: Sequence[Any]) -> Iterator[Callable[[Any], bool]]:
    """In the block each read of `lists` is noted. Gives a test whether a list was only appended to.

    >>> seen, other = [1], [2]
    >>> with watch_reads([seen, other]) as is_unread:
    ...     seen.append(3)
    ...     size = len(other)
    >>> is_unread(seen), is_unread(other), type(seen) is list
    (True, False, True)
    """
    own = [item for item in lists if type(item) is list]
    numbers = set(map(id, own))
    read: set[int] = set()
    for item in own:
        _set_type(item, _WatchedList)
    _WATCHED[:] = [*_WATCHED, *own]
    noted_before = _READS & numbers  # by a watch around this one
    _READS.difference_update(numbers)
    try:
        yield lambda item: id(item) in numbers and id(item) not in read
    finally:
        _WATCHED[:] = [item for item in _WATCHED if id(item) not in numbers]
        for item in own:
            if type(item) is _WatchedList:
                _set_type(item, list)
        read |= _READS & numbers
        _READS.difference_update(numbers)
        _READS.update(noted_before)


def as_plain_lists() -> AbstractContextManager[None]:
    """A block in which watched lists are plain ones, and count as read: for a trace inside."""
    return _unwatch() if _WATCHED else nullcontext()  # each call of a checkpoint asks


@contextmanager
def _unwatch() -> Iterator[None]:
    watched, _WATCHED[:] = list(_WATCHED), []
    for item in watched:
        _note(item)
        _set_type(item, list)
    try:
        yield
    finally:
        for item in watched:
            _set_type(item, _WatchedList)
        _WATCHED[:] = watched


@contextmanager
def reads_unnoted() -> Iterator[None]:
    """In the block reads are not noted: those of torchremat itself."""
    _QUIET[0] += 1
    try:
        yield
    finally:
        _QUIET[0] -= 1
