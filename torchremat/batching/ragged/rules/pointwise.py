from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchremat.batching.ragged.layouts.layouts import (
    Packed,
    Padded,
    Shared,
    Value,
    as_rows,
    pack,
    pad,
)
from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize
from torchremat.batching.ragged.rules.op_call import Batch, RaggedCall, rule
from torchremat.graph.symbolic_sizes import Size


def broadcast_sizes(operands: Sequence[Value]) -> tuple[Any, ...]:
    """The sizes of an element after broadcasting; a ragged size is never 1."""
    rank = max(v.rank for v in operands)
    sizes: list[Any] = [1] * rank
    for value in operands:
        for i, size in enumerate(value.sizes):
            if isinstance(size, RaggedSize) or size != 1:
                sizes[rank - value.rank + i] = size
    return tuple(sizes)


def map_entries(
    batch: Batch,
    function: Callable[..., Any],
    operands: Sequence[Value],
    sizes: tuple[Any, ...] | None = None,
) -> Any:
    """`function` gets tensors that broadcast, and gives one tensor or several."""
    sizes = broadcast_sizes(operands) if sizes is None else sizes
    places = [i for i, size in enumerate(sizes) if isinstance(size, RaggedSize)]
    if not places and all(isinstance(v, Shared) for v in operands):
        return _wrap_data(function(*(v.data for v in operands)), Shared)
    if len(places) == 1 and _lie_in_rows(operands, len(sizes), places[0], sizes[places[0]]):
        (dim,) = places
        rows = [_along_rows(v, len(sizes), dim, sizes[dim]) for v in operands]
        return _wrap_data(function(*rows), lambda data: Packed(data, dim, sizes[dim]))
    extents = tuple(size if isinstance(size, RaggedSize) else None for size in sizes)
    full = [_with_rank(v, len(sizes), batch.axis_size) for v in operands]
    return _wrap_data(function(*full), lambda data: pack(Padded(data, extents)))


def _lie_in_rows(operands: Sequence[Value], rank: int, dim: int, extent: RaggedSize) -> bool:
    """Whether operands are concatenated along `dim`, or the same at each place along it."""
    for value in operands:
        place = dim - (rank - value.rank)
        if isinstance(value, Packed):
            if value.dim != place:
                return False
        elif place >= 0 and value.sizes[place] != 1:
            return False
    return extent.has_total


def _wrap_data(outputs: Any, make: Callable[[Tensor], Value]) -> Any:
    return make(outputs) if isinstance(outputs, Tensor) else [make(o) for o in outputs]


def _along_rows(value: Value, rank: int, dim: int, extent: RaggedSize) -> Tensor:
    """`value` as it broadcasts against concatenated data of `rank` dims."""
    if not isinstance(value, Padded):
        return value.data
    ones = [1] * (rank - value.rank)
    data = value.data.reshape(value.data.shape[0], *ones, *value.data.shape[1:])
    return as_rows(data.squeeze(1 + dim), extent).movedim(0, dim)


def _with_rank(value: Value, rank: int, axis_size: int) -> Tensor:
    """`value` as it broadcasts against padded data of elements of `rank` dims."""
    if isinstance(value, Shared):
        return value.data
    data = pad(value, axis_size).data
    return data.reshape(data.shape[0], *[1] * (rank - value.rank), *data.shape[1:])


def pointwise(call: RaggedCall) -> Any:
    """Run an operator that treats each number by itself, on broadcast operands."""
    call.check_random()
    operands: list[Value] = []
    replaced = False

    def take(leaf: Any) -> Any:
        nonlocal replaced
        if isinstance(leaf, Value):
            operands.append(leaf)
            return _Place(len(operands) - 1)
        if isinstance(leaf, Size):
            if call.batch.sizes.varies(leaf):
                operands.append(Padded(call.batch.sizes.compute_numbers(leaf), ()))
                replaced = True
                return _Place(len(operands) - 1)
            return call.batch.sizes.of(leaf)
        return leaf

    args = [take(a) for a in call.args]
    kwargs = {k: take(v) for k, v in call.kwargs.items()}
    op = call.op.overloadpacket if replaced else call.op
    if call.name == "aten.masked_fill" and isinstance(args[2], _Place):
        op, args = torch.where, [args[1], args[2], args[0]]
    results = call.result if isinstance(call.result, tuple | list) else [call.result]

    def run(*tensors: Tensor) -> Any:
        tensors = tuple(
            _as_in_element(t, v, results[0].dtype) for t, v in zip(tensors, operands, strict=True)
        )
        fill = [tensors[a.index] if isinstance(a, _Place) else a for a in args]
        named = {k: tensors[v.index] if isinstance(v, _Place) else v for k, v in kwargs.items()}
        outputs = op(*fill, **named)
        if isinstance(outputs, Tensor):
            return outputs.to(results[0].dtype)
        return tuple(o.to(r.dtype) for o, r in zip(outputs, results, strict=True))

    return map_entries(call.batch, run, operands, call.sizes_of(results[0]))


def _as_in_element(tensor: Tensor, value: Value, dtype: torch.dtype) -> Tensor:
    """A scalar of an element, which has dims here, must not promote the dtype of others."""
    if value.rank == 0 and tensor.dim() > 0 and tensor.dtype != dtype:
        if tensor.is_floating_point() and dtype.is_floating_point:
            return tensor.to(dtype)
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
            return tensor.to(dtype) if dtype != torch.bool and not dtype.is_complex else tensor
    return tensor


class _Place:
    def __init__(self, index: int) -> None:
        self.index = index


@rule(
    "clone", "detach", "alias", "_to_copy", "lift_fresh_copy", "lift_fresh", "contiguous",
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
    "native_dropout", "bernoulli", "where", "native_dropout_backward", "isclose",
    "fill", "positive", "_conj", "_neg_view", "resolve_conj", "nan_to_num", "prelu",
    "_prelu_kernel", "to", "type_as", "masked_fill",
)  # fmt: skip
def _drop_tag(call: RaggedCall) -> Any:
    return pointwise(call)


def broadcast_to(batch: Batch, value: Value, sizes: tuple[Any, ...]) -> Value:
    """Expand each element to `sizes`."""
    rank = len(sizes)
    places = [i for i, size in enumerate(sizes) if isinstance(size, RaggedSize)]

    def expand(data: Tensor) -> Tensor:
        packs = len(places) == 1 and data.dim() <= rank
        shape = [
            (s.total if packs else s.longest) if isinstance(s, RaggedSize) else s for s in sizes
        ]
        if not packs:
            shape = [batch.axis_size, *shape]
        return data.expand(shape)

    return map_entries(batch, expand, [value], sizes)  # type: ignore[no-any-return]


@rule("copy")
def _copy(call: RaggedCall) -> Any:
    source = call.values[1]
    sizes, dtype = call.sizes_of(call.result), call.result.dtype
    return broadcast_to(call.batch, map_entries(call.batch, lambda t: t.to(dtype), [source]), sizes)


@rule("expand", "broadcast_to")
def _expand(call: RaggedCall) -> Any:
    (value,) = call.values
    return broadcast_to(call.batch, value, call.sizes_of(call.result))
