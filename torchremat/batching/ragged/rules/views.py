"""Rules for views and for operators that work along some dims only."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from torchremat.batching.ragged.layouts.flat import flat_pile_data, pad_flat
from torchremat.batching.ragged.layouts.layouts import Packed, Padded, Value, is_ragged, pack, pad
from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize
from torchremat.batching.ragged.layouts.rows import flat_rows, from_flat_rows
from torchremat.batching.ragged.rules.op_call import (
    RaggedCall,
    as_padded,
    rule,
    run_on_packed,
    run_on_padded,
)

Dims = Callable[[RaggedCall, int], Sequence[int]]


def _dims(*names: str) -> Dims:
    def dims(call: RaggedCall, rank: int) -> Sequence[int]:
        return [dim % rank for name in names for dim in _as_list(call.bound[name])]

    return dims


def _as_list(value: Any) -> list[int]:
    return list(value) if isinstance(value, Sequence) else [value]


def _last(count: int) -> Dims:
    return lambda call, rank: range(rank - count, rank)


def _none(call: RaggedCall, rank: int) -> Sequence[int]:
    return ()


def _find_padded_dims(call: RaggedCall, rank: int) -> Sequence[int]:
    pads = call.bound["pad"]
    return [rank - 1 - i // 2 for i, pad in enumerate(pads) if pad != 0]


def _normalise_dims(call: RaggedCall, rank: int) -> Sequence[int]:
    return range(rank - len(call.bound["normalized_shape"]), rank)


def _repeat_dims(call: RaggedCall, rank: int) -> Sequence[int]:
    extra = len(call.bound["repeats"]) - rank
    return [i - extra for i, count in enumerate(call.bound["repeats"]) if i >= extra and count != 1]


def _roll_dims(call: RaggedCall, rank: int) -> Sequence[int]:
    return [dim % rank for dim in call.bound["dims"]] or range(rank)


ALONG: dict[str, Dims] = {
    "transpose": _none, "permute": _none, "t": _none, "unsqueeze": _none, "movedim": _none,
    "numpy_T": _none, "select": _dims("dim"), "slice": _dims("dim"), "split": _dims("dim"),
    "split_with_sizes": _dims("dim"), "unbind": _dims("dim"), "flip": _dims("dims"),
    "roll": _roll_dims, "glu": _dims("dim"), "constant_pad_nd": _find_padded_dims,
    "index_select": _dims("dim"), "tril": _last(2), "triu": _last(2), "repeat": _repeat_dims,
    "diagonal": _dims("dim1", "dim2"), "unfold": _dims("dimension"), "renorm": _dims("dim"),
    "native_layer_norm": _normalise_dims, "narrow": _dims("dim"),
    "diagonal_copy": _dims("dim1", "dim2"),
    "cat": _dims("dim"), "select_scatter": _dims("dim"), "slice_scatter": _dims("dim"),
    "gather": _dims("dim"), "scatter": _dims("dim"), "scatter_add": _dims("dim"),
    "mode": _dims("dim"), "median": _dims("dim"), "kthvalue": _dims("dim"),
    "_weight_norm_interface": _dims("dim"), "upsample_nearest1d": _last(1),
    "squeeze": lambda call, rank: [d for d in _as_list(call.bound.get("dim", [])) if rank],
}  # fmt: skip
"""The dims of their first argument that operators work along; the others are alike to them."""


@rule(*ALONG)
def along_some_dims(call: RaggedCall) -> Any:
    """Run an operator along dims that are not ragged once, on the data of all elements.

    Where a ragged dim is among them, `ALONG_RAGGED` may have a rule; else `NotImplemented`.
    """
    first = call.values[0]
    if call.name == "aten.squeeze" and _drops_ragged_dim(call, first):
        sizes = call.sizes_of(call.result)
        shape = [s.longest if isinstance(s, RaggedSize) else s for s in sizes]
        full = pad(first, call.batch.axis_size)
        return as_padded(full.data.reshape(call.batch.axis_size, *shape), sizes)
    if call.name == "aten.squeeze" and "dim" not in call.bound:
        return _squeeze(call)
    try:
        dims = set(ALONG[call.name.removeprefix("aten.")](call, first.rank))
    except (KeyError, TypeError):
        return NotImplemented
    has_numbers = call.has_varying_numbers
    differs_along = has_numbers or any(_find_ragged_dims(v) & dims for v in call.values)
    if call.name in ALONG_RAGGED and differs_along:
        return ALONG_RAGGED[call.name](call)
    if has_numbers:
        return NotImplemented
    if any(_find_ragged_dims(v) & dims for v in call.values if v.rank == first.rank):
        return NotImplemented
    ragged = [v for v in call.values if is_ragged(v)]
    places = {(v.dim, v.extent.text) for v in ragged if isinstance(v, Packed)}
    is_packed = all(isinstance(v, Packed) for v in ragged) and len(places) == 1
    is_packed = is_packed and not any(isinstance(v, Padded) for v in call.values)
    if is_packed and _others_fit(call, first):
        return run_on_packed(call)
    return run_on_padded(call)


def _others_fit(call: RaggedCall, first: Value) -> bool:
    """Whether shared arguments broadcast against concatenated data, or lie along other dims."""
    in_lockstep = ("gather", "scatter", "scatter_add", "cat", "select_scatter", "slice_scatter")
    if call.name.removeprefix("aten.") in in_lockstep:
        return all(isinstance(v, Packed) for v in call.values)
    return isinstance(first, Packed)


def _find_ragged_dims(value: Value) -> set[int]:
    return {d for d, size in enumerate(value.sizes) if isinstance(size, RaggedSize)}


def _drops_ragged_dim(call: RaggedCall, value: Value) -> bool:
    """Whether a size differs that is 1 in all elements of this batch."""
    left = sum(isinstance(size, RaggedSize) for size in call.sizes_of(call.result))
    return left < len(_find_ragged_dims(value))


def _squeeze(call: RaggedCall) -> Any:
    (value,) = call.values
    ones = [
        d for d, size in enumerate(value.sizes) if not isinstance(size, RaggedSize) and size == 1
    ]
    shift = 0 if isinstance(value, Packed) else 1
    data = value.data.squeeze([d + shift for d in ones])
    if isinstance(value, Packed):
        return Packed(data, value.dim - sum(d < value.dim for d in ones), value.extent)
    assert isinstance(value, Padded)
    return Padded(data, tuple(e for d, e in enumerate(value.extents) if d not in ones))


def _diagonal(call: RaggedCall) -> Any:
    (value,) = call.values
    d1, d2 = (call.bound[d] % value.rank for d in ("dim1", "dim2"))
    is_square = value.sizes[d1] is value.sizes[d2]
    return run_on_padded(call) if is_square and call.bound["offset"] == 0 else NotImplemented


def _keep_triangle(call: RaggedCall, keeps: Callable[[Any, Any], Any]) -> Any:
    if not call.has_varying_numbers:
        return run_on_padded(call)
    full = pad(call.values[0], call.batch.axis_size)
    rows, columns = (torch.arange(n, device=full.data.device) for n in full.data.shape[-2:])
    shift = call.batch.sizes.per_element(call.bound["diagonal"])
    keep = keeps(rows[:, None] + shift.view(-1, 1, 1), columns)
    keep = keep.view(keep.shape[0], *[1] * (full.rank - 2), *keep.shape[1:])
    return pack(Padded(torch.where(keep, full.data, 0), full.extents))


ALONG_RAGGED: dict[str, Callable[[RaggedCall], Any]] = {
    "aten.tril": lambda call: _keep_triangle(call, lambda row, col: col <= row),
    "aten.triu": lambda call: _keep_triangle(call, lambda row, col: col >= row),
    "aten.diagonal": _diagonal,
    "aten.diagonal_copy": _diagonal,
    "aten.constant_pad_nd": lambda call: NotImplemented,
}
"""Rules along dims whose size differs; `rows.py` and `indexing.py` add theirs."""


@rule("view", "_unsafe_view", "reshape", "flatten", "_reshape_alias")
def _view(call: RaggedCall) -> Any:
    (value,) = call.values
    return view_as(call, value, call.sizes_of(call.result))


def view_as(call: RaggedCall, value: Value, sizes: tuple[Any, ...]) -> Any:
    """The elements of `value` with other sizes, of which some may be ragged: `view` and `reshape`.

    Packed data stay packed where one dim of the result is ragged.
    """
    if isinstance(value, Packed):
        places = [i for i, size in enumerate(sizes) if isinstance(size, RaggedSize)]
        if len(places) == 1:
            return _view_packed(value, sizes, places[0])
    full = pad(value, call.batch.axis_size)
    if not _in_step(value.sizes, sizes):
        rows = flat_rows(value) if isinstance(value, Packed) else flat_pile_data(full)
        places = [i for i, size in enumerate(sizes) if isinstance(size, RaggedSize)]
        if len(places) == 1:
            return from_flat_rows(rows, sizes, places[0])
        if not places:  # a size that differs is one number in all elements of this batch
            return as_padded(rows.reshape(call.batch.axis_size, *sizes), sizes)
        return pack(pad_flat(rows, sizes))
    shape = [s.longest if isinstance(s, RaggedSize) else s for s in sizes]
    return as_padded(full.data.reshape(call.batch.axis_size, *shape), sizes)


def _view_packed(value: Packed, sizes: tuple[Any, ...], dim: int) -> Packed:
    extent = sizes[dim]
    shape = [s.total if isinstance(s, RaggedSize) else s for s in sizes]
    if prod(sizes[:dim]) != prod(value.sizes[: value.dim]):
        rows = flat_rows(value)
        return from_flat_rows(rows, sizes, dim)
    return Packed(value.data.reshape(shape), dim, extent)


def _in_step(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether the dims that differ stay as they are, and only those between them change."""
    return _groups(before) == _groups(after)


def _groups(sizes: Sequence[Any]) -> list[Any]:
    groups: list[Any] = [1]
    for size in sizes:
        if isinstance(size, RaggedSize):
            groups += [size.text, 1]
        else:
            groups[-1] *= size
    return groups
