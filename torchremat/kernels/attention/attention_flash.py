"""Attention over segments on a GPU, by PyTorch's flash attention for varying lengths.

Its kernels do not write rows that no pair of a query and a key reaches: rows outside of all
segments, queries of a segment without keys, keys of one without queries. They are filled here.
"""

import torch
from torch import Tensor

from torchremat import _torch

# Flash attention has kernels for up to so many dims of a head: PyTorch raises for more of them.
MOST_DIMS = 256
HALVES = (torch.float16, torch.bfloat16)


def has_flash_kernel(q: Tensor, v: Tensor, cuts: tuple[Tensor, Tensor], is_causal: bool) -> bool:
    """With lengths that differ a causal mask has its diagonal in the last row, not in the first."""
    dim = q.shape[2]
    return (
        q.is_cuda
        and q.dtype in HALVES
        and dim == v.shape[2] <= MOST_DIMS
        and dim % 8 == 0
        and 0 not in q.shape[1:]
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
        and not (is_causal and not torch.equal(cuts[0].diff(), cuts[1].diff()))
    )


def forward_by_flash(
    q: Tensor, k: Tensor, v: Tensor, cuts: tuple[Tensor, Tensor], is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp; `cuts` are on the CPU."""
    on_device, most = _for_kernel(cuts, q.device)
    q, k, v = (_readable(x) for x in (q, k, v))
    out, lse = _torch.attend_ragged(q, k, v, on_device, most, is_causal, scale)
    lse = lse.t().contiguous()
    if (missed := _rows_missed(cuts, 0, q.shape[0])) is not None:
        missed = missed.to(q.device)
        out.index_fill_(0, missed, 0)
        lse.index_fill_(0, missed, -torch.inf)
    return out, lse


def backward_by_flash(
    cotangent: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: tuple[Tensor, Tensor],
    cuts: tuple[Tensor, Tensor],
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangents of `q`, `k` and `v`; `cuts` are on the CPU."""
    on_device, most = _for_kernel(cuts, q.device)
    out, lse = results
    inputs = (_readable(q), _readable(k), _readable(v))
    grads = _torch.attend_ragged_backward(
        cotangent.contiguous(),
        inputs,
        (out, lse.t().contiguous()),
        on_device,
        most,
        is_causal,
        scale,
    )
    for grad, side in zip(grads, (0, 1, 1), strict=True):
        if (missed := _rows_missed(cuts, side, grad.shape[0])) is not None:
            grad.index_fill_(0, missed.to(q.device), 0)
    return grads


def _for_kernel(
    cuts: tuple[Tensor, Tensor], device: torch.device
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    most_q, most_k = (int(c.diff().max()) if c.shape[0] > 1 else 0 for c in cuts)
    on_q, on_k = (c.to(device, torch.int32, non_blocking=True) for c in cuts)
    return (on_q, on_k), (most_q, most_k)


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _rows_missed(cuts: tuple[Tensor, Tensor], side: int, total: int) -> Tensor | None:
    """The rows of queries (0) or keys (1) that meet none of the other side, if there are any.

    >>> _rows_missed((torch.tensor([0, 2, 3]), torch.tensor([1, 1, 4])), 0, 5)
    tensor([0, 1, 3, 4])
    """
    own, others = cuts[side], cuts[1 - side].diff()
    lengths = own.diff()
    is_full = int(own[0]) == 0 and int(own[-1]) == total
    if is_full and not bool(((lengths > 0) & (others == 0)).any()):
        return None
    met = (others > 0).repeat_interleave(lengths)
    before, after = met.new_zeros(int(own[0])), met.new_zeros(total - int(own[-1]))
    return torch.cat([before, met, after]).logical_not().nonzero().flatten()
