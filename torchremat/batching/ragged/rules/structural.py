"""Rules along the dim whose size differs: select, slice, flip, roll, cat, pad; new tensors."""

from typing import Any

import torch
from torch import Tensor

from torchremat.batching.ragged.layouts.layouts import Packed, Padded, Value, pad
from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize
from torchremat.batching.ragged.layouts.rows import (
    constant_slice,
    join_rows,
    put,
    select_place,
    slice_places,
    take_places,
)
from torchremat.batching.ragged.rules.matmuls import unsqueeze_value
from torchremat.batching.ragged.rules.op_call import RaggedCall, as_padded, rule
from torchremat.batching.ragged.rules.pointwise import broadcast_to, map_entries
from torchremat.batching.ragged.rules.views import ALONG_RAGGED


def _select(call: RaggedCall) -> Any:
    (value,) = call.values
    index = call.bound["index"]
    if not isinstance(value, Packed) or not isinstance(index, int):
        return NotImplemented
    return select_place(value, index, call.source)


def _slice(call: RaggedCall) -> Any:
    (value,) = call.values
    bound = call.bound
    start, step = bound["start"] or 0, bound["step"]
    sizes = call.sizes_of(call.result)
    if not isinstance(value, Packed):
        return NotImplemented
    extent = sizes[value.dim]
    is_whole = start == 0 and step == 1 and extent is value.extent
    if is_whole:
        return value
    if call.batch.sizes.varies(start):
        if not isinstance(extent, RaggedSize):
            return NotImplemented
        return slice_places(value, call.batch.sizes.compute_numbers(start), step, extent)
    start = call.batch.sizes.of(start)
    if not isinstance(extent, RaggedSize):
        stop = start + extent * step
        return constant_slice(value, start, stop, step, call.source)
    return slice_places(value, start, step, extent)


def _flip(call: RaggedCall) -> Any:
    (value,) = call.values
    if not isinstance(value, Packed):
        return NotImplemented
    others = [d % value.rank for d in call.bound["dims"] if d % value.rank != value.dim]
    extent = value.extent
    places = extent.lengths[extent.element_of_row] - 1 - extent.position_of_row
    result = take_places(value, places, extent)
    return Packed(result.data.flip(others), value.dim, extent) if others else result


def _roll(call: RaggedCall) -> Any:
    (value,) = call.values
    if not isinstance(value, Packed) or len(call.bound["dims"]) != 1:
        return NotImplemented
    (shift,) = call.bound["shifts"]
    if not isinstance(shift, int):
        return NotImplemented
    extent = value.extent
    lengths = extent.lengths[extent.element_of_row]
    return take_places(value, (extent.position_of_row - shift) % lengths, extent)


def _cat(call: RaggedCall) -> Any:
    dim = call.dims_along(call.values[0].rank)[0]
    extent = call.sizes_of(call.result)[dim]
    parts = []
    for value in call.values:
        part = find_rows(value, dim, call.batch.axis_size)
        if part is None:
            return NotImplemented
        parts.append((part[0], part[1].lengths))
    return join_rows(parts, dim, extent)


def _pad(call: RaggedCall) -> Any:
    (value,) = call.values
    pads = list(call.bound["pad"])
    place = 2 * (value.rank - 1 - value.dim) if isinstance(value, Packed) else 0
    if not isinstance(value, Packed) or min(pads[place : place + 2]) < 0:
        return NotImplemented
    extent = call.sizes_of(call.result)[value.dim]
    counts, pads[place : place + 2] = pads[place : place + 2], [0, 0]
    data = torch.constant_pad_nd(value.data, pads, call.bound["value"])
    rows = data.movedim(value.dim, 0)
    lengths = value.extent.lengths
    before, after = (
        (
            rows.new_full((lengths.shape[0] * count, *rows.shape[1:]), call.bound["value"]),
            torch.full_like(lengths, count),
        )
        for count in counts
    )
    return join_rows([before, (rows, lengths), after], value.dim, extent)


def _repeat(call: RaggedCall) -> Any:
    (value,) = call.values
    repeats = list(call.bound["repeats"])
    if not isinstance(value, Packed) or len(repeats) != value.rank:
        return NotImplemented
    count, repeats[value.dim] = repeats[value.dim], 1
    if not isinstance(count, int) or count < 1:
        return NotImplemented
    rows = value.data.repeat(repeats).movedim(value.dim, 0)
    extent = call.sizes_of(call.result)[value.dim]
    return join_rows([(rows, value.extent.lengths)] * count, value.dim, extent)


def _slice_scatter(call: RaggedCall) -> Any:
    value, part = call.values
    dim, axis_size = call.bound["dim"] % value.rank, call.batch.axis_size
    start, step = call.bound["start"] or 0, call.bound["step"]
    return _put(call, value, find_rows(part, dim, axis_size), dim, start, step)


def _select_scatter(call: RaggedCall) -> Any:
    value, part = call.values
    dim = call.bound["dim"] % value.rank
    full = unsqueeze_value(pad(part, call.batch.axis_size), dim)
    return _put(
        call, value, find_rows(full, dim, call.batch.axis_size), dim, call.bound["index"], 1
    )


def find_rows(value: Value, dim: int, axis_size: int) -> tuple[Tensor, RaggedSize] | None:
    if isinstance(value, Packed):
        return (value.data.movedim(dim, 0), value.extent) if value.dim == dim else None
    full = pad(value, axis_size)
    if full.is_ragged:
        return None
    rows = full.data.movedim(1 + dim, 1).flatten(0, 1)
    lengths = torch.full((axis_size,), full.data.shape[1 + dim], device=rows.device)
    return rows, RaggedSize("", lengths, known_total=rows.shape[0])


def _put(
    call: RaggedCall,
    value: Value,
    part: tuple[Tensor, RaggedSize] | None,
    dim: int,
    start: Any,
    step: int,
) -> Any:
    if part is None or not isinstance(value, Packed) or value.dim != dim:
        return NotImplemented
    sizes = call.batch.sizes
    begin = sizes.compute_numbers(start) if sizes.varies(start) else sizes.of(start)
    return put(value, *part, begin, step)


def _split(call: RaggedCall) -> Any:
    (value,) = call.values
    if not isinstance(value, Packed):
        return NotImplemented
    parts: list[Value] = []
    start = 0
    for result in call.result:
        size = call.sizes_of(result)[value.dim]
        if isinstance(size, RaggedSize):
            parts.append(slice_places(value, start, 1, size))
            if result is not call.result[-1]:
                return NotImplemented
        else:
            parts.append(constant_slice(value, start, start + size, 1, call.source))
            start += size
    return parts


ALONG_RAGGED.update({
    "aten.select": _select, "aten.slice": _slice, "aten.flip": _flip, "aten.roll": _roll,
    "aten.cat": _cat, "aten.split_with_sizes": _split,
    "aten.constant_pad_nd": _pad, "aten.repeat": _repeat,
    "aten.slice_scatter": _slice_scatter, "aten.select_scatter": _select_scatter,
})  # fmt: skip


@rule("stack")
def _stack(call: RaggedCall) -> Any:
    rank = call.values[0].rank + 1
    dim = call.bound["dim"] % rank
    sizes = call.sizes_of(call.result)
    wanted = (*sizes[:dim], 1, *sizes[dim + 1 :])
    parts = [broadcast_to(call.batch, unsqueeze_value(v, dim), wanted) for v in call.values]
    shift = dim - rank
    return map_entries(call.batch, lambda *t: torch.cat(t, shift), parts, wanted)


@rule(
    "zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full", "rand",
    "randn", "randint", "empty_strided", "new_empty_strided", "eye",
)  # fmt: skip
def _make_new(call: RaggedCall) -> Any:
    call.check_random()
    sizes = call.sizes_of(call.result)
    options = {"dtype": call.result.dtype, "device": call.result.device}
    places = [i for i, size in enumerate(sizes) if isinstance(size, RaggedSize)]
    fill = call.bound.get("fill_value")
    if isinstance(fill, Value) or call.batch.sizes.varies(fill):
        number = (
            fill if isinstance(fill, Value) else Padded(call.batch.sizes.compute_numbers(fill), ())
        )
        return broadcast_to(
            call.batch, map_entries(call.batch, lambda t: t.to(options["dtype"]), [number]), sizes
        )
    if len(places) == 1 and call.name != "aten.eye":
        shape = [s.total if isinstance(s, RaggedSize) else s for s in sizes]
        return Packed(_fill_padding(call, shape, options), places[0], sizes[places[0]])
    shape = [s.longest if isinstance(s, RaggedSize) else s for s in sizes]
    if call.name == "aten.eye":
        square = torch.eye(*shape, **options).expand(call.batch.axis_size, *shape)
        return as_padded(square, sizes)
    extents = tuple(s if isinstance(s, RaggedSize) else None for s in sizes)
    return Padded(_fill_padding(call, [call.batch.axis_size, *shape], options), extents)


def _fill_padding(call: RaggedCall, shape: list[Any], options: dict[str, Any]) -> Tensor:
    name = call.name.removeprefix("aten.").removeprefix("new_").removesuffix("_strided")
    bound = call.bound
    if name == "full":
        return torch.full(shape, bound["fill_value"], **options)
    if name == "randint":
        return torch.randint(bound.get("low", 0), bound["high"], shape, **options)
    return getattr(torch, name)(shape, **options)  # type: ignore[no-any-return]


@rule("arange")
def _arange(call: RaggedCall) -> Any:
    bound = call.bound
    (extent,) = call.sizes_of(call.result)
    start, step = bound.get("start", 0), bound.get("step", 1)
    if not isinstance(extent, RaggedSize) or call.batch.sizes.varies(step):
        return NotImplemented
    places = extent.position_of_row.to(call.result.dtype)
    if call.batch.sizes.varies(start):
        starts = call.batch.sizes.compute_numbers(start).to(call.result.dtype)
        return Packed(starts[extent.element_of_row] + places * step, 0, extent)
    return Packed(places * step + call.batch.sizes.of(start), 0, extent)


@rule("scalar_tensor")
def _scalar(call: RaggedCall) -> Any:
    number = call.batch.sizes.compute_numbers(call.args[0])
    return Padded(number.to(dtype=call.result.dtype, device=call.result.device), ())
