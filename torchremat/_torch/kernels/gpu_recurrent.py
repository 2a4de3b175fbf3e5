"""Recurrent layers that cuDNN runs on a GPU, all steps in one kernel, with their shapes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .gpu import Gpu

aten = torch.ops.aten

_RELU, _TANH, _LSTM, _GRU = range(4)
# As PyTorch numbers the modes of cuDNN.
_SAVED_BY_UNIT = {_RELU: 1, _TANH: 1, _LSTM: 6, _GRU: 5}
# What cuDNN keeps for the backward pass is not documented. Its derivative reads each gate, the
# state of each layer and, of an LSTM, the cell and its tanh: so many numbers a step and unit.


def run_lstm(
    gpu: Gpu,
    plain: Callable[..., Any],
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    *options: Any,
) -> Any:
    if not _takes_cudnn(gpu, x):
        return plain(x, state, weights, *options)
    return _run(_LSTM, x, state, weights, *options)


def _layer(mode: int) -> Callable[..., Any]:
    def run(
        gpu: Gpu,
        plain: Callable[..., Any],
        x: Tensor,
        state: Tensor,
        weights: Sequence[Tensor],
        *options: Any,
    ) -> Any:
        if not _takes_cudnn(gpu, x):
            return plain(x, state, weights, *options)
        return _run(mode, x, (state,), weights, *options)[:2]

    return run


run_gru, run_tanh, run_relu = _layer(_GRU), _layer(_TANH), _layer(_RELU)


def _takes_cudnn(gpu: Gpu, x: Tensor) -> bool:
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    is_enabled = torch.backends.cudnn.enabled and not gpu.is_rocm
    return is_enabled and x.dtype in kinds and x.numel() > 0


def _run(  # noqa: PLR0913, PLR0917 (the schema of the operator)
    mode: int,
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    h, c = state[0], state[1] if len(state) > 1 else None
    hidden, projected = h.size(2), 0
    if c is not None and c.size(2) != h.size(2):
        hidden, projected = c.size(2), h.size(2)
    num_parameters = (4 if has_biases else 2) + (projected > 0)
    sizes = (hidden, projected, num_layers, batch_first, dropout, train, bidirectional)
    op = aten._cudnn_rnn.default
    return op(x, weights, num_parameters, None, h, c, mode, *sizes, [], None)[:3]


def fake_cudnn_rnn(  # noqa: PLR0913, PLR0917 (the schema of the operator)
    x: Tensor,
    weights: Sequence[Tensor],
    num_parameters: int,
    buffer: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    mode: int,
    hidden: int,
    projected: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout_state: Tensor | None,
) -> tuple[Tensor, ...]:
    """The shapes of the results; of what is saved, an allowance."""
    directions = 2 if bidirectional else 1
    steps = math.prod(x.shape[:-1])
    out = x.new_empty((*x.shape[:-1], directions * (projected or hidden)))
    numbers = _SAVED_BY_UNIT[mode] * steps * hidden * directions * num_layers
    nbytes = numbers * x.dtype.itemsize if train else 0
    states = h.new_empty(h.shape), h.new_empty((0,) if c is None else c.shape)
    return (out, *states, x.new_empty((nbytes,), dtype=torch.uint8), x.new_empty((0,)))


def fake_cudnn_rnn_backward(
    x: Tensor,
    weights: Sequence[Tensor],
    num_parameters: int,
    buffer: Tensor,
    h: Tensor,
    c: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    of_c = None if c is None else c.new_empty(c.shape)
    return x.new_empty(x.shape), h.new_empty(h.shape), of_c, [w.new_empty(w.shape) for w in weights]
