"""Rules for parts of a value, where a size differs or a bound does: slices, selections, splits.

Bounds are those of Python: negative ones count from the end, others beyond an end stop there. The
size of the result says how many places there are; what is computed here is where they begin.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchremat.batching.ragged.layouts.layouts import Packed, Padded, Value, pack
from torchremat.batching.ragged.layouts.places import Along, put_places
from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize
from torchremat.batching.ragged.layouts.rows import mark_missing, select_place
from torchremat.batching.ragged.rules.matmuls import unsqueeze_value
from torchremat.batching.ragged.rules.op_call import RaggedCall
from torchremat.batching.ragged.rules.views import ALONG_RAGGED


def _slice(call: RaggedCall) -> Any:
    (value,) = call.values
    dim = call.bound["dim"] % value.rank
    size = call.sizes_of(call.result)[dim]
    start, step = call.bound["start"] or 0, call.bound["step"]
    if isinstance(value, Packed) and value.dim == dim and size is value.extent and start == 0:
        return value
    along = Along.of(value, dim, call.batch.axis_size)
    return along.take(_find_start(call, start, along.lengths), _as_step(call, step), size)


def _find_start(call: RaggedCall, start: Any, lengths: Tensor) -> Tensor:
    starts = call.batch.sizes.per_element(start).to(lengths.device)
    return torch.minimum(_from_front(starts, lengths).clamp(min=0), lengths)


def _from_front(places: Tensor, lengths: Tensor) -> Tensor:
    return torch.where(places < 0, places + lengths, places)


def _as_step(call: RaggedCall, step: Any) -> Tensor | int:
    sizes = call.batch.sizes
    return sizes.per_element(step) if sizes.varies(step) else int(sizes.of(step))


def _select(call: RaggedCall) -> Any:
    (value,) = call.values
    dim, index = call.bound["dim"] % value.rank, call.bound["index"]
    if isinstance(value, Packed) and value.dim == dim and isinstance(index, int):
        return select_place(value, index, call.source)
    along = Along.of(value, dim, call.batch.axis_size)
    places = _from_front(call.batch.sizes.per_element(index), along.lengths)
    part = along.take(places, 1, 1)
    assert isinstance(part, Padded)
    size = value.sizes[dim]
    if isinstance(index, int) and isinstance(size, RaggedSize):
        part = replace(part, data=mark_missing(part.data, size, index, call.source))
    extents = (*part.extents[:dim], *part.extents[dim + 1 :])
    return pack(Padded(part.data.squeeze(1 + dim), extents))


def _slice_scatter(call: RaggedCall) -> Any:
    value, part = call.values
    dim, axis_size = call.bound["dim"] % value.rank, call.batch.axis_size
    lengths = Along.of(value, dim, axis_size).lengths
    start = _find_start(call, call.bound["start"] or 0, lengths)
    return put_places(value, part, dim, start, _as_step(call, call.bound["step"]), axis_size)


def _select_scatter(call: RaggedCall) -> Any:
    value, part = call.values
    dim, axis_size = call.bound["dim"] % value.rank, call.batch.axis_size
    lengths = Along.of(value, dim, axis_size).lengths
    places = _from_front(call.batch.sizes.per_element(call.bound["index"]), lengths)
    return put_places(value, unsqueeze_value(part, dim), dim, places, 1, axis_size)


def _split(call: RaggedCall) -> Any:
    (value,) = call.values
    dim = call.bound["dim"] % value.rank
    along = Along.of(value, dim, call.batch.axis_size)
    start = torch.zeros_like(along.lengths)
    parts: list[Value] = []
    for i, result in enumerate(call.result):
        parts.append(along.take(start, 1, call.sizes_of(result)[dim]))
        start = start + call.batch.sizes.per_element(_size_of_part(call, i))
    return parts


def _size_of_part(call: RaggedCall, i: int) -> Any:
    if "split_size" in call.bound:
        return call.bound["split_size"]
    return call.bound["split_sizes"][i]


ALONG_RAGGED.update({
    "aten.slice": _slice, "aten.select": _select, "aten.split": _split,
    "aten.split_with_sizes": _split,
    "aten.slice_scatter": _slice_scatter, "aten.select_scatter": _select_scatter,
})  # fmt: skip
