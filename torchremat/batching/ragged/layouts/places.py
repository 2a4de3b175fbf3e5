"""Places along one dim of a value, which begin and end elsewhere in each element.

Rows are the places of all elements along the dim, one element after the other:

    Shared [128, 5]            128 rows, which all elements have
    Packed [total, 5]          total rows
    Padded [axis_size, 8, 5]   axis_size * 8 rows
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchremat.batching.ragged.layouts.layouts import (
    Packed,
    Padded,
    Shared,
    Value,
    pack,
    pad,
)
from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize
from torchremat.batching.ragged.layouts.take_rows_op import take_rows


@dataclass(frozen=True, eq=False)
class Along:
    """`extents` has the sizes of an element: `None` for `dim`, and where all have the same."""

    rows: Tensor
    dim: int
    begins: Tensor
    """`[axis_size]`: the first row of each element."""
    lengths: Tensor
    """`[axis_size]`: how many places each element has."""
    extents: tuple[RaggedSize | None, ...]
    is_shared: bool

    @classmethod
    def of(cls, value: Value, dim: int, axis_size: int) -> "Along":
        device = value.data.device
        if isinstance(value, Shared):
            begins = torch.zeros(axis_size, dtype=torch.int64, device=device)
            lengths = torch.full_like(begins, value.data.shape[dim])
            none = (None,) * value.rank
            return cls(value.data.movedim(dim, 0), dim, begins, lengths, none, True)
        if isinstance(value, Packed) and value.dim == dim:
            rows, none = value.data.movedim(dim, 0), (None,) * value.rank
            return cls(rows, dim, value.extent.offsets[:-1], value.extent.lengths, none, False)
        full = pad(value, axis_size)
        count = full.data.shape[1 + dim]
        begins = torch.arange(axis_size, device=device) * count
        extent = full.extents[dim]
        lengths = torch.full_like(begins, count) if extent is None else extent.lengths
        rows = full.data.movedim(1 + dim, 1).flatten(0, 1)
        others = tuple(None if d == dim else e for d, e in enumerate(full.extents))
        return cls(rows, dim, begins, lengths, others, False)

    def take(self, start: Tensor, step: Tensor | int, size: Any) -> Value:
        """`start`, `start + step`, ... of each element: as many as `size` says."""
        is_ragged = isinstance(size, RaggedSize)
        packs = is_ragged and size.has_total and not any(self.extents)
        places = find_places(start, step, size, packs)
        return self.at(places, size, packs)

    def at(self, places: Tensor, size: Any, packs: bool) -> Value:
        """The value that has these places along the dim, as `find_places` gives them."""
        index = find_rows_of(places, self.begins, size, packs)
        if not self.is_shared:
            rows = take_rows(self.rows, index, invert(index, self.rows.shape[0]))
        elif self.rows.shape[0]:
            rows = self.rows.index_select(0, index.clamp(min=0))
        else:
            rows = self.rows.new_zeros((index.shape[0], *self.rows.shape[1:]))
        return self.wrap(rows, size, packs)

    def wrap(self, rows: Tensor, size: Any, packs: bool) -> Value:
        dim = self.dim
        if packs:
            return Packed(rows.movedim(0, dim), dim, size)
        data = rows.unflatten(0, (self.begins.shape[0], count_of(size))).movedim(1, 1 + dim)
        extent = size if isinstance(size, RaggedSize) else None
        return Padded(data, (*self.extents[:dim], extent, *self.extents[dim + 1 :]))


def count_of(size: Any) -> Any:
    """Count the places along a size: of a ragged one, those of the longest element."""
    return size.longest if isinstance(size, RaggedSize) else size


def find_places(start: Tensor, step: Tensor | int, size: Any, packs: bool) -> Tensor:
    """The places: `[total]` if they are packed, else `[axis_size, count]`.

    `start` has a number for each element, and `step` may.
    """
    if packs:
        element = size.element_of_row
        step = step[element] if isinstance(step, Tensor) else step
        packed: Tensor = start[element] + size.position_of_row * step
        return packed
    step = step[:, None] if isinstance(step, Tensor) else step
    places: Tensor = start[:, None] + torch.arange(count_of(size), device=start.device) * step
    return places


def find_rows_of(places: Tensor, begins: Tensor, size: Any, packs: bool) -> Tensor:
    """The row of each place; -1 for places that are beyond the end of an element."""
    if packs:
        return begins[size.element_of_row] + places
    rows = begins[:, None] + places
    if isinstance(size, RaggedSize):
        rows = torch.where(size.is_valid, rows, -1)
    return rows.flatten()


def invert(index: Tensor, num_rows: Any) -> Tensor:
    """Where each of `num_rows` rows is in `index`, or -1; `index` has -1 for holes."""
    target = torch.where(index < 0, num_rows, index)
    inverse = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=index.device)
    places = torch.arange(index.shape[0], device=index.device)
    return inverse.scatter(0, target, places)[:-1]


def put_places(
    value: Value, part: Value, dim: int, start: Tensor, step: Tensor | int, axis_size: int
) -> Value:
    """`value` with the rows of `part` at `start`, `start + step`, ... of each element."""
    into = Along.of(pad(value, axis_size) if isinstance(value, Shared) else value, dim, axis_size)
    packs = isinstance(part, Packed) and part.dim == dim
    given = Along.of(part if packs else pad(part, axis_size), dim, axis_size)
    size = part.sizes[dim]
    target = find_rows_of(find_places(start, step, size, packs), into.begins, size, packs)
    source = invert(target, into.rows.shape[0])
    new = take_rows(given.rows, source, target, zero=True)
    is_new = (source >= 0).view(-1, *[1] * (into.rows.dim() - 1))
    rows = torch.where(is_new, new.to(into.rows.dtype), into.rows)
    if isinstance(value, Packed) and value.dim == dim:
        return Packed(rows.movedim(0, dim), dim, value.extent)
    extents = pad(value, axis_size).extents
    data = rows.unflatten(0, (axis_size, -1)).movedim(1, 1 + dim)
    return pack(Padded(data, extents))
