"""Slices in PyTorch 2.11, whose rule for fake tensors gives up at a bound beyond some ends."""

import sys
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true, sym_and

IS_NEEDED = torch.__version__.startswith("2.11.")


def slice_fake(
    x: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> torch.Tensor | None:
    """The result of `aten.slice.Tensor` for sizes that are symbols, as of PyTorch 2.12.

    The older rule gives up where a bound is beyond the end of some elements and not of others.
    `None` stands for a bound that is negative in some elements and not in others.
    """
    size = x.size(dim)
    first = 0 if start is None else _place(start, size)
    ends = end is None or statically_known_true(end == sys.maxsize)
    last = size if ends else _place(end, size)
    if first is None or last is None:
        return None
    if guard_or_false(last >= first):
        length = last - first
    else:
        length = 0 if guard_or_false(first >= last) else torch.sym_max(last - first, 0)
    sizes, strides = list(x.size()), list(x.stride())
    sizes[dim] = (length + step - 1) // step
    offset = x.storage_offset() + first * strides[dim]
    strides[dim] *= step
    return x.as_strided(sizes, strides, offset)


def _place(bound: Any, size: Any) -> Any:
    """`bound`, counted from the start and within `size`; `None` if its sign is not known."""
    if guard_or_false(sym_and(bound >= 0, bound <= size)):
        return bound
    if guard_or_false(sym_and(bound < 0, bound >= -size)):
        return bound + size
    if guard_or_false(bound >= 0):
        return torch.sym_min(bound, size)
    return torch.sym_max(bound + size, 0) if guard_or_false(bound < 0) else None
