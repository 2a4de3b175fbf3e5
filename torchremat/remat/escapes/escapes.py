"""Tensors that a traced function leaves outside of itself: taken out, and written at each call.

    losses.append(loss)     ->  an output more: loss;   after each call   losses.append(<loss>)
    self.aux = {"z": z}     ->  an output more: z;      after each call   self.aux = {"z": <z>}

A tensor so written has its gradient, since it is an output of the region. A trace serves only calls
that begin as the traced one did: `self.cache is None`, say. A list to which tensors are only
appended may have any length, once a second trace has shown that the function does not read it.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Generator, Tensor, nn

from torchremat import _torch
from torchremat.api_util import same_value
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.remat.escapes.forward_hooks import DeferredHook, HookCalls
from torchremat.remat.escapes.reach import (
    ABSENT,
    ATOMS,
    Holder,
    Path,
    Reach,
    Roots,
    read_holder,
    write_items,
    write_slot,
)
from torchremat.remat.escapes.read_watch import watch_reads
from torchremat.remat.escapes.templates import (
    CallValues,
    Template,
    TemplateMaker,
    holds_traced,
)


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
    if leaf is ABSENT or isinstance(leaf, str | int | float | complex | type(None)):
        return leaf
    return type(leaf)


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

    def holds(self, roots: Roots) -> bool:
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


def _has_name(edit: SlotEdit) -> bool:
    return isinstance(edit.key, str) and edit.key != ""


@dataclass(eq=False)
class ItemsEdit:
    """A list, deque or set with other items: each one that it had, by number, or a new one."""

    place: Path
    items: tuple[int | Template, ...]
    length: int
    old: frozenset[int]
    """The identities of the items before."""
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


@dataclass(frozen=True)
class Neighbours:
    """The plain values that an edit of a dict or list leaves as they are, and the keys of a dict.

    The guards of the trace's variables leave out what is edited, so this takes their place.
    """

    place: Path
    values: tuple[tuple[Any, Any], ...]
    keys: tuple[Any, ...] | None

    def hold(self, roots: Roots) -> bool:
        target = self.place.find(roots)
        if self.keys is not None and tuple(target) != self.keys:
            return False
        if isinstance(target, list | deque):
            return all(k < len(target) and _is_alike(v, target[k]) for k, v in self.values)
        slots = read_holder(target, frozenset(k for k, _ in self.values))
        return all(_is_alike(v, slots.get(k, ABSENT)) for k, v in self.values)


def _neighbours_of(holder: Holder, found: Sequence["Edit"]) -> Neighbours | None:
    if isinstance(holder.target, set) or holder.is_of_module:
        return None
    before, edited = holder.before, {e.key for e in found if isinstance(e, SlotEdit)}
    items = enumerate(before) if holder.is_sequence else before.items()
    values = tuple((k, v) for k, v in items if k not in edited and type(v) in _PLAIN)
    keys = tuple(before) if type(before) is dict and holder.is_container else None
    return Neighbours(holder.place, values, keys) if values or keys is not None else None


_PLAIN = (str, int, float, complex, bool, type(None))

Edit = SlotEdit | ItemsEdit


@dataclass(eq=False)
class Escapes:
    """The edits that one trace made outside, with the tensors of the trace in them."""

    edits: list[Edit] = field(default_factory=list)
    neighbours: Sequence[Neighbours] = ()
    hooks: Sequence[DeferredHook] = ()
    targets: frozenset[int] = frozenset()
    """The identities of the objects that were edited."""
    slots: frozenset[tuple[int, Any]] = frozenset()
    """The identity of each dict that was edited, with the key."""
    old: frozenset[int] = frozenset()
    """The identities of the values that the edits replaced."""
    places: dict[int, Callable[[], Any]] = field(default_factory=dict)
    """How to find captured tensors anew, by their identity before the trace."""

    def __bool__(self) -> bool:
        return bool(self.edits or self.hooks)

    def hold(self, roots: Roots) -> bool:
        """Whether all that the edits change is as it was before the trace."""
        try:
            return all(edit.holds(roots) for edit in self.edits) and all(
                neighbours.hold(roots) for neighbours in self.neighbours
            )
        except LookupError:
            return False

    def write(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        sizes: Sizes | None,
        roots: Roots,
    ) -> None:
        """Do to the world what the function does in a call with these tensors."""
        values = CallValues(outputs, inputs, sizes, roots)
        for edit in self.edits:  # all of them before the first write: one may move what is there
            for template in edit.templates:
                values.make(template)
        for edit in self.edits:
            edit.write(values)
        for hook in self.hooks:
            hook.call(values)

    @contextmanager
    def rewind(self, roots: Roots) -> Iterator[None]:
        """In the block a cache is empty again, and a list as long as it was before the trace."""
        with ExitStack() as stack:
            for edit in self.edits:
                target = edit.place.find(roots)
                if isinstance(edit, ItemsEdit):
                    items = list(target)
                    if not edit.any_length and len(items) != edit.length:
                        padding = [None] * (edit.length - len(items))
                        write_items(target, [*items[: edit.length], *padding])
                        stack.callback(write_items, target, items)
                elif not edit.before.has_tensors:
                    now = read_holder(target).get(edit.key, ABSENT)
                    write_slot(target, edit.key, edit.first)
                    stack.callback(write_slot, target, edit.key, now)
            yield

    def note_captured(self, captured: Sequence[Tensor]) -> None:
        """Note the tensors that the trace reads: a list with one of them keeps its length."""
        read = set(map(id, captured))
        for edit in self.edits:
            if isinstance(edit, ItemsEdit) and read & edit.old:
                edit.any_length = False

    @property
    def lists_that_grow(self) -> frozenset[Any]:
        """The keys of the places of lists to which tensors are only appended."""
        items = (edit for edit in self.edits if isinstance(edit, ItemsEdit))
        return frozenset(edit.place.key for edit in items if edit.appended is not None)


class EscapeWatch:
    """Knows what a function can reach before it runs, and finds what it left there."""

    def __init__(
        self,
        roots: Roots,
        modules: Sequence[nn.Module],
        input_of: Callable[[Tensor], int | None],
        growing: frozenset[Any] = frozenset(),
    ) -> None:
        with _torch.without_function_modes():
            self._reach = Reach(roots, modules)
            self._maker = TemplateMaker(input_of, self._reach.known)
        self._hooks = HookCalls(self._maker)
        holders = self._reach.holders if growing else []
        self._growing = [h.target for h in holders if h.before and h.place.key in growing]
        """Lists that had a tensor before: PyTorch reads tensors of a list without its methods."""
        self._is_unread: Callable[[Any], bool] = lambda _: False

    @contextmanager
    def around_reads(self) -> Iterator[None]:
        """A block in which reads of lists that grow are noted."""
        with watch_reads(self._growing) as self._is_unread:
            yield

    def knows(self, generator: Generator) -> bool:
        """Whether the function could reach `generator` before it ran."""
        return _torch.generator_id(generator) in self._reach.generators

    def around_hooks(self) -> AbstractContextManager[None]:
        """A block in which forward hooks are noted, to be called later or to be in the graph."""
        return self._hooks.stand_in(self._reach.modules)

    def places_of(
        self, tensors: Sequence[Tensor], get_function: Callable[[], Any]
    ) -> dict[int, Callable[[], Any]]:
        """For those of `tensors` that the function can reach: how to find what is there later."""
        known = self._reach.known
        return {id(t): known[id(t)].follow_later(get_function) for t in tensors if id(t) in known}

    def take_out(self) -> tuple[Escapes, list[Tensor]]:
        """Put the world back as it was; return the edits, and the tensors of the trace in them."""
        with _torch.without_function_modes():
            maker = self._maker
            edits: list[Edit] = []
            targets, slots, old = set(), set(), set()
            neighbours = []
            for holder in self._reach.holders:
                found = _edits_of(holder, maker, self._is_unread)
                if found:
                    edits += found
                    neighbours.append(_neighbours_of(holder, found))
                    targets.add(id(holder.target))
                    for edit in found:
                        if isinstance(edit, SlotEdit):
                            slots.add((id(holder.target), edit.key))
                            old.add(id(holder.before.get(edit.key)))
            self._clear_caches()
        self._hooks.forget()
        marks = frozenset(targets), frozenset(slots), frozenset(old)
        guards = [n for n in neighbours if n is not None]
        return Escapes(edits, guards, self._hooks.deferred, *marks), maker.tensors

    def _clear_caches(self) -> None:
        for cache in self._reach.caches:
            if any(map(holds_traced, gc.get_referents(cache))):
                cache.cache_clear()


def _edits_of(holder: Holder, maker: TemplateMaker, is_unread: Callable[[Any], bool]) -> list[Edit]:
    """The edits of `holder`, which are undone, if a tensor of the trace is among what it holds."""
    after = holder.read()
    if holder.is_sequence:
        return _edit_of_items(holder, after, maker, is_unread)
    changed = [k for k in after if after[k] is not holder.before.get(k, ABSENT)]
    if not holder.place.is_in_arguments and not any(holds_traced(after[k]) for k in changed):
        return []
    edits: list[Edit] = []
    for key in [*changed, *(k for k in holder.before if k not in after)]:
        before, value = holder.before.get(key, ABSENT), after.get(key, ABSENT)
        if not holds_traced(value) and _is_same(before, value):
            continue
        extends = None
        if type(before) is tuple and type(value) is tuple and _begins_with(value, before):
            extends, value = len(before), value[len(before) :]
        template = None if value is ABSENT else maker.make(value)
        kind = Before(before)
        first = None if kind.has_tensors else before
        edits.append(SlotEdit(holder.place, key, template, kind, first, extends))
    for key in changed:
        write_slot(holder.target, key, holder.before.get(key, ABSENT))
    for key in holder.before:
        if key not in after:
            write_slot(holder.target, key, holder.before[key])
    return edits


def _edit_of_items(
    holder: Holder,
    after: list[Any],
    maker: TemplateMaker,
    is_unread: Callable[[Any], bool],
) -> list[Edit]:
    before = holder.before
    if len(after) == len(before) and all(a is b for a, b in zip(after, before, strict=True)):
        return []
    numbers = {id(item): i for i, item in enumerate(before) if not isinstance(item, ATOMS)}
    new = [item for item in after if id(item) not in numbers]
    if not holder.place.is_in_arguments and not any(map(holds_traced, new)):
        return []
    if isinstance(holder.target, set):
        kept = [item for item in before if item in holder.target]
        after = [*kept, *new]
    items: list[int | Template] = []
    for i, item in enumerate(after):
        at_place = i < len(before) and before[i] is item
        number = i if at_place else numbers.get(id(item))
        items.append(maker.make(item) if number is None else number)
    write_items(holder.target, before)
    old = frozenset(map(id, before))
    edit = ItemsEdit(holder.place, tuple(items), len(before), old)
    edit.any_length = edit.appended is not None and is_unread(holder.target)
    return [edit]


def _begins_with(value: tuple[Any, ...], start: tuple[Any, ...]) -> bool:
    return len(value) > len(start) and all(a is b for a, b in zip(value, start, strict=False))


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    return a is b or (type(a) is type(b) and same_value(a, b))
