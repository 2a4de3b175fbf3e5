"""Runs of a function on fake tensors that are not to leave any of them behind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchremat import _torch
from torchremat.remat.escapes.holders import ABSENT, write_items, write_slot
from torchremat.remat.escapes.reach import Holder, Reach, Roots
from torchremat.remat.escapes.templates import holds_traced


@contextmanager
def leave_as_found(function: Callable[..., Any], arguments: tuple[Any, Any]) -> Iterator[None]:
    """Put back what a function overwrote with tensors of a trace in the block, errors included.

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
    if holder.is_sequence:
        known = {id(item) for item in holder.before}
        if any(id(item) not in known and holds_traced(item) for item in after):
            write_items(holder.target, holder.before)
        return
    for key, value in after.items():
        before = holder.before.get(key, ABSENT)
        if value is not before and holds_traced(value):
            write_slot(holder.target, key, before)
