"""Rules for the operators of this package themselves: a ragged `vmap` inside a ragged `vmap`.

The segments of all elements lie one after the other, once offsets count from the start of all rows:

    element 0: 2 rows, offsets 0 1 2      element 1: 3 rows, offsets 0 3
    together:  5 rows, offsets 0 1 2 2 5        (between the two is an empty segment, of neither)
"""

from typing import Any

import torch
from torch import Tensor

from torchremat.batching.ragged.layouts.layouts import Packed, Padded, Value
from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize
from torchremat.batching.ragged.layouts.rows import inverse_of
from torchremat.batching.ragged.layouts.take_rows_op import take_rows
from torchremat.batching.ragged.rules.op_call import RULES, RaggedCall
from torchremat.batching.ragged.rules.structural import find_rows


def _rows(call: RaggedCall, value: Value) -> tuple[Tensor, RaggedSize] | None:
    return find_rows(value, 0, call.batch.axis_size)


def _wrap_value(rows: Tensor, extent: Any, call: RaggedCall) -> Value:
    if isinstance(extent, RaggedSize):
        return Packed(rows, 0, extent)
    data = rows.unflatten(0, (call.batch.axis_size, extent))
    return Padded(data, (None,) * (data.dim() - 1))


def _places_of_segments(segments: RaggedSize, ends: RaggedSize) -> Tensor:
    return ends.offsets[segments.element_of_row] + segments.position_of_row


def _as_ragged_size(size: Any, call: RaggedCall, like: Tensor) -> RaggedSize:
    if isinstance(size, RaggedSize):
        return size
    count = call.batch.axis_size
    lengths = torch.full((count,), size, dtype=torch.int64, device=like.device)
    return RaggedSize("", lengths, known_total=size * count)


def _reduce(call: RaggedCall) -> Any:
    data, ends = (_rows(call, v) for v in call.args[:2])
    if data is None or ends is None:
        return NotImplemented
    offsets = ends[0] + data[1].offsets[ends[1].element_of_row]
    found = call.op(data[0], offsets)
    size = call.sizes_of(call.result)[0]
    segments = _as_ragged_size(size, call, offsets)
    places = _places_of_segments(segments, ends[1])
    rows = take_rows(found, places, inverse_of(places, found.shape[0]))
    return _wrap_value(rows, size, call)


def _expand(call: RaggedCall) -> Any:
    values, ends = (_rows(call, v) for v in call.args[:2])
    if values is None or ends is None:
        return NotImplemented
    size = call.sizes_of(call.result)[0]
    extent = _as_ragged_size(size, call, ends[0])
    offsets = ends[0] + extent.offsets[ends[1].element_of_row]
    places = _places_of_segments(values[1], ends[1])
    source = inverse_of(places, offsets.shape[0] - 1)
    spread = take_rows(values[0], source, places, zero=True)
    return _wrap_value(call.op(spread, offsets, extent.total), size, call)


def _softmax(call: RaggedCall) -> Any:
    data, ends = (_rows(call, v) for v in call.args[:2])
    if data is None or ends is None:
        return NotImplemented
    offsets = ends[0] + data[1].offsets[ends[1].element_of_row]
    return _wrap_value(
        call.op(data[0], offsets, *call.args[2:]), call.sizes_of(call.result)[0], call
    )


def _take(call: RaggedCall) -> Any:
    data, index, inverse = (_rows(call, v) for v in call.args[:3])
    if data is None or index is None or inverse is None:
        return NotImplemented
    rows = call.op(
        data[0], _shift_indices(index, data[1]), _shift_indices(inverse, index[1]), *call.args[3:]
    )
    return _wrap_value(rows, call.sizes_of(call.result)[0], call)


def _shift_indices(index: tuple[Tensor, RaggedSize], into: RaggedSize) -> Tensor:
    rows, extent = index
    return torch.where(rows < 0, rows, rows + into.offsets[extent.element_of_row])


RULES.update({
    "torchremat.segment_sum": _reduce,
    "torchremat.segment_max": _reduce,
    "torchremat.segment_min": _reduce,
    "torchremat.segment_expand": _expand,
    "torchremat.segment_softmax": _softmax,
    "torchremat.take_rows": _take,
})  # fmt: skip
