"""Rules for matrix products: dims that differ may be free, contracted or those of a batch."""

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
from torchremat.batching.ragged.rules.op_call import Batch, RaggedCall, rule
from torchremat.batching.ragged.rules.pointwise import map_entries
from torchremat.batching.ragged.rules.reductions import reduce_value

_LABELS = {
    "mm": ("ij", "jk", "ik"),
    "bmm": ("zij", "zjk", "zik"),
    "mv": ("ij", "j", "i"),
    "dot": ("i", "i", ""),
    "vdot": ("i", "i", ""),
}


def contract(batch: Batch, kind: str, a: Value, b: Value) -> Value:
    """Multiply two values as the product `kind` of `_LABELS` does, or as `mv` and `dot` do."""
    if kind in ("mv", "dot"):
        terms = map_entries(batch, torch.mul, [a, b])
        return reduce_value(batch, "sum", terms, [terms.rank - 1], False)
    labels_a, labels_b, labels_out = _LABELS[kind]
    of_a, of_b = _place(a, labels_a), _place(b, labels_b)
    is_plain = not isinstance(a, Padded) and not isinstance(b, Padded)
    label = of_a or of_b
    if (
        is_plain
        and label in labels_out
        and (of_a == of_b or _lacks(label, of_a, of_b, labels_a, labels_b))
    ):
        extent = a.extent if isinstance(a, Packed) else b.extent  # type: ignore[union-attr]
        data = getattr(torch, kind)(a.data, b.data)
        return Packed(data, labels_out.index(label), extent)
    sizes = {
        **dict(zip(labels_a, a.sizes, strict=True)),
        **dict(zip(labels_b, b.sizes, strict=True)),
    }
    left, right = (
        _zero_padding(batch, a, labels_a, labels_out),
        _zero_padding(batch, b, labels_b, labels_out),
    )
    data = _product(left, right, labels_a, labels_b, labels_out)
    extents = tuple(sizes[x] if isinstance(sizes[x], RaggedSize) else None for x in labels_out)
    return pack(Padded(data, extents))


def _place(value: Value, labels: str) -> str:
    return labels[value.dim] if isinstance(value, Packed) else ""


def _lacks(label: str, of_a: str, of_b: str, labels_a: str, labels_b: str) -> bool:
    """Whether only one operand has the dim that differs, and the other does without."""
    if of_a and of_b:
        return False
    return label not in (labels_b if of_a else labels_a)


def _zero_padding(batch: Batch, value: Value, labels: str, labels_out: str) -> Tensor:
    if isinstance(value, Shared):
        return value.data
    full = pad(value, batch.axis_size)
    return fill_beyond_ends(full, [i for i, x in enumerate(labels) if x not in labels_out], 0)


def _product(a: Tensor, b: Tensor, labels_a: str, labels_b: str, labels_out: str) -> Tensor:
    batch_a = "b" if a.dim() > len(labels_a) else ""
    batch_b = "b" if b.dim() > len(labels_b) else ""
    return torch.einsum(f"{batch_a}{labels_a},{batch_b}{labels_b}->b{labels_out}", a, b)


@rule("mm", "bmm", "mv", "dot", "vdot")
def _matmul(call: RaggedCall) -> Any:
    a, b = call.values
    if call.name == "aten.vdot" and a.data.is_complex():
        return NotImplemented
    kind = call.name.removeprefix("aten.")
    return contract(call.batch, kind.replace("vdot", "dot"), a, b)


@rule("addmm", "baddbmm", "addmv")
def _addmm(call: RaggedCall) -> Any:
    start, a, b = call.values
    alpha, beta = call.bound.get("alpha", 1), call.bound.get("beta", 1)
    kind = {"aten.addmm": "mm", "aten.baddbmm": "bmm", "aten.addmv": "mv"}[call.name]
    if (
        kind == "mm"
        and isinstance(a, Packed)
        and a.dim == 0
        and isinstance(b, Shared)
        and isinstance(start, Shared)
    ):
        data = call.op(start.data, a.data, b.data, alpha=alpha, beta=beta)
        return Packed(data, 0, a.extent)
    product = contract(call.batch, kind, a, b)
    return map_entries(
        call.batch,
        lambda s, p: torch.add(s * beta if beta != 1 else s, p, alpha=alpha),
        [start, product],
    )


@rule("linear")
def _linear(call: RaggedCall) -> Any:
    x, weight, *bias = call.values
    is_along = isinstance(x, Packed) and x.dim < x.rank - 1
    if isinstance(x, Packed) and is_along and all(isinstance(v, Shared) for v in (weight, *bias)):
        data = call.op(x.data, weight.data, *(v.data for v in bias))
        return Packed(data, x.dim, x.extent)
    return NotImplemented


@rule("matmul")
def _any_matmul(call: RaggedCall) -> Any:
    a, b = call.values
    kinds = {(1, 1): "dot", (2, 1): "mv", (2, 2): "mm", (3, 3): "bmm"}
    kind = kinds.get((a.rank, b.rank))
    return NotImplemented if kind is None else contract(call.batch, kind, a, b)


@rule("addr", "outer", "ger")
def _outer(call: RaggedCall) -> Any:
    if len(call.values) != 2:
        return NotImplemented
    a, b = call.values
    batch = call.batch
    column = unsqueeze_value(a, 1)
    return map_entries(batch, torch.mul, [column, b])


def unsqueeze_value(value: Value, dim: int) -> Value:
    """Insert a dimension of size 1 before dimension `dim` of each element."""
    if isinstance(value, Shared):
        return Shared(value.data.unsqueeze(dim))
    if isinstance(value, Packed):
        place = value.dim + (dim <= value.dim)
        return Packed(value.data.unsqueeze(dim), place, value.extent)
    extents = (*value.extents[:dim], None, *value.extents[dim:])
    return Padded(value.data.unsqueeze(1 + dim), extents)
