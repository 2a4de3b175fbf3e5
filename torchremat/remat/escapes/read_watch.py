"""Whether a function reads what it changes, or only adds to it: found by one more trace of it.

    calls += 1; return x.sin()             a counter of traces: it stands still in a replay
    n[0] += 1; return x * n[0]             read: a trace serves one value
    losses.append(y); return y * 2         a trace serves each length of the list

Code may read under another name, in a helper, or by a slice. So in that trace stand-ins are in the
places of numbers and lists, and note each use but an addition, `append`, `extend` and `+=`. They
are put there by assignment. A list to which something else refers as well counts as read.
"""

import gc
import operator
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torchremat import _torch
from torchremat.remat.escapes.holders import ABSENT, read_holder, write_slot
from torchremat.remat.escapes.reach import Holder, Reach

Spot = tuple[Any, Any]
"""A slot of a holder: the key of the holder's place, and that of the slot; `None` for a list."""

_QUIET = [0]
_ACTIVE: list["Watch"] = []
_REACHES: list[Reach] = []


Steps = tuple[tuple[Callable[[Any, Any], Any], int | float], ...]
"""Operations with plain numbers, one after the other: of `n * 2 + 1` there are two."""


class Watch:
    """The reads of one spot, and the numbers that were made of what is there."""

    def __init__(self) -> None:
        self.is_read = False
        self.numbers: list[weakref.ref[Any]] = []
        self.steps: Steps | None = None
        """How the number that was left in the spot was made of the one before."""

    def note(self) -> None:
        if not _QUIET[0]:
            self.is_read = True


# --- numbers -------------------------------------------------------------------------------------


class _WatchedNumber:
    """Stands for a number. What a plain number is added to it stands for the sum."""

    __slots__ = ("__weakref__", "_steps", "_value", "_watch")

    def __init__(self, value: Any, watch: Watch, steps: Steps = ()) -> None:
        self._value = value
        self._watch = watch
        self._steps = steps
        watch.numbers.append(weakref.ref(self))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        self._watch.note()
        return type(self._value)

    def __getattr__(self, name: str) -> Any:
        self._watch.note()
        return getattr(self._value, name)


def _note_number(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        self._watch.note()
        return getattr(self._value, name)(*args)

    return call


def _combine(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def call(self: Any, other: Any) -> Any:
        if type(other) in (int, float):
            steps = (*self._steps, (operation, other))
            return _WatchedNumber(operation(self._value, other), self._watch, steps)
        self._watch.note()
        return operation(self._value, other)

    return call


_OBJECT = set(vars(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
_OBJECT -= {"__hash__", "__str__", "__repr__", "__format__", "__reduce__", "__reduce_ex__"}
for _name in {*vars(int), *vars(float)} - _OBJECT:
    if _name.startswith("__") and callable(getattr(int, _name, None) or getattr(float, _name)):
        setattr(_WatchedNumber, _name, _note_number(_name))
for _name, _operation in {
    "__add__": operator.add,
    "__radd__": lambda a, b: b + a,
    "__sub__": operator.sub,
    "__mul__": operator.mul,
    "__rmul__": lambda a, b: b * a,
}.items():
    setattr(_WatchedNumber, _name, _combine(_operation))


def stand_for(value: int | float, watch: Watch) -> Any:
    """A stand-in for a number, whose reads `watch` notes."""
    return _WatchedNumber(value, watch)


# --- lists ---------------------------------------------------------------------------------------


class _Nothing:
    """An item more, which what reads a list without its methods (PyTorch does) cannot use."""


class _WatchedList(list[Any]):
    """Stands for a list. It notes each use but `append`, `extend` and `+=`."""

    __slots__ = ("_watch", "original")

    _watch: Watch
    original: list[Any]

    def extend(self, items: Any) -> None:
        if items is self:
            self._watch.note()
        list.extend(self, items)

    def __iadd__(self, items: Any) -> Any:  # type: ignore[misc]
        self.extend(items)
        return self

    def __radd__(self, items: Any) -> Any:
        self._watch.note()
        return list.__add__(items, self)


def _note_list(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._watch.note()
        return method(self, *args, **kwargs)

    return call


_APPENDING = {"append", "__new__", "__init__", "__getattribute__", "__class_getitem__"}
for _name in set(vars(list)) - _APPENDING - set(vars(_WatchedList)):
    if callable(getattr(list, _name)):
        setattr(_WatchedList, _name, _note_list(_name))
for _name in ("__reduce_ex__", "__reduce__"):  # of `object`: copies
    setattr(_WatchedList, _name, _note_list(_name))


def _flatten(items: Any) -> tuple[list[Any], None]:
    items._watch.note()
    return list.__getitem__(items, slice(None)), None


_torch.register_pytree_node(_WatchedList, _flatten, lambda items, _: list(items))


# --- putting them in place -----------------------------------------------------------------------


@contextmanager
def watch_reads(reach: Reach, spots: Mapping[Spot, Any]) -> Iterator[dict[Spot, Watch]]:
    """In the block stand-ins are in `spots`, of which numbers have the given values.

    Gives what is known of each spot, which is final after the block. What the function left there
    is then in the place itself.
    """
    found = {spot: Watch() for spot in spots}
    put: list[Callable[[], None]] = []
    _REACHES.append(reach)
    try:
        for holder in reach.holders if spots else ():
            put += _put_numbers(holder, spots, found)
            watch = found.get((holder.place.key, None))
            if watch is not None:
                put += _put_list(holder, reach, watch)
        _ACTIVE.extend(found.values())
        yield found
    finally:
        _REACHES.pop()
        del _ACTIVE[len(_ACTIVE) - len(found) :]
        for take_away in reversed(put):
            take_away()
        for watch in found.values():
            if any(number() is not None for number in watch.numbers):
                watch.is_read = True  # another place has it


@contextmanager
def with_stand_ins(watches: Collection[Watch]) -> Iterator[None]:
    """In the block stand-ins are among the arguments of a function, with these watches.

    `note_held` is for after it, once what was traced is gone.
    """
    _ACTIVE.extend(watches)
    try:
        yield
    finally:
        del _ACTIVE[len(_ACTIVE) - len(watches) :]


def note_held(watches: Collection[Watch]) -> None:
    """Note as read the numbers that something still holds, a cache say."""
    if any(number() is not None for watch in watches for number in watch.numbers):
        gc.collect()  # frames and graphs are in cycles
    for watch in watches:
        watch.is_read |= any(number() is not None for number in watch.numbers)


def _put_numbers(
    holder: Holder, spots: Mapping[Spot, Any], found: Mapping[Spot, Watch]
) -> Iterator[Callable[[], None]]:
    place = holder.place.key
    for at, key in spots:
        if at == place and key is not None:
            watch = found[at, key]
            write_at(holder.target, key, _WatchedNumber(spots[at, key], watch))
            yield lambda key=key, watch=watch: _take_number(holder, key, watch)  # type: ignore[misc]


def _take_number(holder: Holder, key: Any, watch: Watch) -> None:
    now = read_at(holder.target, key)
    if type(now) is _WatchedNumber and now._watch is watch:
        watch.steps = now._steps
        write_at(holder.target, key, now._value)


def _put_list(holder: Holder, reach: Reach, watch: Watch) -> Iterator[Callable[[], None]]:
    slots = [(h.target, key) for h in reach.holders for key in _keys_of(h, holder.target)]
    if _is_elsewhere(holder.target, [target for target, _ in slots]):
        watch.is_read = True
        return
    stand_in = _WatchedList([*holder.target, _Nothing()])
    stand_in._watch, stand_in.original = watch, holder.target
    length = len(holder.before)
    for target, key in slots:
        write_at(target, key, stand_in)

    def take_away() -> None:
        for target, key in slots:
            if read_at(target, key) is stand_in:
                write_at(target, key, holder.target)
            else:
                watch.is_read = True
        holder.target.extend(list.__getitem__(stand_in, slice(length + 1, None)))

    yield take_away


def _is_elsewhere(value: Any, places: Sequence[Any]) -> bool:
    """Whether something refers to `value` besides `places`, what serves traces, and callers."""
    own = {id(place) for place in places}
    own |= {id(container) for reach in _REACHES for container in reach.containers}
    return any(
        id(other) not in own
        and id(getattr(other, "__dict__", None)) not in own  # of an object with inline values
        and not isinstance(other, FrameType)
        and not type(other).__module__.startswith("torchremat.")
        for other in gc.get_referrers(value)
    )


def _keys_of(holder: Holder, value: Any) -> list[Any]:
    before = holder.before
    if isinstance(holder.target, set):
        return []
    pairs = enumerate(before) if holder.is_sequence else before.items()
    return [key for key, item in pairs if item is value]


def read_at(target: Any, key: Any) -> Any:
    """The value in a slot of a holder, or at a place of a list; `ABSENT` if there is none."""
    if isinstance(target, list | deque):
        return target[key] if key < len(target) else ABSENT
    return read_holder(target, frozenset([key])).get(key, ABSENT)


def write_at(target: Any, key: Any, value: Any) -> None:
    """Write into a slot of a holder, or to a place of a list."""
    if isinstance(target, list | deque):
        target[key] = value
    else:
        write_slot(target, key, value)


def original_of(value: Any) -> Any:
    """The list that `value` stands for, if it is a stand-in."""
    return value.original if type(value) is _WatchedList else value


@contextmanager
def reads_unnoted() -> Iterator[None]:
    """In the block reads are not noted: those of torchremat itself."""
    _QUIET[0] += 1
    try:
        yield
    finally:
        _QUIET[0] -= 1


def has_stand_ins() -> bool:
    """Whether a trace with stand-ins is in progress: one inside has them in its guards."""
    return bool(_ACTIVE)
