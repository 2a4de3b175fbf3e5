"""Axes whose examples are processes, and the collectives over them.

Beneath every level of `torch.func` and beneath autograd a collective is one exchange of plain
tensors. PyTorch's functional collectives make it, for gloo, NCCL and the others:

    psum            all-reduce                  all_gather      all-gather
    pmax, pmin      all-reduce; of NaNs too     all_to_all      all-to-all
    psum_scatter    reduce-scatter              ppermute        all-to-all, of one part

A collective that only moves data moves bytes, so it serves every dtype. In groups of examples each
process gathers everything, and computes its own part.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed

from torchremat import _torch
from torchremat.batching.collectives.collective_ops import (
    CollectiveOp,
    all_gather_p,
    all_to_all_p,
    axis_index_p,
    check_size,
    pmax_p,
    pmin_p,
    ppermute_p,
    psum_p,
    psum_scatter_p,
)
from torchremat.core.avals import Aval
from torchremat.core.source import current_source
from torchremat.errors import AxisNameError, ProcessError
from torchremat.parallel.process_failures import describe_peers
from torchremat.tracing.axes.named_axes import AxisName

ALONE = "this process"
"""The group of this process, where there are no others."""


def run_collective(
    op: CollectiveOp, *tensors: Tensor, axis_name: AxisName, group: str, **params: Any
) -> Tensor:
    size, rank = _place_in(group, axis_name)
    if op is axis_index_p:
        return torch.full((), rank, dtype=torch.int64, **params)
    (x,) = tensors
    check_size(op.title, axis_name, size, params)
    x = x.contiguous()
    if size == 1:
        return _share_of(op, x.unsqueeze(0), rank, params)
    with _failures_explained(op, x, axis_name, group):
        if "axis_index_groups" in params:
            groups = params.pop("axis_index_groups")
            mine = next(members for members in groups if rank in members)
            everything = _gather(x, group, size)
            return _share_of(op, everything[list(mine)], mine.index(rank), params)
        y: Tensor = _RULES[op](x, group, size, **params)
        return y.contiguous()


CollectiveOp.over_processes = staticmethod(run_collective)


def _place_in(group: str, axis_name: AxisName) -> tuple[int, int]:
    """How many processes a group has, and the number of this one among them."""
    if group == ALONE:
        return 1, 0
    try:
        processes = _torch.group_named(group)
    except RuntimeError as error:
        raise AxisNameError(
            f"the axis {axis_name!r} is of the processes of the group {group!r}, and there is no "
            "such group of torch.distributed any more: run what was traced or recorded with it "
            "before destroy_process_group()"
        ) from error
    return processes.size(), distributed.get_rank(processes)


def _share_of(op: CollectiveOp, everything: Tensor, index: int, params: dict[str, Any]) -> Tensor:
    """The result of the example `index`, where all examples are the first dimension of a tensor."""
    if op is ppermute_p and len(params["perm"]) != len(everything):
        gets = [src for src, dst in params["perm"] if dst == index]
        return everything[gets[0]].clone() if gets else torch.zeros_like(everything[0])
    names = ("axis_size",) if op is ppermute_p else ()
    given = {key: value for key, value in params.items() if key not in names}
    y, dim = op.implementation(everything, **given)
    y = y if dim is None else y.select(dim, index)
    return y.clone(memory_format=torch.contiguous_format)


def _sum(x: Tensor, group: str, size: int) -> Tensor:
    return _from_carrier(_reduce(_as_carrier(x), "sum", group), x)


def _extremum(kind: str) -> Any:
    def reduce(x: Tensor, group: str, size: int) -> Tensor:
        if not x.is_floating_point():
            return _from_carrier(_reduce(_as_carrier(x), kind, group), x)
        # backends differ in what they take for the extremum of a NaN and a number
        is_nan = x.isnan()
        worst = -torch.inf if kind == "max" else torch.inf
        best = _reduce(x.masked_fill(is_nan, worst), kind, group)
        return best.masked_fill(_reduce(is_nan.byte(), "max", group).bool(), torch.nan)

    return reduce


def _scatter_sum(
    x: Tensor, group: str, size: int, *, scatter_dimension: int, axis_size: int, tiled: bool
) -> Tensor:
    parts = x.unflatten(scatter_dimension, (size, -1)) if tiled else x
    parts = parts.movedim(scatter_dimension, 0)
    carrier = _as_carrier(parts.contiguous())
    found = _torch.process_collectives.reduce_scatter_tensor(carrier, "sum", size, group)
    return _from_carrier(_wait(found).reshape(carrier.shape[1:]), parts[0])


def _gather_along(
    x: Tensor, group: str, size: int, *, axis: int, axis_size: int, tiled: bool
) -> Tensor:
    y = _gather(x, group, size).movedim(0, axis)
    return y.flatten(axis, axis + 1) if tiled else y


def _gather(x: Tensor, group: str, size: int) -> Tensor:
    """Gather the tensors of all processes along a new first dimension."""
    found = _torch.process_collectives.all_gather_into_tensor(_bytes_of(x), size, group)
    return _from_bytes(_wait(found), (size, *x.shape), x.dtype)


def _exchange(
    x: Tensor,
    group: str,
    size: int,
    *,
    split_axis: int,
    concat_axis: int,
    axis_size: int,
    tiled: bool,
) -> Tensor:
    parts = x.unflatten(split_axis, (size, -1)) if tiled else x
    parts = parts.movedim(split_axis, 0).contiguous()
    sent = _bytes_of(parts)
    splits = [sent.numel() // size] * size
    y = _from_bytes(_all_to_all(sent, splits, splits, group), parts.shape, x.dtype)
    y = y.movedim(0, concat_axis)
    return y.flatten(concat_axis, concat_axis + 1) if tiled else y


def _permute(
    x: Tensor, group: str, size: int, *, perm: Sequence[tuple[int, int]], axis_size: int = 0
) -> Tensor:
    rank = distributed.get_rank(_torch.group_named(group))
    sent = _bytes_of(x)
    gives = [sent.numel() * ((rank, other) in perm) for other in range(size)]
    gets = [sent.numel() * ((other, rank) in perm) for other in range(size)]
    received = _all_to_all(sent if any(gives) else sent[:0], gets, gives, group)
    return _from_bytes(received, x.shape, x.dtype) if any(gets) else torch.zeros_like(x)


_RULES = {
    psum_p: _sum,
    pmax_p: _extremum("max"),
    pmin_p: _extremum("min"),
    psum_scatter_p: _scatter_sum,
    all_gather_p: _gather_along,
    all_to_all_p: _exchange,
    ppermute_p: _permute,
}


def _reduce(x: Tensor, kind: str, group: str) -> Tensor:
    return _wait(_torch.process_collectives.all_reduce(x, kind, group))


def _all_to_all(sent: Tensor, gets: list[int], gives: list[int], group: str) -> Tensor:
    return _wait(_torch.process_collectives.all_to_all_single(sent, gets, gives, group))


def _wait(pending: Tensor) -> Tensor:
    return _torch.process_collectives.wait_tensor(pending)  # type: ignore[no-any-return]


_CARRIERS = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.uint16: torch.int32}


def _as_carrier(x: Tensor) -> Tensor:
    """`x` in a dtype in which gloo reduces."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.to(_CARRIERS.get(x.dtype, x.dtype))


def _from_carrier(y: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(y) if like.is_complex() else y.to(like.dtype)


def _bytes_of(x: Tensor) -> Tensor:
    flat = x.resolve_conj().resolve_neg().reshape(-1)
    return flat.view(torch.uint8)


def _from_bytes(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return x.view(dtype).reshape(shape)


@contextmanager
def _failures_explained(
    op: CollectiveOp, x: Tensor, axis_name: AxisName, group: str
) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ProcessError(
            f"{op.title} of {Aval.of(x)} over the axis {axis_name!r} failed in process "
            f"{distributed.get_rank()}, at {current_source() or 'an unknown line'}: the processes "
            f"of the group {group!r} must all call it, with the same shapes. {describe_peers()} "
            f"From torch.distributed: {str(error).strip().splitlines()[0]}"
        ) from error
