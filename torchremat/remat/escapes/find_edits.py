"""Finds what a function changed in an object that it reaches, by what was there before."""

import copy
from typing import Any

from torch import Tensor

from torchremat import _torch
from torchremat.api_util import same_value
from torchremat.remat.escapes.edits import Before, Edit, ItemsEdit, SlotEdit
from torchremat.remat.escapes.holders import ABSENT, write_items, write_slot
from torchremat.remat.escapes.reach import ATOMS, Holder
from torchremat.remat.escapes.templates import Template, TemplateMaker, holds_traced

_NUMBERS = (int, float)
# Chosen by hand: a tuple in a list in a dict has three.
_MOST_LEVELS = 4


def undo_edits(holder: Holder, maker: TemplateMaker) -> list[Edit]:
    """The edits of `holder`, which are undone.

    Where no tensor of the trace is among them, attributes of modules are left to `ModuleState`. An
    object that takes the place of another is then taken to be its like.
    """
    after = holder.read()
    if holder.is_sequence:
        return _undo_items(holder, after, maker)
    before = holder.before
    changed = [
        k for k in after if after[k] is not before.get(k, ABSENT) and k != _torch.MARK_OF_DYNAMO
    ]
    removed = [k for k in before if k not in after]
    if not holder.place.is_in_arguments and not any(holds_traced(after[k]) for k in changed):
        if holder.is_noted_by_modules:
            return []
        changed = [k for k in changed if _is_value(after[k]) or _is_value(before.get(k, ABSENT))]
    edits: list[Edit] = []
    for key in [*changed, *removed]:
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if holds_traced(new) or not _is_same(old, new):
            edits.append(_slot_edit(holder, key, old, new, maker))
    for key in [*changed, *removed]:
        write_slot(holder.target, key, before.get(key, ABSENT))
    return edits


def _slot_edit(holder: Holder, key: Any, old: Any, new: Any, maker: TemplateMaker) -> SlotEdit:
    extends, value = None, new
    if type(old) is tuple and type(new) is tuple and _begins_with(new, old):
        extends, value = len(old), new[len(old) :]
    template = None if value is ABSENT else _template_of(value, maker)
    kind = Before(old)
    first = None if kind.has_tensors else old
    edit = SlotEdit(holder.place, key, template, kind, first, extends)
    if _may_count(holder) and (old is ABSENT or type(old) in _NUMBERS) and type(new) in _NUMBERS:
        edit.numbers = {(holder.place.key, key): new}
    return edit


def _undo_items(holder: Holder, after: list[Any], maker: TemplateMaker) -> list[Edit]:
    before = holder.before
    if len(after) == len(before) and all(a is b for a, b in zip(after, before, strict=True)):
        return []
    is_plain_set = isinstance(holder.target, set) and all(isinstance(i, ATOMS) for i in before)
    numbers = {id(item): i for i, item in enumerate(before) if not isinstance(item, ATOMS)}
    new = [item for item in after if id(item) not in numbers]
    is_plain = not holder.place.is_in_arguments and not any(map(holds_traced, new))
    if is_plain and holder.is_noted_by_modules:
        return []
    if isinstance(holder.target, set):
        kept = [item for item in before if item in holder.target]
        added = [item for item in new if item not in before] if is_plain_set else new
        after = [*kept, *added]
        if is_plain_set and len(kept) == len(before) and not added:
            return []
    items: list[int | Template] = []
    for i, item in enumerate(after):
        at_place = i < len(before) and before[i] is item
        number = i if at_place and not (is_plain_set and kept != before) else numbers.get(id(item))
        items.append(_template_of(item, maker) if number is None else number)
    write_items(holder.target, before)
    edit = ItemsEdit(holder.place, tuple(items), len(before))
    if edit.appended is None and not isinstance(holder.target, set):
        edit.first = {i: v for i, v in enumerate(before) if isinstance(v, ATOMS)}
    if _may_count(holder) and type(holder.target) is list:
        edit.spots = _spots_of(edit, before, after)
    return [edit]


def _spots_of(edit: ItemsEdit, before: list[Any], after: list[Any]) -> dict[Any, Any]:
    place = edit.place.key
    if edit.appended is not None:
        return {(place, None): None}
    if len(after) != len(before):
        return {}
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a is not b]
    if all(type(before[i]) in _NUMBERS and type(after[i]) in _NUMBERS for i in changed):
        return {(place, i): after[i] for i in changed}
    return {}


def _may_count(holder: Holder) -> bool:
    return not (holder.place.is_in_arguments or holder.is_noted_by_modules)


def _template_of(value: Any, maker: TemplateMaker) -> Template:
    made = maker.make(value)
    if made.is_plain and type(value) in (list, dict, set) and _is_value(value):
        snapshot = copy.deepcopy(value)  # the next call changes what the last has made
        made = Template(lambda _: copy.deepcopy(snapshot), made.signature, is_plain=True)
        maker.made[id(value)] = (value, made)
    return made


def _is_value(value: Any, levels: int = _MOST_LEVELS) -> bool:
    """Whether `value` is nothing, a number, a text or the like, or a container of such."""
    if value is ABSENT or isinstance(value, ATOMS):
        return True
    if levels and type(value) in (list, tuple, set, frozenset, dict):
        items = value.values() if type(value) is dict else value
        return all(_is_value(item, levels - 1) for item in items)
    return False


def _begins_with(value: tuple[Any, ...], start: tuple[Any, ...]) -> bool:
    return len(value) > len(start) and all(a is b for a, b in zip(value, start, strict=False))


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    return a is b or (type(a) is type(b) and same_value(a, b))
