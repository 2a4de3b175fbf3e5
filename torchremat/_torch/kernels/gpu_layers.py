"""Kernels of dropout, normalisation and cells of recurrent networks that PyTorch takes on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .gpu import Gpu

aten = torch.ops.aten

_MOST_IN_CUDNN_NORM, _MOST_IN_CUDNN_NORM_EVAL = 880_801, 65_535
# The largest batches for which PyTorch asks cuDNN.
_MOST_NUMBERS_CUDNN = 2**31 - 1
# Some of cuDNN's kernels count in 32 bits.


def drop(gpu: Gpu, plain: Callable[..., Any], x: Tensor, p: float, train: bool) -> Any:
    if train and 0 < p < 1 and x.numel() > 0:
        return aten.native_dropout.default(x, p, train)[0]
    return plain(x, p, train)


def normalize_exponentials(op: Any) -> Callable[..., Any]:
    """A softmax or its logarithm, which a GPU computes of float16 in float32 without a copy."""

    def normalize(
        gpu: Gpu, plain: Callable[..., Any], x: Tensor, dim: int, dtype: torch.dtype | None = None
    ) -> Any:
        if x.dtype == torch.float16 and dtype == torch.float32:
            return op(x, dim, True)
        return plain(x, dim, dtype)

    return normalize


def normalize_rms(
    gpu: Gpu,
    plain: Callable[..., Any],
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    is_of_one_dtype = weight is None or weight.dtype == x.dtype
    if x.is_complex() or not is_of_one_dtype or _has_channels_last(x):
        return plain(x, normalized_shape, weight, eps)
    return _normalize(x, weight, normalized_shape, eps)


class _FusedRmsNorm(torch.autograd.Function):
    """The derivative of the fused operator, which PyTorch's builds for the CPU lack."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, normalized_shape: Sequence[int], eps: float | None
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor]
        result = aten._fused_rms_norm.default(x, normalized_shape, weight, eps)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, ctx.shape, _ = inputs
        ctx.save_for_backward(x, weight, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None, _: Any) -> Any:
        if cotangent is None:
            return (None,) * 4
        x, weight, rstd = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:2])
        op = aten._fused_rms_norm_backward.default
        return (*op(cotangent, x, ctx.shape, rstd, weight, mask), None, None)


_apply_rms_norm: Callable[..., Any] = _FusedRmsNorm.apply


def _normalize(
    x: Tensor, weight: Tensor | None, normalized_shape: Sequence[int], eps: float | None
) -> Any:
    return _apply_rms_norm(x, weight, normalized_shape, eps)[0]


def normalize_batch(  # noqa: PLR0913, PLR0917 (the schema of the operator)
    gpu: Gpu,
    plain: Callable[..., Any],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    arguments = (x, weight, bias, mean, var, training, momentum, eps)
    if gpu.is_rocm or not cudnn_enabled or not _takes_cudnn(x, weight, bias, mean, var, training):
        return plain(*arguments, cudnn_enabled)
    return (*aten.cudnn_batch_norm.default(*arguments), 1)


def _takes_cudnn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
) -> bool:
    if weight is None or bias is None or torch.bfloat16 in (x.dtype, weight.dtype):
        return False
    has_statistics = mean is not None and var is not None
    has_none = mean is None and var is None
    most = _MOST_IN_CUDNN_NORM if training else _MOST_IN_CUDNN_NORM_EVAL
    return (
        (x.dtype != torch.float16 or weight.dtype == torch.float32)
        and (has_statistics or (has_none and training))
        and x.dim() >= 3
        and x.size(0) <= most
        and x.numel() < _MOST_NUMBERS_CUDNN
    )


def _has_channels_last(x: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    memory_format = formats.get(x.dim())
    if memory_format is None or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=memory_format)


def run_lstm_cell(
    gpu: Gpu,
    plain: Callable[..., Any],
    x: Tensor,
    state: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    h, c = state
    gates = x.matmul(w_ih.t()), h.matmul(w_hh.t())
    return aten._thnn_fused_lstm_cell.default(*gates, c, b_ih, b_hh)[:2]


def run_gru_cell(
    gpu: Gpu,
    plain: Callable[..., Any],
    x: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    gates = x.matmul(w_ih.t()), h.matmul(w_hh.t())
    return aten._thnn_fused_gru_cell.default(*gates, h, b_ih, b_hh)[0]


def fake_lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    c: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes of a fused cell: the next state and cell, and the gates for its backward."""
    return c.new_empty(c.shape), c.new_empty(c.shape), input_gates.new_empty(input_gates.shape)


def fake_gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    h: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The shapes of a fused cell: the next state, and five numbers a unit for its backward."""
    return h.new_empty(h.shape), h.new_empty((h.size(0), 5 * h.size(1)))


def fake_gru_cell_backward(
    cotangent: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    gates = (cotangent.size(0), 3 * cotangent.size(1))
    biases = [cotangent.new_empty(gates[1:]) if has_bias else None for _ in range(2)]
    of_gates = [cotangent.new_empty(gates) for _ in range(2)]
    return (*of_gates, cotangent.new_empty(cotangent.shape), *biases)
