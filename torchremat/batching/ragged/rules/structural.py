"""Rules along the dim whose size differs: flip, roll, cat, pad; new tensors."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchremat.batching.ragged.layouts.flat import find_numel, flat_pile_data, pad_flat
from torchremat.batching.ragged.layouts.layouts import Packed, Padded, Shared, Value, pad
from torchremat.batching.ragged.layouts.places import Along, find_places, find_rows_of, invert
from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize
from torchremat.batching.ragged.layouts.rows import (
    flat_rows,
    from_flat_rows,
    join_rows,
    take_places,
)
from torchremat.batching.ragged.layouts.take_rows_op import take_rows
from torchremat.batching.ragged.rules.matmuls import unsqueeze_value
from torchremat.batching.ragged.rules.op_call import RaggedCall, as_padded, rule
from torchremat.batching.ragged.rules.pointwise import broadcast_to, map_entries
from torchremat.batching.ragged.rules.views import ALONG_RAGGED
from torchremat.graph.symbolic_sizes import Size


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
    shifts, dims = list(call.bound["shifts"]), list(call.bound["dims"])
    if not dims and value.rank == 1:
        dims = [0]
    if not dims:
        return _roll_entries(call, value, shifts[0])
    for shift, dim in zip(shifts, dims, strict=True):
        value = _roll_along(call, value, shift, dim % value.rank)
    return value


def _roll_entries(call: RaggedCall, value: Value, shift: Any) -> Value:
    """Roll the entries of each element in their order."""
    if isinstance(value, Shared):
        value = pad(value, call.batch.axis_size)
    if isinstance(value, Padded) and not value.is_ragged:
        flat = _roll_along(call, Padded(value.data.flatten(1), (None,)), shift, 0)
        return replace(value, data=flat.data.view_as(value.data))
    rows = flat_rows(value) if isinstance(value, Packed) else flat_pile_data(value)
    entries = find_numel(value.sizes)
    entries.known_total = rows.shape[0]
    rolled = _roll_along(call, Packed(rows, 0, entries), shift, 0)
    if isinstance(value, Packed):
        return from_flat_rows(rolled.data, value.sizes, value.dim)
    return pad_flat(rolled.data, value.sizes)


def _roll_along(call: RaggedCall, value: Value, shift: Any, dim: int) -> Value:
    size = value.sizes[dim]
    if not isinstance(size, RaggedSize) and not call.batch.sizes.varies(shift):
        place = dim if isinstance(value, Shared | Packed) else 1 + dim
        return replace(value, data=value.data.roll(call.batch.sizes.of(shift), place))
    along = Along.of(value, dim, call.batch.axis_size)
    packs = isinstance(value, Packed) and value.dim == dim
    places = find_places(torch.zeros_like(along.begins), 1, size, packs)
    shifts = call.batch.sizes.per_element(shift)
    lengths = along.lengths.clamp(min=1)
    if packs:
        shifts, lengths = shifts[size.element_of_row], lengths[size.element_of_row]
    else:
        shifts, lengths = shifts[:, None], lengths[:, None]
    return along.at((places - shifts) % lengths, size, packs)


def _cat(call: RaggedCall) -> Any:
    dim = call.dims_along(call.values[0].rank)[0]
    extent = call.sizes_of(call.result)[dim]
    parts = []
    for value in call.values:
        part = find_rows(value, dim, call.batch.axis_size)
        if part is None:
            return NotImplemented
        parts.append((part[0], part[1].lengths))
    if isinstance(extent, RaggedSize):
        return join_rows(parts, dim, extent)
    lengths = torch.full_like(parts[0][1], extent)  # parts that differ may be as many in all
    joined = join_rows(parts, dim, RaggedSize("", lengths, lengths.shape[0] * extent))
    data = joined.data.movedim(dim, 0)
    data = data.unflatten(0, (lengths.shape[0], extent)).movedim(1, 1 + dim)
    return Padded(data, (None,) * (data.dim() - 1))


def _pad(call: RaggedCall) -> Any:
    """Pad first along dims whose size differs, or by numbers that differ."""
    (value,) = call.values
    sizes, wanted = call.batch.sizes, call.sizes_of(call.result)
    pads, fill = list(call.bound["pad"]), call.bound["value"]
    if isinstance(fill, Size):
        return NotImplemented
    for place in range(0, len(pads), 2):
        dim = value.rank - 1 - place // 2
        pair = pads[place : place + 2]
        if pair == [0, 0]:
            continue
        if isinstance(value.sizes[dim], RaggedSize) or any(map(sizes.varies, pair)):
            pads[place : place + 2] = [0, 0]
            value = _pad_along(call, value, dim, sizes.per_element(pair[0]), wanted[dim], fill)
    pads = [sizes.of(count) for count in pads]
    return (
        replace(value, data=torch.constant_pad_nd(value.data, pads, fill)) if any(pads) else value
    )


def _pad_along(
    call: RaggedCall, value: Value, dim: int, before: Tensor, size: Any, fill: Any
) -> Value:
    """A place of the result is `before` places earlier in `value`, or has `fill`."""
    axis_size = call.batch.axis_size
    along = Along.of(pad(value, axis_size) if isinstance(value, Shared) else value, dim, axis_size)
    packs = isinstance(size, RaggedSize) and size.has_total and not any(along.extents)
    places = find_places(-before, 1, size, packs)
    lengths = along.lengths[size.element_of_row] if packs else along.lengths[:, None]
    is_inside = (places >= 0) & (places < lengths)
    index = find_rows_of(places, along.begins, size, packs)
    index = torch.where(is_inside.flatten(), index, -1)
    rows = take_rows(along.rows, index, invert(index, along.rows.shape[0]), zero=True)
    if fill != 0:
        is_filled = ~is_inside.flatten().view(-1, *[1] * (rows.dim() - 1))
        rows = rows.masked_fill(is_filled, fill)
    return along.wrap(rows, size, packs)


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


def find_rows(value: Value, dim: int, axis_size: int) -> tuple[Tensor, RaggedSize] | None:
    """The rows of all elements along `dim`, one element after another, and how many each has.

    `None` where another dim is ragged, so that the rows do not lie so.
    """
    if isinstance(value, Packed):
        return (value.data.movedim(dim, 0), value.extent) if value.dim == dim else None
    full = pad(value, axis_size)
    if full.is_ragged:
        return None
    rows = full.data.movedim(1 + dim, 1).flatten(0, 1)
    lengths = torch.full((axis_size,), full.data.shape[1 + dim], device=rows.device)
    return rows, RaggedSize("", lengths, known_total=rows.shape[0])


ALONG_RAGGED.update({
    "aten.flip": _flip, "aten.roll": _roll, "aten.cat": _cat, "aten.constant_pad_nd": _pad,
    "aten.repeat": _repeat,
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
    if len(places) == 1 and sizes[places[0]].has_total and call.name != "aten.eye":
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
    dtype, packs = call.result.dtype, extent.has_total
    places = extent.position_of_row if packs else torch.arange(extent.longest, device=extent.device)
    places = places.to(dtype) * call.batch.sizes.of(step)
    if call.batch.sizes.varies(start):
        starts = call.batch.sizes.compute_numbers(start).to(dtype)
        start = starts[extent.element_of_row] if packs else starts[:, None]
    places = places + call.batch.sizes.of(start)
    if packs:
        return Packed(places, 0, extent)
    return Padded(places.expand(call.batch.axis_size, -1), (extent,))


@rule("scalar_tensor")
def _scalar(call: RaggedCall) -> Any:
    number = call.batch.sizes.compute_numbers(call.args[0])
    return Padded(number.to(dtype=call.result.dtype, device=call.result.device), ())
