"""Values that differ in several dims, from and to the flat data of a pile."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchremat.batching.ragged.layouts.layouts import Padded
from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize
from torchremat.batching.ragged.layouts.rows import inverse_of
from torchremat.batching.ragged.layouts.take_rows_op import take_rows


def flat_pile_data(value: Padded) -> Tensor:
    """Lay the elements of `value` one after another, without padding."""
    whole = find_numel(value.sizes)
    source = _places_in_padded(value.sizes, whole)
    rows = value.data.reshape(-1)
    return take_rows(rows, source, inverse_of(source, rows.shape[0]))


def pad_flat(data: Tensor, sizes: Sequence[Any]) -> Padded:
    """Pad examples that lie one after another in `data`, each of these `sizes`, some ragged."""
    whole = find_numel(sizes)
    whole.known_total = data.shape[0]
    place = _places_in_padded(sizes, whole)
    padded_shape = [s.longest if isinstance(s, RaggedSize) else s for s in sizes]
    count = whole.lengths.shape[0]
    for size in padded_shape:
        count = count * size
    rows = take_rows(data, inverse_of(place, count), place)
    full = rows.reshape(whole.lengths.shape[0], *padded_shape)
    return Padded(full, tuple(s if isinstance(s, RaggedSize) else None for s in sizes))


def find_numel(sizes: Sequence[Any]) -> RaggedSize:
    """How many elements each example of these sizes has."""
    lengths: Any = 1
    for size in sizes:
        lengths = lengths * (size.lengths if isinstance(size, RaggedSize) else size)
    return RaggedSize("*".join(str(getattr(s, "text", s)) for s in sizes), lengths)


def _places_in_padded(sizes: Sequence[Any], whole: RaggedSize) -> Tensor:
    """For each flat entry its place among those of padded data."""
    element, rest = whole.element_of_row, whole.position_of_row
    place = torch.zeros_like(rest)
    stride: Any = 1
    for size in reversed(sizes):
        length = size.lengths[element] if isinstance(size, RaggedSize) else size
        place = place + (rest % length) * stride
        rest = rest // length
        stride = stride * (size.longest if isinstance(size, RaggedSize) else size)
    places: Tensor = place + element * stride
    return places
