"""Kernels of flash attention, on the CPU and on a GPU."""

from collections.abc import Callable

import torch
from torch._ops import OpOverload

from .patches import be_deterministic

FLASH_ATTENTION: OpOverload = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_ATTENTION_BACKWARD: OpOverload = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)
flash_attention_on_cpu: Callable[..., tuple[torch.Tensor, torch.Tensor]]
flash_attention_on_cpu = FLASH_ATTENTION._op
"""`(q, k, v, dropout_p, is_causal, *, scale)`, `[batch, heads, length, dim]`: output, logsumexp.

It takes any strides with numbers side by side and rows that do not overlap. There may be fewer
heads of keys than of queries, and lengths that differ. No size may be 0: it divides by the length
of queries.
"""

flash_attention_on_cpu_backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
flash_attention_on_cpu_backward = FLASH_ATTENTION_BACKWARD._op
"""`(cotangent, q, k, v, out, logsumexp, dropout_p, is_causal, *, scale)`: those of q, k and v."""


def attend_ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cuts: tuple[torch.Tensor, torch.Tensor],
    most: tuple[int, int],
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp `[heads, total]` of segments on a GPU, of halves.

    `cuts` are cumulative lengths in int32, `most` the greatest length; of queries and of keys. What
    `torch.nn.attention.varlen` calls, whose public function has no backward of its own.
    """
    results = torch.ops.aten._flash_attention_forward.default(
        q, k, v, *cuts, *most, 0.0, is_causal, False, scale=scale
    )
    return results[0], results[1]


def attend_ragged_backward(
    cotangent: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    results: tuple[torch.Tensor, torch.Tensor],
    cuts: tuple[torch.Tensor, torch.Tensor],
    most: tuple[int, int],
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cotangents of `inputs` of `attend_ragged`, added up in a fixed order."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=cotangent.device)
    unused = cotangent.new_empty(0)
    arguments = (cotangent, *inputs, *results, *cuts, *most, 0.0, is_causal, no_dropout, unused)
    with be_deterministic():  # else it adds to the cotangent of q by atomics
        return torch.ops.aten._flash_attention_backward.default(*arguments, scale=scale)  # type: ignore[no-any-return]
