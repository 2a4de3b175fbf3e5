"""Backward passes that a user wrote: what they leave outside is found, and refused.

    class Log(torch.autograd.Function):
        def backward(ctx, g):
            norms.append(g.norm())      a graph has no append: the next call would not have it

Unlike the edits of a function, those of a backward pass have no place in a call where they could
be written again. Where Python runs the backward pass at each call, as on a tape, they are right.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchremat.core.source import place_of
from torchremat.errors import EffectError
from torchremat.remat.escapes.escapes import EscapeWatch
from torchremat.remat.escapes.reach import Roots


class OwnBackwards:
    """Watches what the backward pass of each `autograd.Function` in a trace can reach."""

    def __init__(self) -> None:
        self._called: dict[type, None] = {}
        self._watches: list[tuple[Callable[..., Any], EscapeWatch]] = []

    def note_call(self, cls: type) -> None:
        self._called[cls] = None

    def watch(self) -> None:
        """Watch from now on: once what the function itself changed is put back."""
        for backward in map(_find_backward, self._called):
            watch = EscapeWatch(Roots(backward, ((), {})), (), _find_no_input)
            self._watches.append((backward, watch))
        self._called.clear()

    @contextmanager
    def refuse_changes(self) -> Iterator[None]:
        """Put back, after the block, what backward passes changed in it; raise if they did."""
        try:
            yield
        finally:
            text = self._undo()
        if text is not None:
            raise EffectError(
                f"the backward pass {text}: a checkpoint replays a graph of it, and would not "
                "change that at each call."
            )

    def _undo(self) -> str | None:
        texts = []
        for backward, watch in reversed(self._watches):
            escapes, _ = watch.take_out()
            if escapes:
                texts.append(f"{place_of(backward)} changes {escapes.changed_place}")
        self._watches.clear()
        return texts[0] if texts else None


def _find_no_input(tensor: Tensor) -> None:
    return None


def _find_backward(cls: Any) -> Callable[..., Any]:
    """The backward pass, which a class may call `vjp` instead."""
    plain = torch.autograd.Function
    return cls.vjp if cls.backward is plain.backward else cls.backward  # type: ignore[no-any-return]
