"""The kernel of `scaled_dot_product_attention` that PyTorch takes on a GPU.

The rules are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` for dense tensors. The
settings of `torch.nn.attention.sdpa_kernel` hold, as do those of `torch.backends.cuda`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from .gpu import Gpu

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)
_AMPERE, _NEWEST = (8, 0), (12, 1)
# Every architecture between has kernels in PyTorch's builds; 12.1 is the newest that they know.
_MOST_HEAD_DIM, _MOST_HEAD_DIM_ROCM, _MOST_HEAD_DIM_CUDNN = 256, 512, 128
# More, which newer versions of cuDNN take, is left to the kernel after it.
_CUDNN_STEPS = 16
# cuDNN rounds the probability of dropout to sixteenths; PyTorch asks it for no other.


@dataclass(frozen=True)
class _Attention:
    """A call of attention, all of `[batch, heads, length, dim]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    @property
    def differentiates(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.q, self.k, self.v))

    @property
    def is_dense(self) -> bool:
        """Whether there is something in each dim, and numbers of a row lie side by side."""
        tensors = (self.q, self.k, self.v)
        if any(t.dim() != 4 or t.size(2) == 0 for t in tensors):
            return False
        return all(t.stride(-1) == 1 or t.size(-1) == 1 for t in tensors)

    @property
    def has_one_batch(self) -> bool:
        return bool(self.q.size(0) == self.k.size(0) == self.v.size(0))

    @property
    def has_as_many_heads(self) -> bool:
        return bool(self.q.size(1) == self.k.size(1) == self.v.size(1))

    @property
    def has_groups_of_heads(self) -> bool:
        heads = self.q.size(1), self.k.size(1), self.v.size(1)
        return self.enable_gqa and heads[0] % heads[1] == 0 and heads[0] % heads[2] == 0

    @property
    def has_one_head_dim(self) -> bool:
        return bool(self.q.size(-1) == self.k.size(-1) == self.v.size(-1))


def attend(  # noqa: PLR0913 (the schema of the operator)
    gpu: Gpu,
    plain: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    call = _Attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    chosen = choose_backend(gpu, call)
    if chosen == SDPBackend.MATH:
        return aten._scaled_dot_product_attention_math.default(
            q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    return _RUNS[chosen](call)


def choose_backend(gpu: Gpu, call: _Attention) -> SDPBackend:
    """The first kernel in PyTorch's order that is enabled and takes such a call."""
    for backend, is_enabled, takes in _order(gpu):
        if is_enabled() and takes(gpu, call):
            return backend
    raise RuntimeError(f"no kernel of attention that is enabled takes this call on {gpu.arch}")


def _order(
    gpu: Gpu,
) -> list[tuple[SDPBackend, Callable[[], bool], Callable[[Gpu, _Attention], bool]]]:
    cuda = torch.backends.cuda
    known = {
        SDPBackend.CUDNN_ATTENTION: (cuda.cudnn_sdp_enabled, _takes_cudnn),
        SDPBackend.FLASH_ATTENTION: (cuda.flash_sdp_enabled, _takes_flash),
        SDPBackend.EFFICIENT_ATTENTION: (cuda.mem_efficient_sdp_enabled, _takes_efficient),
        SDPBackend.MATH: (cuda.math_sdp_enabled, lambda gpu, call: True),
    }
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
    if order[:3] == list(_USUAL_ORDER) and _prefers_cudnn(gpu):
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return [(backend, *known[backend]) for backend in order if backend in known]


_USUAL_ORDER = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
# A user can ask for another one: sdpa_kernel(..., set_priority=True).


def _prefers_cudnn(gpu: Gpu) -> bool:
    """Whether cuDNN comes first, as on Hopper and Blackwell with the cuDNN of PyTorch's wheels."""
    is_refused = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    return gpu.version[0] in (9, 10) and not is_refused


def _takes_cudnn(gpu: Gpu, call: _Attention) -> bool:
    q, k, v = call.q, call.k, call.v
    may_vary = not torch.are_deterministic_algorithms_enabled() or (
        torch.is_deterministic_algorithms_warn_only_enabled()
    )
    return (
        gpu.is_between(_AMPERE, _NEWEST)
        and may_vary
        and q.dtype in _HALVES
        and call.is_dense
        and call.has_one_batch
        and (call.has_as_many_heads or call.has_groups_of_heads)
        and all(d <= _MOST_HEAD_DIM_CUDNN and d % 8 == 0 for d in (q.size(-1), v.size(-1)))
        and k.size(2) != 1
        and (call.dropout_p == 0.0 or q.size(2) != 1)
        and (call.dropout_p * _CUDNN_STEPS).is_integer()
        and not (call.mask is not None and call.mask.requires_grad)  # of which it has no gradient
    )


def _takes_flash(gpu: Gpu, call: _Attention) -> bool:
    head_dim = call.q.size(-1)
    most = _MOST_HEAD_DIM_ROCM if gpu.is_rocm else _MOST_HEAD_DIM
    return (
        (gpu.is_rocm or gpu.is_between(_AMPERE, _NEWEST))
        and call.mask is None
        and call.q.dtype in _HALVES
        and call.is_dense
        and call.has_one_batch
        and (call.has_as_many_heads or call.has_groups_of_heads)
        and call.has_one_head_dim
        and head_dim <= most
        and not (call.is_causal and call.q.size(2) != call.k.size(2))
        and not _lacks_backward_of_flash(gpu, call)
    )


def _lacks_backward_of_flash(gpu: Gpu, call: _Attention) -> bool:
    """Whether shared memory is too small for the backward kernel of such a head."""
    is_small = gpu.is_between((8, 6), (8, 9)) or gpu.is_between((12, 0), (12, 1))
    head_dim = call.q.size(-1)
    fits = head_dim <= 192 or (head_dim > 224 and call.dropout_p == 0.0)
    return is_small and call.differentiates and not fits


def _takes_efficient(gpu: Gpu, call: _Attention) -> bool:
    q, v = call.q, call.v
    takes_bfloat16 = gpu.is_rocm or gpu.version >= _AMPERE
    dtypes = (torch.float32, *(_HALVES if takes_bfloat16 else (torch.float16,)))
    step = _alignment(gpu, q.dtype)
    return (
        (gpu.is_rocm or gpu.is_between((5, 0), _NEWEST))
        and q.dtype in dtypes
        and call.is_dense
        and call.has_one_batch
        and call.has_as_many_heads
        and bool(q.size(-1) == call.k.size(-1))
        and all(d > 0 and d % step == 0 for d in (q.size(-1), v.size(-1)))
    )


def _alignment(gpu: Gpu, dtype: torch.dtype) -> int:
    """The numbers that a row is to have a multiple of, for matrix units to read it."""
    is_half = dtype in _HALVES
    if gpu.is_rocm or gpu.version >= _AMPERE:
        return 8 if is_half else 4
    return 8 if is_half and gpu.version >= (7, 0) else 1


def _run_cudnn(call: _Attention) -> torch.Tensor:
    mask = _as_bias(call)
    arguments = (call.q, call.k, call.v, mask, call.differentiates, call.dropout_p, call.is_causal)
    op = aten._scaled_dot_product_cudnn_attention.default
    result: torch.Tensor = op(*arguments, False, scale=call.scale)[0]
    return result


def _run_flash(call: _Attention) -> torch.Tensor:
    head_dim = call.q.size(-1)
    scale = call.scale if call.scale is not None else float(head_dim) ** -0.5
    missing = -head_dim % 8
    padded = [torch.nn.functional.pad(t, (0, missing)) if missing else t for t in _inputs(call)]
    op = aten._scaled_dot_product_flash_attention.default
    result: torch.Tensor = op(*padded, call.dropout_p, call.is_causal, False, scale=scale)[0]
    return result[..., :head_dim] if missing else result


def _run_efficient(call: _Attention) -> torch.Tensor:
    mask = _as_bias(call)
    if mask is not None:
        mask = _align_bias(mask, call)
    arguments = (*_inputs(call), mask, call.differentiates, call.dropout_p, call.is_causal)
    op = aten._scaled_dot_product_efficient_attention.default
    result: torch.Tensor = op(*arguments, scale=call.scale)[0]
    return result


def _inputs(call: _Attention) -> tuple[torch.Tensor, ...]:
    return call.q, call.k, call.v


def _as_bias(call: _Attention) -> torch.Tensor | None:
    """The mask as numbers that are added to the scores."""
    if call.mask is None or call.mask.dtype != torch.bool:
        return call.mask
    zero = torch.scalar_tensor(0.0, dtype=call.q.dtype, device=call.q.device)
    never = torch.scalar_tensor(float("-inf"), dtype=call.q.dtype, device=call.q.device)
    return torch.where(call.mask, zero, never)


def _align_bias(mask: torch.Tensor, call: _Attention) -> torch.Tensor:
    """The mask for each head, in rows that begin at multiples of 16 numbers."""
    missing = -mask.size(-1) % 16
    if missing:
        mask = torch.nn.functional.pad(mask, (0, missing))[..., : mask.size(-1)]
    shape = (call.q.size(0), call.q.size(1), call.q.size(2), call.k.size(2))
    return mask.expand(shape)


_RUNS: dict[SDPBackend, Callable[[_Attention], torch.Tensor]] = {
    SDPBackend.CUDNN_ATTENTION: _run_cudnn,
    SDPBackend.FLASH_ATTENTION: _run_flash,
    SDPBackend.EFFICIENT_ATTENTION: _run_efficient,
}
