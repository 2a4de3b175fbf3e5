"""The values of one node of a graph for a whole batch: shared, padded or packed.

For elements of shapes [2, 5] and [3, 5]:

    Shared   a tensor that is the same for all elements
    Packed   [5, 5], concatenated along the dim that differs
    Padded   [2, 3, 5], with entries that mean nothing

A `Padded` value may have any number of dims that differ, also none: then it is a plain batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize
from torchremat.batching.ragged.layouts.take_rows_op import take_rows
from torchremat.kernels.segments.segments import segment_expand


@dataclass(frozen=True, eq=False)
class Shared:
    """A value that every example has, without a dim for the batch."""

    data: Tensor

    @property
    def rank(self) -> int:
        return self.data.dim()

    @property
    def sizes(self) -> tuple[Any, ...]:
        return tuple(self.data.shape)


@dataclass(frozen=True, eq=False)
class Padded:
    """`extents` has for each dim of an element its extent, `None` where all have the same size."""

    data: Tensor
    extents: tuple[RaggedSize | None, ...]

    @property
    def rank(self) -> int:
        return len(self.extents)

    @property
    def sizes(self) -> tuple[Any, ...]:
        pairs = zip(self.extents, self.data.shape[1:], strict=True)
        return tuple(size if extent is None else extent for extent, size in pairs)

    @property
    def is_ragged(self) -> bool:
        return any(self.extents)


@dataclass(frozen=True, eq=False)
class Packed:
    """A value whose examples lie one after another along `dim`, each as long as `extent` says."""

    data: Tensor
    dim: int
    extent: RaggedSize

    @property
    def rank(self) -> int:
        return self.data.dim()

    @property
    def sizes(self) -> tuple[Any, ...]:
        sizes: list[Any] = list(self.data.shape)
        sizes[self.dim] = self.extent
        return tuple(sizes)


Value = Shared | Padded | Packed


def is_ragged(value: Any) -> bool:
    """Whether the examples of a value differ in a size."""
    return isinstance(value, Packed) or (isinstance(value, Padded) and value.is_ragged)


def batch(data: Tensor) -> Padded:
    """Take a tensor `[axis_size, ...]` whose elements are of one size."""
    return Padded(data, (None,) * (data.dim() - 1))


def as_rows(values: Tensor, extent: RaggedSize) -> Tensor:
    """For each row of concatenated data the value of its element: `[total, ...]`."""
    if values.dtype == torch.bool:
        return segment_expand(values.to(torch.uint8), extent.offsets, extent.total).bool()
    return segment_expand(values, extent.offsets, extent.total)


def pad(value: Value, axis_size: int) -> Padded:
    """Lay the elements side by side, `[axis_size, ...]`, each as long as the longest."""
    if isinstance(value, Padded):
        return value
    if isinstance(value, Shared):
        return batch(value.data.expand(axis_size, *value.data.shape))
    index, inverse = value.extent.padding
    rows = take_rows(value.data.movedim(value.dim, 0), index, inverse)
    data = rows.unflatten(0, (axis_size, value.extent.longest)).movedim(1, 1 + value.dim)
    extents: list[RaggedSize | None] = [None] * value.rank
    extents[value.dim] = value.extent
    return Padded(data, tuple(extents))


def pack(value: Padded) -> Padded | Packed:
    """`value` concatenated, if exactly one size differs and its total can be known."""
    dims = [dim for dim, extent in enumerate(value.extents) if extent is not None]
    if len(dims) != 1:
        return value
    (dim,) = dims
    extent = value.extents[dim]
    assert extent is not None
    if not extent.has_total:
        return value
    index, inverse = extent.padding
    rows = take_rows(value.data.movedim(1 + dim, 1).flatten(0, 1), inverse, index)
    return Packed(rows.movedim(0, dim), dim, extent)


def fill_beyond_ends(value: Padded, dims: Sequence[int], fill: Any) -> Tensor:
    """Write `fill` past the end of each element along `dims`, into a new tensor."""
    data = value.data
    for dim in dims:
        extent = value.extents[dim]
        if extent is not None:
            shape = [1] * data.dim()
            shape[0], shape[1 + dim] = extent.is_valid.shape
            data = data.masked_fill(~extent.is_valid.view(shape), fill)
    return data
