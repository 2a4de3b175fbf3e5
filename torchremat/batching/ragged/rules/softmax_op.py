"""Softmax within the segments of concatenated rows, as one operator that keeps its result alone.

y = softmax(x):      dy -> y * (dy - sum of dy * y)
y = log_softmax(x):  dy -> dy - exp(y) * sum of dy
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.kernels.segments.segments import segment_expand, segment_max, segment_sum

_MANY = 4096
"""From so many entries a segment on, PyTorch's softmax of each costs less than passes over all."""


def segment_softmax(x: Tensor, offsets: Tensor, *, log: bool = False) -> Tensor:
    """The segments of `x` begin at `offsets`, which go from 0 to its number of rows.

    >>> segment_softmax(torch.tensor([0.0, 0.0, 5.0]), torch.tensor([0, 2, 2, 3]))
    tensor([0.5000, 0.5000, 1.0000])
    """
    return _op(x, offsets, log)  # type: ignore[no-any-return]


def _run(x: Tensor, offsets: Tensor, log: bool) -> Tensor:
    num_segments = offsets.shape[0] - 1
    if x.device.type == "cpu" and x.numel() >= _MANY * num_segments:
        return _one_by_one(x, offsets.tolist(), log)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    greatest = segment_max(wide, offsets)
    greatest = torch.where(greatest.isfinite(), greatest, 0)
    y = wide - segment_expand(greatest, offsets, x.shape[0])
    total = segment_sum(y.exp() if log else y.exp_(), offsets)
    if log:
        y = y.sub_(segment_expand(total.log_(), offsets, x.shape[0]))
    else:
        y = y.div_(segment_expand(total, offsets, x.shape[0]))
    return y.to(x.dtype)


def _one_by_one(x: Tensor, ends: list[int], log: bool) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    function = torch.log_softmax if log else torch.softmax
    for start, end in pairwise(ends):
        if end > start:
            function(x[start:end], 0, out=y[start:end])
    return y


def _fake(x: Tensor, offsets: Tensor, log: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _batch_softmax(
    info: Any, in_dims: Any, x: Tensor, offsets: Tensor, log: bool
) -> tuple[Tensor, int]:
    x_dim, offsets_dim, _ = in_dims
    if offsets_dim is None:
        return _op(x.movedim(x_dim, -1), offsets, log), x.dim() - 1
    x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
    offsets = offsets.movedim(offsets_dim, 0)
    shifts = x.shape[1] * torch.arange(info.batch_size, device=offsets.device)
    joined = torch.cat([(offsets + shifts[:, None])[:, :-1].flatten(), shifts[-1:] + x.shape[1]])
    return _op(x.flatten(0, 1), joined, log).unflatten(0, (info.batch_size, -1)), 0


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(run: Any, x: Tensor, offsets: Tensor, log: bool) -> Tensor:
        return run(x, offsets, log)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, _, offsets, ctx.log = inputs
        ctx.save_for_backward(output, offsets)
        ctx.save_for_forward(output, offsets)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        y, offsets = ctx.saved_tensors
        if ctx.log:
            total = segment_sum(cotangent, offsets)
            slope = cotangent - y.exp() * segment_expand(total, offsets, y.shape[0])
            return None, slope, None, None
        total = segment_sum(cotangent * y, offsets)
        return None, y * (cotangent - segment_expand(total, offsets, y.shape[0])), None, None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *__: None) -> Tensor:
        y, offsets = ctx.saved_tensors
        weights = y.exp() if ctx.log else y
        total = segment_sum(tangent * weights, offsets)
        slope = tangent - segment_expand(total, offsets, y.shape[0])
        return slope if ctx.log else y * slope


_definition = torch.library.custom_op("torchremat::segment_softmax", _run, mutates_args=())
_definition.register_fake(_fake)
_definition.register_vmap(_batch_softmax)
_op = torch.ops.torchremat.segment_softmax.default
_torch.register_function(_op, _Softmax)
