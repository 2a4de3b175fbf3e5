"""Tensors that a traced function leaves outside of itself: taken out, and written at each call.

    losses.append(loss)     ->  an output more: loss;   after each call   losses.append(<loss>)
    self.aux = {"z": z}     ->  an output more: z;      after each call   self.aux = {"z": <z>}
    n[0] += 1               ->  after each call   n[0] = 1, of a trace for n[0] == 0

A tensor so written has its gradient, since it is an output of the region. A trace serves only calls
that begin as the traced one did: `self.cache is None`, say. What `read_watch` finds to be unread is
no condition: a list may have any length, and a counter stands still.
"""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Generator, Tensor, nn

from torchremat import _torch
from torchremat.core.slots import identity_of
from torchremat.core.small_arrays import contents_of
from torchremat.errors import EffectError, RetraceError
from torchremat.remat.escapes.edits import (
    CounterEdit,
    Edit,
    ItemsEdit,
    Neighbours,
    SlotEdit,
    leaves_tensors,
)
from torchremat.remat.escapes.find_edits import undo_edits
from torchremat.remat.escapes.forward_hooks import DeferredHook, HookCalls
from torchremat.remat.escapes.holders import ABSENT, read_holder, write_items, write_slot
from torchremat.remat.escapes.passed_arguments import find_containers
from torchremat.remat.escapes.reach import ATOMS, Path, Reach, Roots
from torchremat.remat.escapes.read_watch import Spot, Steps, Watch, reads_unnoted, watch_reads
from torchremat.remat.escapes.templates import CallValues, Template, TemplateMaker, holds_traced


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
        return self.what_changed(roots) is None

    def what_changed(self, roots: Roots) -> str | None:
        """Name something that is not as it was before the trace."""
        for guard in (*self.edits, *self.neighbours):
            try:
                holds = guard.holds(roots)
            except LookupError:
                holds = False
            if not holds:
                name = _name_of(guard)
                return f"what it keeps in {name}" if name else "what it keeps"
        return None

    @property
    def changed_place(self) -> str:
        """The name of something that the edits change, for a message."""
        return next(filter(None, map(_name_of, self.edits)), "a variable")

    def write(self, values: CallValues) -> None:
        """Do to the world what the function does in a call with these tensors."""
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
                target = _find_again(edit, roots)
                if isinstance(edit, ItemsEdit):
                    items = list(target)
                    if edit.first or (not edit.any_length and len(items) != edit.length):
                        padding = [None] * (edit.length - len(items))
                        begin = [*items[: edit.length], *padding]
                        begin = [edit.first.get(i, item) for i, item in enumerate(begin)]
                        write_items(target, begin)
                        stack.callback(write_items, target, items)
                elif isinstance(edit, SlotEdit) and not edit.before.has_tensors:
                    now = read_holder(target).get(edit.key, ABSENT)
                    write_slot(target, edit.key, edit.first)
                    stack.callback(write_slot, target, edit.key, now)
            yield

    @property
    def spots(self) -> dict[Spot, Any]:
        """Places to which the function perhaps only adds: numbers with new values, and lists."""
        return {spot: value for edit in self.edits for spot, value in edit.spots.items()}

    def forget_unread(self, unread: Collection[Spot], roots: Roots) -> None:
        """Let a list that is in `unread` have any length, and a counter stand where it is."""
        values = CallValues((), (), None, roots)
        kept: list[Edit] = []
        for edit in self.edits:
            if edit.spots and all(spot in unread for spot in edit.spots):
                if not leaves_tensors(edit):
                    edit.write(values)
                    continue
                assert isinstance(edit, ItemsEdit), "a number that is kept has a plain template"
                edit.any_length = True
            kept.append(edit)
        self._keep(kept)

    def count_on(self, steps: Mapping[Spot, Steps | None], roots: Roots) -> None:
        """Let a list that is in `steps` have any length, and a counter go on from where it is."""
        kept: list[Edit] = []
        for edit in self.edits:
            if not edit.spots or any(spot not in steps for spot in edit.spots):
                kept.append(edit)
            elif isinstance(edit, ItemsEdit) and edit.appended is not None:
                edit.any_length = True
                kept.append(edit)
                self.targets |= {identity_of(edit.place.find(roots))}
            else:
                kept += self._count_on_in(edit, steps, roots)
        self._keep(kept)

    def _count_on_in(
        self, edit: Edit, steps: Mapping[Spot, Steps | None], roots: Roots
    ) -> Sequence[Edit]:
        target = edit.place.find(roots)
        found = [(spot[1], steps[spot]) for spot in edit.spots]
        counters = [CounterEdit(edit.place, key, how) for key, how in found if how is not None]
        if len(counters) < len(found):  # it is set to a number of its own
            if isinstance(edit, SlotEdit):
                edit.any_before = True
                self.slots |= {(identity_of(target), edit.key)}
            return [edit]
        if isinstance(edit, SlotEdit) and edit.first is ABSENT:  # it begins at a number of its own
            return [edit]
        self.slots |= {(identity_of(target), counter.key) for counter in counters}
        if not _is_namespace(edit.place):
            self.targets |= {id(target)}  # guarded as a whole: the rest of it is for `Neighbours`
            self.neighbours = [n.without(edit.place, dict(found)) for n in self.neighbours]
        return counters

    def _keep(self, edits: list[Edit]) -> None:
        self.edits = edits
        exact = [e for e in edits if not (_has_any_length(e) or _is_counter_by_name(e))]
        places = {edit.place.key for edit in exact}
        self.neighbours = [n for n in self.neighbours if n.place.key in places]


def _is_namespace(place: Path) -> bool:
    """Whether attributes or globals are there, which are guarded one by one."""
    kind, key = place.steps[-1]
    return kind == "slots" or key in ("__dict__", "__globals__")


def _is_counter_by_name(edit: Edit) -> bool:
    return isinstance(edit, CounterEdit) and _is_namespace(edit.place)


def _has_any_length(edit: Edit) -> bool:
    return isinstance(edit, ItemsEdit) and edit.any_length


def _name_of(guard: Edit | Neighbours) -> str:
    key = guard.key if isinstance(guard, SlotEdit) else ""
    return ".".join(filter(None, (str(guard.place), str(key))))


def _find_again(edit: Edit, roots: Roots) -> Any:
    try:
        return edit.place.find(roots)
    except LookupError as error:
        raise RetraceError(
            f"the place {edit.place}, where the function keeps a tensor, is gone in the backward "
            "pass. There it is traced again, since some of its outputs or what it keeps get no "
            "gradient. Keep the tensor where it stays, or let the loss depend on it."
        ) from error


class EscapeWatch:
    """Knows what a function can reach before it runs, and finds what it left there."""

    def __init__(
        self,
        roots: Roots,
        modules: Sequence[nn.Module],
        input_of: Callable[[Tensor], int | None],
        watched: Mapping[Spot, Any] | None = None,
    ) -> None:
        with _torch.without_function_modes(), reads_unnoted():
            self._reach = Reach(roots, modules)
            self._passed = find_containers(roots.arguments)
            self._maker = TemplateMaker(input_of, self._reach.known)
        self._hooks = HookCalls(self._maker)
        self._watched = watched or {}

    def around_reads(self) -> AbstractContextManager[Mapping[Spot, Watch]]:
        """A block in which reads of what is watched are noted. Gives what is known of them."""
        return watch_reads(self._reach, self._watched)

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
        with _torch.without_function_modes(), reads_unnoted():
            maker = self._maker
            maker.made.clear()  # what a hook was called with may have changed since
            edits: list[Edit] = []
            targets, slots, old = set(), set(), set()
            neighbours = []
            for holder in self._reach.holders:
                found = undo_edits(holder, maker)
                edits += found
                if found:
                    neighbours.append(Neighbours.of(holder, found))
                if holder.place.is_in_arguments or any(map(leaves_tensors, found)):
                    targets.add(identity_of(holder.target))
                    for edit in found:
                        if isinstance(edit, SlotEdit):
                            slots.add((identity_of(holder.target), edit.key))
                            old.add(id(holder.before.get(edit.key)))
            self._clear_caches()
        self._hooks.forget()
        marks = frozenset(targets), frozenset(slots), frozenset(old)
        guards = [n for n in neighbours if n is not None]
        return Escapes(edits, guards, self._hooks.deferred, *marks), maker.tensors

    def find_elsewhere(self, value: Any) -> Path | Template | None:
        """Find where a part of the result was before, or how the function leaves it elsewhere.

        The result of a call then has that very object. Tensors and tuples are not looked for.
        """
        if isinstance(value, (Tensor, tuple, type, Generator, Enum, *ATOMS)):
            return None
        place = self._passed.get(id(value)) or self._reach.known.get(id(value))
        if place is None and id(value) in self._maker.made:
            return self._maker.made[id(value)][1]
        return place

    def refuse_changed_arrays(self, name: str) -> None:
        """Raise if the function wrote to an array of NumPy or Python; put back what was there."""
        for array, before, place in self._reach.arrays:
            if contents_of(array) != before:
                memoryview(array).cast("B")[:] = before
                raise EffectError(
                    f"{name} writes to {str(place) or 'an array'}, of type "
                    f"{type(array).__name__}: a checkpoint replays a graph of tensors, which would "
                    "leave it as it is. Keep it in a tensor, or change it outside what is "
                    "checkpointed."
                )

    def _clear_caches(self) -> None:
        for cache in self._reach.caches:
            if any(map(holds_traced, gc.get_referents(cache))):
                cache.cache_clear()
