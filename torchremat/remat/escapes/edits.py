"""A change that a trace made outside of the function: its guard, and how to repeat it."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from torchremat import _torch
from torchremat.api_util import same_value
from torchremat.remat.escapes.holders import ABSENT, read_holder, write_items, write_slot
from torchremat.remat.escapes.reach import ATOMS, Holder, Path, Roots
from torchremat.remat.escapes.read_watch import Spot, Steps, read_at, write_at
from torchremat.remat.escapes.templates import CallValues, Template


class Before:
    """A slot before a trace: nothing, plain values, or a tree with tensors of a kind."""

    def __init__(self, value: Any) -> None:
        self._leaves, self._spec = _parts_of(value)

    @property
    def has_tensors(self) -> bool:
        return any(isinstance(leaf, _TensorLike) for leaf in self._leaves)

    def is_like(self, value: Any) -> bool:
        leaves, spec = _parts_of(value)
        return spec == self._spec and all(map(_is_alike, self._leaves, leaves))


@dataclass(frozen=True)
class _TensorLike:
    shape: Any
    dtype: Any


def _parts_of(value: Any) -> tuple[list[Any], Any]:
    leaves, spec = _torch.tree_flatten(value)
    return [_kind_of(leaf) for leaf in leaves], spec


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _TensorLike(leaf.shape, leaf.dtype)
    return leaf if leaf is ABSENT or isinstance(leaf, ATOMS) else type(leaf)


def _is_alike(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and (same_value(a, b) or bool(a == b)))


@dataclass(eq=False)
class SlotEdit:
    """A slot that holds another value after the trace, or none (`template` is `None`)."""

    place: Path
    key: Any
    template: Template | None
    before: Before
    first: Any = None
    """The value before, if there was no tensor in it."""
    extends: int | None = None
    """The length of a tuple that was there before, to which a tuple is added."""
    numbers: Mapping[Spot, Any] = field(default_factory=dict)
    """The spot of a number, with its value after the trace: perhaps a counter that is not read."""
    any_before: bool = False
    """Whether any value may be in the slot before, since the function did not read it."""

    def holds(self, roots: Roots) -> bool:
        if self.any_before:
            return True
        slots = read_holder(
            self.place.find(roots), frozenset([self.key]) if _has_name(self) else None
        )
        return self.before.is_like(slots.get(self.key, ABSENT))

    def write(self, values: CallValues) -> None:
        target = self.place.find(values.roots)
        value = ABSENT if self.template is None else values.make(self.template)
        if self.extends is not None:
            assert isinstance(value, tuple)
            value = (*read_holder(target)[self.key], *value)
        write_slot(target, self.key, value)

    @property
    def templates(self) -> Sequence[Template]:
        return () if self.template is None else (self.template,)

    @property
    def signature(self) -> Any:
        return (self.place.key, self.key, self.template and self.template.signature)

    @property
    def spots(self) -> Mapping[Spot, Any]:
        return self.numbers


def _has_name(edit: SlotEdit) -> bool:
    return isinstance(edit.key, str) and edit.key != ""


@dataclass(eq=False)
class ItemsEdit:
    """A list, deque or set with other items: each one that it had, by number, or a new one."""

    place: Path
    items: tuple[int | Template, ...]
    length: int
    first: Mapping[int, Any] = field(default_factory=dict)
    """Plain items before the trace that have another in their place, by number."""
    spots: Mapping[Spot, Any] = field(default_factory=dict)
    """Spots of numbers with the values after the trace, or the spot of a list that grows."""
    any_length: bool = False
    """Whether the length may be another, since the function did not read the list."""

    @property
    def templates(self) -> Sequence[Template]:
        return [item for item in self.items if isinstance(item, Template)]

    @property
    def appended(self) -> tuple[int | Template, ...] | None:
        kept, new = self.items[: self.length], self.items[self.length :]
        is_longer = kept == tuple(range(self.length))
        return new if is_longer and all(isinstance(i, Template) for i in new) else None

    def holds(self, roots: Roots) -> bool:
        return self.any_length or len(self.place.find(roots)) == self.length

    def write(self, values: CallValues) -> None:
        target = self.place.find(values.roots)
        new = self.appended
        if new is not None:
            made = [values.make(t) for t in new]  # type: ignore[arg-type]
            (target.update if isinstance(target, set) else target.extend)(made)
            return
        before = list(target)
        made = [before[i] if isinstance(i, int) else values.make(i) for i in self.items]
        write_items(target, made)

    @property
    def signature(self) -> Any:
        items = self.items if self.appended is None else self.appended
        return (self.place.key, *(i if isinstance(i, int) else i.signature for i in items))


@dataclass(frozen=True, eq=False)
class CounterEdit:
    """A number that the function does not read, but counts on with: whatever is there serves."""

    place: Path
    key: Any
    steps: Steps

    templates: ClassVar[Sequence[Template]] = ()
    spots: ClassVar[Mapping[Spot, Any]] = {}

    def holds(self, roots: Roots) -> bool:
        return type(read_at(self.place.find(roots), self.key)) in (int, float)

    def write(self, values: CallValues) -> None:
        target = self.place.find(values.roots)
        value = read_at(target, self.key)
        for operation, other in self.steps:
            value = operation(value, other)
        write_at(target, self.key, value)

    @property
    def signature(self) -> Any:
        return (self.place.key, self.key, self.steps)


Edit = SlotEdit | ItemsEdit | CounterEdit


def leaves_tensors(edit: Edit) -> bool:
    """Whether there is a tensor in what `edit` writes."""
    return any(not template.is_plain for template in edit.templates)


@dataclass(frozen=True)
class Neighbours:
    """The plain values that an edit of a dict or list leaves as they are, and the keys of a dict.

    The guards of the trace's variables leave out what is edited, so this takes their place.
    """

    place: Path
    values: tuple[tuple[Any, Any], ...]
    keys: Any
    """The keys of a dict in order, or the items of a set."""

    @classmethod
    def of(cls, holder: Holder, found: Sequence[Edit]) -> "Neighbours | None":
        if holder.is_of_module:
            return None
        before, edited = holder.before, {e.key for e in found if isinstance(e, SlotEdit)}
        if isinstance(holder.target, set):
            is_plain = all(isinstance(item, ATOMS) for item in before)
            return cls(holder.place, (), frozenset(before)) if is_plain else None
        items = enumerate(before) if holder.is_sequence else before.items()
        values = tuple((k, v) for k, v in items if k not in edited and type(v) in _PLAIN)
        keys = tuple(before) if type(before) is dict and holder.is_container else None
        return cls(holder.place, values, keys) if values or keys is not None else None

    def without(self, place: Path, keys: Collection[Any]) -> "Neighbours":
        """These values but those at `keys`, if they are of `place`."""
        if place.key != self.place.key:
            return self
        return replace(self, values=tuple(pair for pair in self.values if pair[0] not in keys))

    def holds(self, roots: Roots) -> bool:
        target = self.place.find(roots)
        if isinstance(target, set):
            return bool(target == self.keys)
        if self.keys is not None and tuple(target) != self.keys:
            return False
        if isinstance(target, list | deque):
            return all(k < len(target) and _is_alike(v, target[k]) for k, v in self.values)
        slots = read_holder(target, frozenset(k for k, _ in self.values))
        return all(_is_alike(v, slots.get(k, ABSENT)) for k, v in self.values)


_PLAIN = (str, int, float, complex, bool, type(None))
