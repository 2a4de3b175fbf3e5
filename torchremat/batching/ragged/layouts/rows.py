"""Concatenated rows in another order: selections, flips, cat along a dim that differs."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from torchremat.batching.ragged.layouts.layouts import Packed, Padded
from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize
from torchremat.batching.ragged.layouts.take_rows_op import take_rows
from torchremat.errors import RaggedError


def inverse_of(index: Tensor, num_rows: Any) -> Tensor:
    """Where each of `num_rows` rows is in `index`, or -1."""
    inverse = torch.full((num_rows,), -1, dtype=torch.int64, device=index.device)
    return inverse.scatter(0, index, torch.arange(index.shape[0], device=index.device))


def take_places(value: Packed, places: Tensor, extent: RaggedSize) -> Packed:
    """A value of length `extent`: `places` has, for each row of it, the place in its element."""
    index = value.extent.offsets[extent.element_of_row] + places
    rows = take_rows(value.data.movedim(value.dim, 0), index, inverse_of(index, value.extent.total))
    return Packed(rows.movedim(0, value.dim), value.dim, extent)


def _from_start(lengths: Tensor, place: int) -> Tensor:
    return lengths + place if place < 0 else torch.full_like(lengths, place)


def select_place(value: Packed, place: int, source: Any) -> Padded:
    """Select one place of each element, from its end if negative; `source` is for errors."""
    lengths = value.extent.lengths
    places = _from_start(lengths, place)
    index = value.extent.offsets[:-1] + places
    rows = take_rows(value.data.movedim(value.dim, 0), index, inverse_of(index, value.extent.total))
    data = mark_missing(rows, value.extent, place, source)
    return Padded(data, (None,) * (value.rank - 1))


def mark_missing(rows: Tensor, extent: RaggedSize, place: int, source: Any) -> Tensor:
    """`rows`, one of each element at `place`: an element may have no such place.

    That is an error where it can be seen for free, or `rows` have no NaN; else they get NaN.
    """
    needed = place + 1 if place >= 0 else -place
    if extent.known_on_host:
        worst = next((i for i, n in enumerate(extent.host) if n < needed), None)
        if worst is None:
            return rows
        raise RaggedError(
            f"index {place} is out of range for element {worst} of the batch, which has length "
            f"{extent.host[worst]}, at {source}"
        )
    fits = extent.lengths >= needed
    if rows.is_floating_point() or rows.is_complex():
        return torch.where(fits.view(-1, *[1] * (rows.dim() - 1)), rows, torch.nan)
    if not bool(fits.all()):
        raise RaggedError(f"index {place} is out of range for an element of the batch, at {source}")
    return rows


def join_rows(parts: Sequence[tuple[Tensor, Tensor]], dim: int, extent: RaggedSize) -> Packed:
    """Each part has its rows, concatenated over the elements, and the lengths of the elements."""
    before = extent.offsets[:-1]
    targets = []
    for rows, lengths in parts:
        part = RaggedSize("", lengths, known_total=rows.shape[0])
        targets.append(before[part.element_of_row] + part.position_of_row)
        before = before + lengths
    target = torch.cat(targets)
    source = inverse_of(target, target.shape[0])
    rows = take_rows(torch.cat([rows for rows, _ in parts]), source, target)
    return Packed(rows.movedim(0, dim), dim, extent)


def _flat_index(leading: int, extent: RaggedSize) -> tuple[Tensor, Tensor]:
    """The rows of `[leading * total]` in the order of each element's entries, and the inverse."""
    whole = RaggedSize("", extent.lengths * leading, known_total=leading * extent.total)
    element, place = whole.element_of_row, whole.position_of_row
    lengths = extent.lengths[element]
    index = (place // lengths) * extent.total + extent.offsets[element] + place % lengths
    return index, inverse_of(index, index.shape[0])


def flat_rows(value: Packed) -> Tensor:
    """Concatenate all numbers of the elements, element by element: `[total]`."""
    leading = prod(value.data.shape[: value.dim])
    trailing = prod(value.data.shape[value.dim + 1 :])
    data = value.data.reshape(leading * value.extent.total, trailing)
    if leading != 1:
        data = take_rows(data, *_flat_index(leading, value.extent))
    return data.reshape(-1)


def from_flat_rows(rows: Tensor, sizes: tuple[Any, ...], dim: int) -> Packed:
    """Undo `flat_rows`, for elements of `sizes` whose dimension `dim` is ragged."""
    extent: RaggedSize = sizes[dim]
    leading, trailing = prod(sizes[:dim]), prod(sizes[dim + 1 :])
    data = rows.reshape(leading * extent.total, trailing)
    if leading != 1:
        index, inverse = _flat_index(leading, extent)
        data = take_rows(data, inverse, index)
    shape = [s.total if isinstance(s, RaggedSize) else s for s in sizes]
    return Packed(data.reshape(shape), dim, extent)
