"""`take_rows`: rows of a tensor in another order, each at most once, with holes.

    y[m] = x[index[m]]        where index[m] is not -1
    x[n] = y[inverse[n]]      where inverse[n] is not -1

Concatenated rows become padded ones so, and padded rows concatenated; the derivative of one is the
other. So nothing that stands in a hole, NaN say, comes into a gradient, and a GPU needs no atomics.
"""

from typing import Any

import torch
from torch import Tensor

from torchremat import _torch


def take_rows(x: Tensor, index: Tensor, inverse: Tensor, *, zero: bool = False) -> Tensor:
    """With `zero` a hole is 0; else it is some row of `x`, as good as the others to compute with.

    >>> x = torch.tensor([1., 2., 3.])
    >>> take_rows(x, torch.tensor([2, -1, 0]), torch.tensor([2, -1, 0]), zero=True)
    tensor([3., 0., 1.])
    """
    return _op(x, index, inverse, zero)  # type: ignore[no-any-return]


def _run(x: Tensor, index: Tensor, inverse: Tensor, zero: bool) -> Tensor:
    if x.shape[0] == 0:
        return x.new_zeros((index.shape[0], *x.shape[1:]))
    rows = x.index_select(0, index.clamp(min=0))
    if zero:
        hole = (index < 0).view(-1, *[1] * (x.dim() - 1))
        rows = rows.masked_fill_(hole, 0)
    return rows


def _fake(x: Tensor, index: Tensor, inverse: Tensor, zero: bool) -> Tensor:
    return x.new_empty((index.shape[0], *x.shape[1:]))


def _batch_take_rows(
    info: Any, in_dims: Any, x: Tensor, index: Tensor, inverse: Tensor, zero: bool
) -> tuple[Tensor, int]:
    """Batched rows have one dim more; batched indices are those of one long tensor."""
    x_dim, index_dim, inverse_dim, _ = in_dims
    if index_dim is None and inverse_dim is None:
        return _op(x.movedim(x_dim, -1).contiguous(), index, inverse, zero), x.dim() - 1
    size = info.batch_size
    x = x.expand(size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
    indices = index.expand(size, -1) if index_dim is None else index.movedim(index_dim, 0)
    inverses = inverse.expand(size, -1) if inverse_dim is None else inverse.movedim(inverse_dim, 0)
    rows = _op(
        x.flatten(0, 1),
        _join_indices(indices, x.shape[1]),
        _join_indices(inverses, indices.shape[1]),
        zero,
    )
    return rows.unflatten(0, (size, indices.shape[1])), 0


def _join_indices(indices: Tensor, num_rows: int) -> Tensor:
    shifts = num_rows * torch.arange(indices.shape[0], device=indices.device)
    return torch.where(indices < 0, indices, indices + shifts[:, None]).flatten()


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(run: Any, x: Tensor, index: Tensor, inverse: Tensor, zero: bool) -> Tensor:
        return run(x, index, inverse, zero)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, _, index, inverse, ctx.zero = inputs
        ctx.save_for_backward(index, inverse)
        ctx.save_for_forward(index, inverse)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        index, inverse = ctx.saved_tensors
        return None, _op(cotangent, inverse, index, True), None, None, None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *__: None) -> Tensor:
        index, inverse = ctx.saved_tensors
        return _op(tangent, index, inverse, ctx.zero)  # type: ignore[no-any-return]


_definition = torch.library.custom_op("torchremat::take_rows", _run, mutates_args=())
_definition.register_fake(_fake)
_definition.register_vmap(_batch_take_rows)
_op = torch.ops.torchremat.take_rows.default
_torch.register_function(_op, _Take)
