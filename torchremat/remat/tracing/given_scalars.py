"""Numbers and strings that a traced function is given and does not read.

A trace serves calls with the same numbers. Many are not read at all: the longest length of a batch
that only another attention kernel asks, or the number of a layer. Where calls differ in such a
number, the next trace has a `WatchedScalar` in its place, which notes each use. If there is none,
the trace serves every number:

    block(x, max_length=38)             (int, 38) in the key of the first trace
    block(x, max_length=41)             unread in the second: (int, any) in its key
"""

import dis
import functools
import gc
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torchremat.core.source import is_about_sizes, is_user_written
from torchremat.core.trees import Structure

# Not `bool` and `None`: they are compared by identity, which nothing can note.
WATCHED_KINDS = (int, float, str)


class WatchedScalar:
    """Stands for a number or a string in a trace, and notes that it was used as one.

    Its class is said to be that of the value, so `isinstance` answers as it does for the value.

    >>> length = WatchedScalar(38)
    >>> isinstance(length, int), length.is_read
    (True, False)
    >>> length + 1, length.is_read
    (39, True)
    """

    __slots__ = ("_is_read", "_value")

    def __init__(self, value: Any) -> None:
        object.__setattr__(self, "_value", value)
        object.__setattr__(self, "_is_read", False)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # the kind is part of what the trace holds for
        return type(object.__getattribute__(self, "_value"))

    @property
    def is_read(self) -> bool:
        return bool(object.__getattribute__(self, "_is_read"))

    def __getattr__(self, name: str) -> Any:
        return getattr(read(self), name)


def read(scalar: Any) -> Any:
    """The value of a `WatchedScalar`, which notes it."""
    object.__setattr__(scalar, "_is_read", True)
    return object.__getattribute__(scalar, "_value")


def _plain(value: Any) -> Any:
    return read(value) if type(value) is WatchedScalar else value


def _make_reading(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        return getattr(read(self), name)(*map(_plain, args))

    call.__name__ = name
    return call


_OWN = {"__class__", "__new__", "__init__", "__getattribute__", "__getattr__", "__setattr__",
        "__delattr__", "__init_subclass__", "__subclasshook__", "__doc__", "__slots__"}  # fmt: skip
for _name in sorted({n for kind in WATCHED_KINDS for n in vars(kind)} | set(vars(object))):
    if _name.startswith("__") and _name not in _OWN:
        setattr(WatchedScalar, _name, _make_reading(_name))


class Unread:
    """In the key of a trace: any value of a kind. Equal to the entry of each."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Unread):
            return self._kind is other._kind
        return type(other) is tuple and len(other) == 2 and other[0] is self._kind

    def __hash__(self) -> int:
        return hash(self._kind)


@dataclass(frozen=True)
class AttributeSlot:
    """A plain attribute of a module: the dict that has it, its name there, the module's number."""

    place: dict[str, Any]
    name: str
    number: int


class GivenScalars:
    """Scalars that stand in places of a call and in attributes of modules while it is traced.

    Attributes:
        leaves: the positions of the first among the leaves of the call.
        slots: the attributes that the others stand in.
        structure: that of the call, with scalars in it, until `finish`.
        read_leaves: those of `leaves` that the function read, once `finish` has run.
        read_slots: those of `slots`.
    """

    def __init__(self, leaves: Sequence[int] = (), slots: Sequence[AttributeSlot] = ()) -> None:
        self.leaves = leaves
        self.slots = slots
        self.read_leaves = list(leaves)
        self.read_slots = list(slots)
        self.structure = Structure(None)
        self._scalars: list[WatchedScalar] = []
        self._asks_for_types = False

    @property
    def is_read(self) -> bool:
        return bool(self.read_leaves or self.read_slots)

    def give_up(self) -> None:
        """Take those for read that were, or else all."""
        used = [scalar.is_read for scalar in self._scalars]
        self._note([is_read or not any(used) for is_read in used])

    def place_in(self, structure: Structure) -> Structure:
        """Put the scalars in the places of constants of `structure`, and return that."""
        constants = structure.leaves
        in_slots = [slot.place[slot.name] for slot in self.slots]
        values = [*(constants[leaf] for leaf in self.leaves), *in_slots, 0]
        self._scalars = list(map(WatchedScalar, values))
        scalars = dict(zip(self.leaves, self._scalars, strict=False))
        self.structure = structure.replace_leaves(scalars) if self.leaves else structure
        return structure

    @contextmanager
    def around(self) -> Iterator[None]:
        """A block in which the attributes of modules are the scalars, and uses of all are noted."""
        if not self.leaves and not self.slots:
            yield
            return
        before = [slot.place[slot.name] for slot in self.slots]
        in_slots = self._scalars[len(self.leaves) :]
        if sys.getprofile() is not None:  # of somebody who measures: it stays, and nothing is free
            self._asks_for_types = True
            yield
            return
        sys.setprofile(self._look)
        try:
            for slot, scalar in zip(self.slots, in_slots, strict=False):
                slot.place[slot.name] = scalar
            yield
        finally:
            sys.setprofile(None)
            for slot, scalar, value in zip(self.slots, in_slots, before, strict=False):
                if slot.place.get(slot.name) is scalar:
                    slot.place[slot.name] = value

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        # `type(n) is int` is the one question that a stand-in cannot answer as its value does
        if event == "call" and not self._asks_for_types and _asks_for_type(frame.f_code):
            self._asks_for_types = not is_about_sizes(frame)

    def finish(self) -> None:
        """Find which were used, or are still referred to by something that the function left."""
        self.structure = Structure(None)
        counts = list(map(sys.getrefcount, self._scalars))
        if max(counts) > counts[-1] and not self._asks_for_types:
            gc.collect()  # frames of PyTorch that are garbage
            counts = list(map(sys.getrefcount, self._scalars))
        self._note(
            [
                self._asks_for_types or scalar.is_read or count > counts[-1]  # that is nowhere
                for scalar, count in zip(self._scalars, counts, strict=True)
            ]
        )

    def _note(self, used: Sequence[bool]) -> None:
        self.read_leaves = list(itertools.compress(self.leaves, used))
        self.read_slots = list(itertools.compress(self.slots, used[len(self.leaves) :]))
        self._scalars = []


@functools.lru_cache(maxsize=4096)
def _asks_for_type(code: CodeType) -> bool:
    """Whether code of the user's asks for the type of something other than `self`."""
    if "type" not in code.co_names or not is_user_written(code.co_filename):
        return False
    pairs = itertools.pairwise(i for i in dis.get_instructions(code) if i.opname != "PUSH_NULL")
    return any(
        asked.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        and asked.argval == "type"
        and following.argval != "self"
        for asked, following in pairs
    )
