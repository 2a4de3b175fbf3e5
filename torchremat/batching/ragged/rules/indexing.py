from typing import Any

import torch
from torch import Tensor

from torchremat.batching.ragged.layouts.layouts import (
    Packed,
    Shared,
    Value,
    batch,
    fill_beyond_ends,
    is_ragged,
)
from torchremat.batching.ragged.rules.op_call import RaggedCall, rule, run_on_packed, run_on_padded
from torchremat.batching.ragged.rules.pointwise import map_entries
from torchremat.batching.ragged.rules.views import ALONG_RAGGED


@rule("embedding")
def _embedding(call: RaggedCall) -> Any:
    weight, index = call.values
    if isinstance(weight, Shared) and isinstance(index, Packed):
        return run_on_packed(call)
    return run_on_padded(call, _fill_indices)


def _fill_indices(value: Any) -> Tensor:
    """Put index 0 into padding: any index is right there that is in range."""
    if value.data.dtype in (torch.int64, torch.int32):
        return fill_beyond_ends(value, range(value.rank), 0)
    return value.data  # type: ignore[no-any-return]


@rule("index")
def _index(call: RaggedCall) -> Any:
    source, indices = call.args
    used = [(d, i) for d, i in enumerate(indices) if i is not None]
    if any(i.data.dtype == torch.bool for _, i in used):
        return NotImplemented
    ragged = [i for _, i in used if isinstance(i, Packed)]
    alike = len({(i.extent.text, i.dim) for i in ragged}) == 1
    if (
        isinstance(source, Shared)
        and alike
        and all(isinstance(i, Packed | Shared) for _, i in used)
    ):
        return run_on_packed(call)
    elsewhere = isinstance(source, Packed) and source.dim not in [d for d, _ in used]
    if elsewhere and all(isinstance(i, Shared) for _, i in used):
        return run_on_packed(call)
    if isinstance(source, Packed) and len(used) == 1 and used[0][0] == source.dim:
        return _lookup(call, source, used[0][1])
    return run_on_padded(call, _fill_indices)


def _lookup(call: RaggedCall, source: Packed, index: Value) -> Any:
    """`source[:, index]`, each index counted from the start of its element."""
    starts, lengths = batch(source.extent.offsets[:-1]), batch(source.extent.lengths)
    rows = map_entries(
        call.batch, lambda i, s, n: torch.where(i < 0, i + n, i) + s, [index, starts, lengths]
    )
    if isinstance(rows, Packed):
        data = source.data.index_select(source.dim, rows.data.reshape(-1))
        data = data.unflatten(source.dim, rows.data.shape)
        return Packed(data, source.dim + rows.dim, rows.extent)
    if rows.is_ragged:
        return NotImplemented
    data = source.data.index_select(source.dim, rows.data.reshape(-1))
    data = data.unflatten(source.dim, rows.data.shape).movedim(source.dim, 0)
    return type(rows)(data, (None,) * (data.dim() - 1))


def _index_select(call: RaggedCall) -> Any:
    source, index = call.values
    dim = call.bound["dim"] % source.rank
    if isinstance(source, Packed) and source.dim == dim:
        return _lookup(call, source, index)
    return run_on_padded(call, _fill_indices)


@rule("index_add", "index_put")
def _index_add(call: RaggedCall) -> Any:
    """Add at indices: padding adds 0 at the first one."""
    if call.name == "aten.index_put" and not call.bound["accumulate"]:
        return NotImplemented
    if any(v.data.dtype == torch.bool for v in call.values):
        return NotImplemented

    def fill(value: Any) -> Tensor:
        return fill_beyond_ends(value, range(value.rank), 0)

    return run_on_padded(call, fill)


def _scatter(call: RaggedCall) -> Any:
    """Scatter where all elements have as many indices: padding would overwrite entries."""
    index = call.values[1]
    return NotImplemented if is_ragged(index) else run_on_padded(call, _fill_indices)


@rule("one_hot")
def _one_hot(call: RaggedCall) -> Any:
    return run_on_packed(call)


ALONG_RAGGED.update(
    {
        "aten.index_select": _index_select,
        "aten.gather": lambda call: run_on_padded(call, _fill_indices),
        "aten.scatter": _scatter,
        "aten.scatter_add": _index_add,
    }
)
