"""Runs of a function on fake tensors that are not to leave any of them behind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchremat import _torch
from torchremat.remat.escapes.holders import ABSENT, read_holder, write_items, write_slot
from torchremat.remat.escapes.reach import Holder, Reach, Roots
from torchremat.remat.escapes.templates import holds_traced


@contextmanager
def leave_as_found(function: Callable[..., Any], arguments: tuple[Any, Any]) -> Iterator[None]:
    """Put back what a function writes to in the block, which only asks what it would do.

    In modules and arguments everything is put back. In closures, globals and classes it is what
    holds tensors of a trace: users log there what runs, and libraries what they did once. Errors
    and interrupts are included.

    Args:
        function: what runs in the block.
        arguments: `(args, kwargs)` with which it runs.
    """
    with _torch.without_function_modes():
        holders = Reach(Roots(function, arguments), ()).holders
    try:
        yield
    finally:
        for holder in holders:
            _put_back(holder)


def _put_back(holder: Holder) -> None:
    after = holder.read()
    keeps_plain = _is_of_code(holder)
    if holder.is_sequence:
        _put_back_items(holder, after, keeps_plain)
        return
    for key in {**after, **holder.before}:
        value, before = after.get(key, ABSENT), holder.before.get(key, ABSENT)
        if value is not before and (holds_traced(value) or not keeps_plain):
            write_slot(holder.target, key, before)
    if isinstance(holder.target, dict) and not keeps_plain:
        _put_back_order(holder.target, list(holder.before))


def _put_back_items(holder: Holder, after: list[Any], keeps_plain: bool) -> None:
    known = {id(item) for item in holder.before}
    is_traced = any(id(item) not in known and holds_traced(item) for item in after)
    is_other = list(map(id, after)) != list(map(id, holder.before))
    if is_traced or (is_other and not keeps_plain):
        write_items(holder.target, holder.before)


def _put_back_order(target: dict[Any, Any], keys: list[Any]) -> None:
    """Let the keys of a dict stand as they stood: those of modules order the state dict."""
    now = read_holder(target)
    if list(now) != keys:
        for key in keys:
            write_slot(target, key, ABSENT)
            write_slot(target, key, now[key])


def _is_of_code(holder: Holder) -> bool:
    """Whether it belongs to the function rather than to what it works on."""
    place = holder.place
    through_code = any(key in ("__globals__", "__mro__") for _, key in place.steps)
    return place.root == "function" or through_code or isinstance(holder.target, type)
