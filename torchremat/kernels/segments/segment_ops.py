"""The operators behind `segments`: what runs on which device, derivatives, and rules for `vmap`.

    y = segment_sum(data):        dy -> segment_expand(dy)
    y = segment_expand(values):   dy -> segment_sum(dy)
    y = segment_max(data):        dy -> segment_expand(dy / number of ties), where data is y

Tangents of a sum and of an expansion are pushed through the same operator, since both are linear.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.kernels.segments.segments_eager import (
    check_offsets,
    expand_segments,
    reduce_segments,
)

if find_spec("triton") is not None:
    from torchremat.kernels.segments.segments_triton import IS_INTERPRETED, launch_reduction

    _new_op: Callable[..., Any] = torch.library.triton_op  # inductor sees what is inside
    HAS_TRITON = True
else:
    _new_op = torch.library.custom_op
    HAS_TRITON = IS_INTERPRETED = False


def _reduce(data: Tensor, offsets: Tensor, reduction: str) -> Tensor:
    # the interpreter runs kernels on tensors that have memory, and knows no graphs
    if HAS_TRITON and (data.is_cuda or (IS_INTERPRETED and type(data) is Tensor)):
        with _device_of(data):
            return launch_reduction(data, offsets, reduction)
    return reduce_segments(data, offsets, reduction)


def _device_of(data: Tensor) -> AbstractContextManager[Any]:
    """Triton starts kernels on the current device, not on that of the data."""
    several = data.is_cuda and torch.cuda.device_count() > 1
    return torch.cuda.device(data.device) if several else nullcontext()


def _check_reduction(data: Tensor, offsets: Tensor, reduction: str) -> Tensor:
    check_offsets(offsets, data.shape[0])
    return _reduce(data, offsets, reduction)


# one function for each, since `triton_op` reads the source to find the kernels
def _sum(data: Tensor, offsets: Tensor) -> Tensor:
    return _reduce(data, offsets, "sum")


def _max(data: Tensor, offsets: Tensor) -> Tensor:
    return _reduce(data, offsets, "max")


def _min(data: Tensor, offsets: Tensor) -> Tensor:
    return _reduce(data, offsets, "min")


def _expand(values: Tensor, offsets: Tensor, total: int) -> Tensor:
    return expand_segments(values, offsets, total)


def _check_expand(values: Tensor, offsets: Tensor, total: int) -> Tensor:
    check_offsets(offsets, total)
    return expand_segments(values, offsets, total)


def _fake_reduced(data: Tensor, offsets: Tensor) -> Tensor:
    return data.new_empty((offsets.shape[0] - 1, *data.shape[1:]))


def _fake_expand(values: Tensor, offsets: Tensor, total: int) -> Tensor:
    return values.new_empty((total, *values.shape[1:]))


def _batch_reduction(name: str) -> Callable[..., tuple[Tensor, int]]:
    def rule(info: Any, in_dims: Any, data: Tensor, offsets: Tensor) -> tuple[Tensor, int]:
        """Batched data alone has one dim more; batched offsets make one long list of segments."""
        data_dim, offsets_dim = in_dims
        if offsets_dim is None:
            return OPS[name](data.movedim(data_dim, 1), offsets), 1
        data = _with_batch(data, data_dim, info.batch_size)
        joined = _join_offsets(offsets.movedim(offsets_dim, 0), data.shape[1])
        out = OPS[name](data.flatten(0, 1), joined)
        return out.unflatten(0, (info.batch_size, -1))[:, :-1], 0

    return rule


def _batch_expand(
    info: Any, in_dims: Any, values: Tensor, offsets: Tensor, total: int
) -> tuple[Tensor, int]:
    values_dim, offsets_dim, _ = in_dims
    if offsets_dim is None:
        return OPS["segment_expand"](values.movedim(values_dim, 1), offsets, total), 1
    values = _with_batch(values, values_dim, info.batch_size)
    values = torch.cat([values, torch.zeros_like(values[:, :1])], 1) if values.shape[1] else (
        values.new_zeros((info.batch_size, 1, *values.shape[2:]))
    )  # fmt: skip
    joined = _join_offsets(offsets.movedim(offsets_dim, 0), total)
    out = OPS["segment_expand"](values.flatten(0, 1), joined, info.batch_size * total)
    return out.unflatten(0, (info.batch_size, total)), 0


def _with_batch(x: Tensor, dim: int | None, batch_size: int) -> Tensor:
    return x.expand(batch_size, *x.shape) if dim is None else x.movedim(dim, 0)


def _join_offsets(offsets: Tensor, total: int) -> Tensor:
    """One unused segment follows each batch: 0 1 3 and 0 2 2, of 4 rows, give 0 1 3 4 6 6 8."""
    shifts = total * torch.arange(offsets.shape[0], device=offsets.device)
    return torch.cat([(offsets + shifts[:, None]).flatten(), shifts[-1:] + total])


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(run: Any, data: Tensor, offsets: Tensor) -> Tensor:
        return run(data, offsets)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.run, data, offsets = inputs
        ctx.total = data.shape[0]
        ctx.save_for_backward(offsets)
        ctx.save_for_forward(offsets)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        (offsets,) = ctx.saved_tensors
        return None, OPS["segment_expand"](cotangent, offsets, ctx.total), None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, __: None) -> Tensor:
        (offsets,) = ctx.saved_tensors
        return OPS["segment_sum"](tangent, offsets)  # type: ignore[no-any-return]


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(run: Any, values: Tensor, offsets: Tensor, total: int) -> Tensor:
        return run(values, offsets, total)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, _, offsets, ctx.total = inputs
        ctx.save_for_backward(offsets)
        ctx.save_for_forward(offsets)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        (offsets,) = ctx.saved_tensors
        return None, OPS["segment_sum"](cotangent, offsets), None, None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *__: None) -> Tensor:
        (offsets,) = ctx.saved_tensors
        return OPS["segment_expand"](tangent, offsets, ctx.total)  # type: ignore[no-any-return]


class _SegmentExtremum(torch.autograd.Function):
    @staticmethod
    def forward(run: Any, data: Tensor, offsets: Tensor) -> Tensor:
        return run(data, offsets)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, data, offsets = inputs
        ctx.save_for_backward(data, offsets, output)
        ctx.save_for_forward(data, offsets, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        data, offsets, output = ctx.saved_tensors
        is_best, num_best = _find_ties(data, offsets, output)
        share = OPS["segment_expand"](cotangent / num_best, offsets, data.shape[0])
        return None, torch.where(is_best, share, 0), None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, __: None) -> Tensor:
        data, offsets, output = ctx.saved_tensors
        is_best, num_best = _find_ties(data, offsets, output)
        total: Tensor = OPS["segment_sum"](torch.where(is_best, tangent, 0), offsets)
        return total / num_best


def _find_ties(data: Tensor, offsets: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    data, output = data.detach(), output.detach()
    best = OPS["segment_expand"](output, offsets, data.shape[0])
    is_best = (data == best) | (data.isnan() & best.isnan())
    num_best = OPS["segment_sum"](is_best.to(torch.int32), offsets)
    return is_best, num_best.clamp(min=1).to(data.dtype)


OPS: dict[str, Any] = {}
"""The operators by name: `segment_sum`, `segment_max`, `segment_min`, `segment_expand`."""


def _define(
    name: str,
    run: Callable[..., Tensor],
    run_checked: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    batched: Callable[..., tuple[Tensor, int]],
    function: type[torch.autograd.Function],
) -> None:
    definition = _new_op(f"torchremat::{name}", run, mutates_args=())
    definition.register_kernel("cpu")(run_checked)
    definition.register_fake(fake)
    definition.register_vmap(batched)
    OPS[name] = getattr(torch.ops.torchremat, name).default
    _torch.register_function(OPS[name], function)


_define(
    "segment_sum", _sum, lambda data, offsets: _check_reduction(data, offsets, "sum"),
    _fake_reduced, _batch_reduction("segment_sum"), _Sum,
)  # fmt: skip
_define(
    "segment_max", _max, lambda data, offsets: _check_reduction(data, offsets, "max"),
    _fake_reduced, _batch_reduction("segment_max"), _SegmentExtremum,
)  # fmt: skip
_define(
    "segment_min", _min, lambda data, offsets: _check_reduction(data, offsets, "min"),
    _fake_reduced, _batch_reduction("segment_min"), _SegmentExtremum,
)  # fmt: skip
_define("segment_expand", _expand, _check_expand, _fake_expand, _batch_expand, _Expand)
