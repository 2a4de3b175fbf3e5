"""The batching rule of fused attention on the CPU, for which PyTorch has none and would loop.

The mapped axis becomes part of the batch, where the kernel treats every example alike:

    q [n, B, H, L, E]  ->  [n * B, H, L, E]
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from torchremat import _torch
from torchremat.batching.axis_positions import bdim_at_front
from torchremat.batching.batching_rules import rules_where_torch_has_none

_attention = _torch.FLASH_ATTENTION
_backward = _torch.FLASH_ATTENTION_BACKWARD


@cache
def register() -> None:
    """Let `vmap` use the rules of this file, once in a process."""
    rules_where_torch_has_none[_attention] = _attention_rule
    rules_where_torch_has_none[_backward] = _backward_rule


def _attention_rule(vals: Sequence[Tensor], dims: Sequence[int | None], **params: Any) -> Any:
    fold = _Fold.of(vals, dims)
    query, key, value = (fold.into_batch(x, d) for x, d in zip(vals[:3], dims[:3], strict=True))
    params |= fold.mask_of(vals[3:], dims[3:])
    outputs = _attention(query, key, value, **params)
    return [fold.out_of_batch(x) for x in outputs], [0, 0]


def _backward_rule(vals: Sequence[Tensor], dims: Sequence[int | None], **params: Any) -> Any:
    fold = _Fold.of(vals[1:], dims[1:])
    tensors = [fold.into_batch(x, d) for x, d in zip(vals[:6], dims[:6], strict=True)]
    params |= fold.mask_of(vals[6:], dims[6:])
    outputs = _backward(*tensors, **params)
    return [fold.out_of_batch(x) for x in outputs], [0, 0, 0]


class _Fold:
    """`size` examples, each of them a batch of `batch`."""

    def __init__(self, size: int, batch: int) -> None:
        self.size = size
        self.batch = batch

    @classmethod
    def of(cls, vals: Sequence[Tensor], dims: Sequence[int | None]) -> "_Fold":
        size = next(x.shape[d] for x, d in zip(vals, dims, strict=True) if d is not None)
        return cls(size, bdim_at_front(vals[0], dims[0], size).shape[1])

    def into_batch(self, x: Tensor, dim: int | None) -> Tensor:
        return bdim_at_front(x, dim, self.size).flatten(0, 1)

    def out_of_batch(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.size, self.batch))  # type: ignore[no-any-return]

    def mask_of(self, vals: Sequence[Tensor], dims: Sequence[int | None]) -> dict[str, Any]:
        """The mask as the kernel takes it: `[L, S]`, or `[B, H, L, S]` where `B`, `H` may be 1."""
        if not vals:
            return {}
        (mask,), (dim,) = vals, dims
        if dim is None and mask.dim() == 2:
            return {"attn_mask": mask}
        mask = bdim_at_front(mask, dim, self.size)
        if mask.dim() == 3:
            mask = mask[:, None, None]
        return {"attn_mask": mask.expand(-1, self.batch, -1, -1, -1).flatten(0, 1)}
