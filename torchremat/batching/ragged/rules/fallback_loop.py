"""Operators without a rule run for one element after the other, which is exact and slow."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchremat.batching.ragged.layouts.layouts import Packed, Padded, Shared, Value
from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize
from torchremat.batching.ragged.rules.op_call import RaggedCall
from torchremat.core.source import warn_user
from torchremat.errors import LoopWarning, RaggedError


def run_one_by_one(call: RaggedCall) -> Any:
    """Run an operator for each element by itself, with a `LoopWarning`."""
    count = call.batch.axis_size
    warn_user(
        f"{call.name}, at {call.source}, has no rule for elements of different sizes: it runs for "
        f"each of the {count} elements by itself",
        LoopWarning,
    )
    try:
        results = [_run_one(call, i) for i in range(count)]
    except (RaggedError, RuntimeError, IndexError, TypeError, ValueError) as error:
        raise RaggedError(
            f"{call.name}, at {call.source}, has no rule for elements of different sizes, and "
            f"cannot run for one after the other: {error}"
        ) from error
    if isinstance(call.result, Tensor):
        return _join_elements(call, results, call.result)
    columns = zip(*results, strict=True)
    pairs = zip(columns, call.result, strict=True)
    return [_join_elements(call, c, r) if isinstance(r, Tensor) else r for c, r in pairs]


def _run_one(call: RaggedCall, i: int) -> Any:
    def size(of: Any) -> Any:
        return of.host[i] if isinstance(of, RaggedSize) else of

    return call.run(lambda value: element(value, i), size)


def element(value: Value, i: int) -> Tensor:
    """The element number `i`, of its own size: a view."""
    if isinstance(value, Shared):
        return value.data
    if isinstance(value, Packed):
        start = sum(value.extent.host[:i])
        return value.data.narrow(value.dim, start, value.extent.host[i])
    data = value.data[i]
    for dim, extent in enumerate(value.extents):
        if extent is not None:
            data = data.narrow(dim, 0, extent.host[i])
    return data


def _join_elements(call: RaggedCall, elements: Sequence[Tensor], result: Any) -> Value:
    sizes = call.sizes_of(result)
    for i, one in enumerate(elements):
        wanted = [size.host[i] if isinstance(size, RaggedSize) else size for size in sizes]
        if list(one.shape) != wanted:
            raise RaggedError(
                f"{call.name}, at {call.source}, gives a tensor of shape {list(one.shape)} for "
                f"element {i}, and its graph says {wanted}: what it does depends on the size in a "
                "way that one graph cannot say. Write it with other operators."
            )
    return make_value(elements, sizes)


def make_value(elements: Sequence[Tensor], sizes: tuple[Any, ...]) -> Value:
    """Join elements of `sizes`: stacked, concatenated or padded, by how many are ragged."""
    places = [d for d, size in enumerate(sizes) if isinstance(size, RaggedSize)]
    if not places:
        return Padded(torch.stack(list(elements)), (None,) * len(sizes))
    if len(places) == 1:
        return Packed(torch.cat(list(elements), places[0]), places[0], sizes[places[0]])
    pads = [
        [
            n
            for s, m in zip(reversed(sizes), reversed(e.shape), strict=True)
            for n in (0, _rest(s, m))
        ]
        for e in elements
    ]
    full = [torch.nn.functional.pad(e, p) for e, p in zip(elements, pads, strict=True)]
    extents = tuple(s if isinstance(s, RaggedSize) else None for s in sizes)
    return Padded(torch.stack(full), extents)


def _rest(size: Any, length: int) -> int:
    return size.longest - length if isinstance(size, RaggedSize) else 0
