"""The operators on segments in plain PyTorch, for every device; inductor compiles these.

On a CPU rows are added in their order. On a GPU `index_add` would add with atomics, in an order
that varies. So floating numbers go through `segment_reduce`, which has one thread for each sum.
"""

import torch
from torch import Tensor

from torchremat.errors import SegmentError

_REDUCE = {"max": "amax", "min": "amin"}


def reduce_segments(data: Tensor, offsets: Tensor, reduction: str) -> Tensor:
    num_segments = offsets.shape[0] - 1
    dtype = accumulator_dtype(data.dtype)
    shape = (num_segments, *data.shape[1:])
    if reduction == "sum" and data.dtype.is_floating_point and data.device.type != "cpu":
        wide = data.to(dtype).contiguous()
        # the rows outside of all segments are segments too, for which it has no other way
        edges = torch.cat([offsets.new_zeros(1), offsets, offsets.new_full((1,), data.shape[0])])
        sums = torch.segment_reduce(wide, "sum", offsets=edges, unsafe=True, initial=0)
        return sums[1 : num_segments + 1].to(data.dtype)
    bin_of_row = _bin_of_row(offsets, data.shape[0])
    if reduction == "sum":
        bins = data.new_zeros((num_segments + 1, *data.shape[1:]), dtype=dtype)
        return bins.index_add(0, bin_of_row, data.to(dtype))[:num_segments].to(data.dtype)
    bins = data.new_full((num_segments + 1, *data.shape[1:]), identity_of(data.dtype, reduction))
    index = bin_of_row.reshape(-1, *(1 for _ in shape[1:])).expand_as(data)
    return bins.scatter_reduce(0, index, data, _REDUCE[reduction])[:num_segments].clone()


def expand_segments(values: Tensor, offsets: Tensor, total: int) -> Tensor:
    zeros = values.new_zeros((1, *values.shape[1:]))
    return torch.cat([values, zeros]).index_select(0, _bin_of_row(offsets, total))


def _bin_of_row(offsets: Tensor, total: int) -> Tensor:
    """The segment of each row; for rows in none, one more than the last."""
    rows = torch.arange(total, device=offsets.device)
    segments = torch.searchsorted(offsets, rows, right=True) - 1
    return torch.where(segments < 0, offsets.shape[0] - 1, segments)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of `dtype` are added.

    >>> accumulator_dtype(torch.bfloat16), accumulator_dtype(torch.int8)
    (torch.float32, torch.int8)
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def identity_of(dtype: torch.dtype, reduction: str) -> int | float:
    """The result of `reduction` for no rows at all.

    >>> identity_of(torch.int8, "max"), identity_of(torch.float32, "min")
    (-128, inf)
    """
    if reduction == "sum":
        return 0
    if dtype.is_floating_point:
        return float("-inf" if reduction == "max" else "inf")
    limits = torch.iinfo(dtype)
    return limits.min if reduction == "max" else limits.max


def check_offsets(offsets: Tensor, total: int) -> None:
    """Raise `SegmentError` where offsets decrease or leave the rows. Reads the values."""
    falls = offsets[1:] < offsets[:-1]
    if bool(falls.any()):
        at = int(falls.nonzero()[0])
        raise SegmentError(
            f"offsets must not decrease, and offsets[{at}] is {int(offsets[at])}, "
            f"offsets[{at + 1}] is {int(offsets[at + 1])} (lengths are never negative)"
        )
    first, last = int(offsets[0]), int(offsets[-1])
    if first < 0 or last > total:
        raise SegmentError(
            f"offsets go from {first} to {last}, and must stay within the {total} rows of data"
        )
