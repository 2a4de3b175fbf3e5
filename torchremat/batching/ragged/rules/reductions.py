from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchremat.batching.ragged.layouts.layouts import (
    Packed,
    Padded,
    Shared,
    Value,
    fill_beyond_ends,
    pack,
    pad,
)
from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize
from torchremat.batching.ragged.rules.op_call import (
    Batch,
    RaggedCall,
    rule,
    run_on_packed,
    run_on_padded,
)
from torchremat.batching.ragged.rules.pointwise import map_entries
from torchremat.batching.ragged.rules.softmax_op import segment_softmax
from torchremat.kernels.segments.segments import segment_max, segment_min, segment_sum

_SEGMENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": segment_sum,
    "amax": segment_max,
    "amin": segment_min,
}
_WITHIN: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "sum": lambda x, dims: x.sum(dims, keepdim=True, dtype=x.dtype),
    "amax": lambda x, dims: x.amax(dims, keepdim=True),
    "amin": lambda x, dims: x.amin(dims, keepdim=True),
}


def _prod(x: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        x = x.prod(dim, keepdim=True, dtype=x.dtype)
    return x


_WITHIN["prod"] = _prod


def identity_of(kind: str, dtype: torch.dtype) -> Any:
    """The number that changes no result of this reduction: 0 for a sum."""
    if kind in ("sum", "prod"):
        return int(kind == "prod")
    if dtype == torch.bool:
        return kind == "amin"
    sign = -1 if kind == "amax" else 1
    if dtype.is_floating_point:
        return sign * float("inf")
    return torch.iinfo(dtype).min if kind == "amax" else torch.iinfo(dtype).max


def reduce_value(batch: Batch, kind: str, value: Value, dims: Sequence[int], keep: bool) -> Value:
    """Reduce each element along `dims`, which stay with size 1 if `keep`."""
    if isinstance(value, Packed) and kind in _SEGMENTS and value.dim in dims:
        others = [d for d in dims if d != value.dim]
        data = _WITHIN[kind](value.data, others) if others else value.data
        segments = _SEGMENTS[kind](data.movedim(value.dim, 0), value.extent.offsets)
        out = segments.unsqueeze(1 + value.dim)
        if not keep:
            out = out.squeeze([1 + d for d in dims])
        return Padded(out, (None,) * (out.dim() - 1))
    if isinstance(value, Packed) and value.dim not in dims:
        data = _WITHIN[kind](value.data, list(dims))
        dim = value.dim
        if not keep:
            data = data.squeeze(list(dims))
            dim -= sum(d < value.dim for d in dims)
        return Packed(data, dim, value.extent)
    if isinstance(value, Shared):
        out = _WITHIN[kind](value.data, list(dims))
        return Shared(out if keep else out.squeeze(list(dims)))
    full = pad(value, batch.axis_size)
    out = _WITHIN[kind](
        fill_beyond_ends(full, dims, identity_of(kind, full.data.dtype)), [1 + d for d in dims]
    )
    extents = [None if d in dims else e for d, e in enumerate(full.extents)]
    if not keep:
        out = out.squeeze([1 + d for d in dims])
        extents = [e for d, e in enumerate(extents) if d not in dims]
    return pack(Padded(out, tuple(extents)))


def count_of(batch: Batch, value: Value, dims: Sequence[int], dtype: torch.dtype) -> Any:
    """Count what is reduced along `dims`: a number, or one for each element where it differs."""
    count: Any = 1
    for dim in dims:
        size = value.sizes[dim]
        count = count * (size.lengths.to(dtype) if isinstance(size, RaggedSize) else size)
    return count


def _divide_by_count(
    batch: Batch, total: Value, value: Value, dims: Sequence[int], less: Any
) -> Value:
    dtype = total.data.dtype
    count = count_of(batch, value, dims, dtype.to_real() if dtype.is_complex else dtype)
    if not isinstance(count, Tensor):
        divisor: Value = Shared(torch.tensor(max(count - less, 0), dtype=dtype))
        return map_entries(batch, torch.div, [total, divisor])  # type: ignore[no-any-return]
    divisor = Padded((count - less).clamp(min=0), ())
    return map_entries(batch, torch.div, [total, divisor])  # type: ignore[no-any-return]


def _reduces_dense(value: Value, dims: Sequence[int]) -> bool:
    return not any(isinstance(value.sizes[d], RaggedSize) for d in dims)


def _cast(batch: Batch, value: Value, dtype: torch.dtype) -> Value:
    if value.data.dtype == dtype:
        return value
    return map_entries(batch, lambda t: t.to(dtype), [value])  # type: ignore[no-any-return]


@rule("sum", "prod", "nansum")
def _sum(call: RaggedCall) -> Any:
    (value,) = call.values
    if call.name == "aten.nansum":
        value = map_entries(call.batch, torch.nan_to_num, [value])
    value = _cast(call.batch, value, call.result.dtype)
    kind = call.name.removeprefix("aten.").replace("nansum", "sum")
    return reduce_value(
        call.batch, kind, value, call.dims_along(value.rank), bool(call.bound.get("keepdim"))
    )


@rule("amax", "amin")
def _amax(call: RaggedCall) -> Any:
    (value,) = call.values
    kind = call.name.removeprefix("aten.")
    keep = bool(call.bound.get("keepdim"))
    if value.data.dtype == torch.bool:
        return NotImplemented
    return reduce_value(call.batch, kind, value, call.dims_along(value.rank), keep)


@rule("max", "min")
def _max(call: RaggedCall) -> Any:
    if len(call.values) > 1:  # max(x, y)
        return NotImplemented
    if "dim" in call.bound:
        return _argmax(call)
    (value,) = call.values
    kind = "a" + call.name.removeprefix("aten.")
    return reduce_value(call.batch, kind, value, range(value.rank), False)


@rule("argmax", "argmin")
def _argmax(call: RaggedCall) -> Any:
    value = call.values[0]
    dims = call.dims_along(value.rank)
    if len(dims) > 1 and any(isinstance(size, RaggedSize) for size in value.sizes[1:]):
        return NotImplemented  # the index of an entry depends on the sizes
    if isinstance(value, Packed) and _reduces_dense(value, dims):
        return run_on_packed(call)
    kind = "amax" if "max" in call.name else "amin"
    return run_on_padded(call, lambda v: fill_beyond_ends(v, dims, identity_of(kind, v.data.dtype)))


@rule("any", "all")
def _any(call: RaggedCall) -> Any:
    (value,) = call.values
    kind = "amax" if call.name == "aten.any" else "amin"
    truth = map_entries(call.batch, lambda t: (t != 0).to(torch.uint8), [value])
    keep = bool(call.bound.get("keepdim"))
    found = reduce_value(call.batch, kind, truth, call.dims_along(value.rank), keep)
    return map_entries(call.batch, lambda t: t != 0, [found])


@rule("mean")
def _mean(call: RaggedCall) -> Any:
    (value,) = call.values
    dims = call.dims_along(value.rank)
    value = _cast(call.batch, value, call.result.dtype)
    if isinstance(value, Packed) and _reduces_dense(value, dims):
        return run_on_packed(call)
    total = reduce_value(call.batch, "sum", value, dims, bool(call.bound.get("keepdim")))
    return _divide_by_count(call.batch, total, value, dims, 0)


@rule("var", "std", "var_mean", "std_mean")
def _var(call: RaggedCall) -> Any:
    (value,) = call.values
    batch, bound = call.batch, call.bound
    dims = call.dims_along(value.rank)
    if isinstance(value, Packed) and _reduces_dense(value, dims):
        return run_on_packed(call)
    correction = bound.get("correction")
    if "unbiased" in bound:
        correction = int(bound["unbiased"])
    correction = 1 if correction is None else correction
    keep = bool(bound.get("keepdim"))
    mean = _divide_by_count(batch, reduce_value(batch, "sum", value, dims, True), value, dims, 0)
    squares = map_entries(batch, lambda x, m: (x - m) ** 2, [value, mean])
    total = reduce_value(batch, "sum", squares, dims, keep)
    spread = _divide_by_count(batch, total, value, dims, correction)
    if "std" in call.name:
        spread = map_entries(batch, torch.sqrt, [spread])
    if "mean" not in call.name:
        return spread
    if not keep:
        mean = reduce_value(batch, "sum", mean, dims, False)
    return [spread, mean]


@rule("linalg_vector_norm", "norm")
def _norm(call: RaggedCall) -> Any:
    value = call.values[0]
    bound, batch = call.bound, call.batch
    order = bound.get("ord", bound.get("p"))
    order = 2 if order is None else order
    dims, keep = call.dims_along(value.rank), bool(bound.get("keepdim"))
    value = _cast(batch, value, call.result.dtype)
    if isinstance(value, Packed) and _reduces_dense(value, dims):
        return run_on_packed(call)
    if abs(order) == float("inf"):
        size = map_entries(batch, torch.abs, [value])
        return reduce_value(batch, "amax" if order > 0 else "amin", size, dims, keep)
    if order == 0:
        nonzero = map_entries(batch, lambda x: (x != 0).to(x.dtype), [value])
        return reduce_value(batch, "sum", nonzero, dims, keep)
    if order == 2:
        squares = map_entries(batch, lambda x: x * x, [value])
        total = reduce_value(batch, "sum", squares, dims, keep)
        return map_entries(batch, _sqrt_with_zero_derivative, [total])
    powers = map_entries(batch, lambda x: x.abs() ** order, [value])
    total = reduce_value(batch, "sum", powers, dims, keep)
    return map_entries(batch, lambda t: t ** (1 / order), [total])


def _sqrt_with_zero_derivative(x: Tensor) -> Tensor:
    """The square root, whose derivative at 0 is 0, as that of the norm is."""
    is_zero = x == 0
    return torch.where(is_zero, x, torch.where(is_zero, 1, x).sqrt())


@rule("count_nonzero")
def _count_nonzero(call: RaggedCall) -> Any:
    (value,) = call.values
    nonzero = map_entries(call.batch, lambda x: (x != 0).to(torch.int64), [value])
    return reduce_value(call.batch, "sum", nonzero, call.dims_along(value.rank), False)


def _safe_shift(batch: Batch, value: Value, dims: Sequence[int]) -> Value:
    """The greatest entry along `dims`, or 0 where that is not a number, as a constant."""

    def finite(x: Tensor) -> Tensor:
        return torch.where(x.isfinite(), x, 0)

    constant = map_entries(batch, lambda x: x.detach(), [value])
    return map_entries(  # type: ignore[no-any-return]
        batch, finite, [reduce_value(batch, "amax", constant, dims, True)]
    )


@rule("logsumexp")
def _logsumexp(call: RaggedCall) -> Any:
    (value,) = call.values
    batch, dims = call.batch, call.dims_along(value.rank)
    value = _cast(batch, value, call.result.dtype)
    if isinstance(value, Packed) and _reduces_dense(value, dims):
        return run_on_packed(call)
    shift = _safe_shift(batch, value, dims)
    terms = map_entries(batch, lambda x, m: (x - m).exp(), [value, shift])
    total = reduce_value(batch, "sum", terms, dims, True)
    result = map_entries(batch, lambda t, m: t.log() + m, [total, shift])
    return result if call.bound.get("keepdim") else reduce_value(batch, "sum", result, dims, False)


@rule("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax")
def _softmax(call: RaggedCall) -> Any:
    (value,) = call.values
    batch = call.batch
    (dim,) = call.dims_along(value.rank)
    if isinstance(value, Packed) and value.dim != dim:
        return run_on_packed(call)
    if not isinstance(value, Packed):
        least = torch.finfo(value.data.dtype).min
        return run_on_padded(call, lambda v: fill_beyond_ends(v, [dim], least))
    dtype = call.result.dtype
    offsets = value.extent.offsets
    rows = segment_softmax(value.data.to(dtype).movedim(dim, 0), offsets, log="log" in call.name)
    if "safe" in call.name:  # 0 where all scores are -inf
        greatest = reduce_value(batch, "amax", value, [dim], True)
        dead = map_entries(batch, lambda x, m: m.isneginf().expand_as(x), [value, greatest])
        rows = rows.masked_fill(dead.data.movedim(dim, 0), 0)
    return Packed(rows.movedim(0, dim), dim, value.extent)


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(call: RaggedCall) -> Any:
    cotangent, output = call.values
    batch = call.batch
    dim = call.bound["dim"] % output.rank
    if "log" in call.name:
        total = reduce_value(batch, "sum", cotangent, [dim], True)
        return map_entries(batch, lambda g, y, t: g - y.exp() * t, [cotangent, output, total])
    product = map_entries(batch, torch.mul, [cotangent, output])
    total = reduce_value(batch, "sum", product, [dim], True)
    return map_entries(batch, lambda g, y, t: y * (g - t), [cotangent, output, total])


@rule("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
def _cumulate(call: RaggedCall) -> Any:
    """Run on padding too: an entry depends only on those before it."""
    value = call.values[0]
    (dim,) = call.dims_along(value.rank)
    if isinstance(value, Packed) and value.dim != dim:
        return run_on_packed(call)
    return run_on_padded(call)


@rule("sort", "topk", "argsort")
def _sort(call: RaggedCall) -> Any:
    value = call.values[0]
    (dim,) = call.dims_along(value.rank)
    if isinstance(value, Packed) and value.dim != dim:
        return run_on_packed(call)
    largest = bool(call.bound.get("descending", call.bound.get("largest")))
    kind = "amax" if largest else "amin"
    return run_on_padded(
        call, lambda v: fill_beyond_ends(v, [dim], identity_of(kind, v.data.dtype))
    )
