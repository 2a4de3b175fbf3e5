"""`vmap(..., chunk_size=)`: some examples at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.api_util import flatten_axes
from torchremat.batching.axes import MappedLeaves
from torchremat.batching.mapping import Mapping
from torchremat.batching.vmappable import is_vmappable
from torchremat.errors import AxisTypeError


def call_in_chunks(
    map_over: Callable[[int], Callable[..., Any]],
    mapping: Mapping,
    chunk_size: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Map over at most `chunk_size` examples at a time, and join the outputs.

    `map_over` gives the function of so many examples.
    """
    call = MappedLeaves.of(map_over(1), mapping.in_axes, args, kwargs)
    if any(map(is_vmappable, call.leaves)):
        raise AxisTypeError("chunk_size works on tensors, not on containers of registered types")
    size = call.size(mapping.axis_size)
    results = []
    for start in range(0, max(size, 1), chunk_size):
        length = min(chunk_size, size - start)
        leaves = [
            leaf.narrow(axis, start, length) if axis is not None and leaf is not None else leaf
            for leaf, axis in zip(call.leaves, call.axes, strict=True)
        ]
        part_args, part_kwargs = _torch.tree_unflatten(leaves, call.spec)
        results.append(map_over(length)(*part_args, **part_kwargs))
    return _joined(results, mapping)


def _joined(results: Sequence[Any], mapping: Mapping) -> Any:
    spec = _torch.tree_flatten(results[0])[1]
    axes = flatten_axes("vmap out_axes", spec, mapping.out_axes)
    columns = zip(*(_torch.tree_flatten(result)[0] for result in results), strict=True)
    joined = [_join(parts, a, mapping) for parts, a in zip(columns, axes, strict=True)]
    return _torch.tree_unflatten(joined, spec)


def _join(parts: Sequence[Any], axis: int | None, mapping: Mapping) -> Any:
    if not isinstance(parts[0], Tensor):
        return parts[0]
    if axis is not None:
        return torch.cat(list(parts), axis)
    return sum(parts[1:], parts[0]) if mapping.sum_match else parts[0]
