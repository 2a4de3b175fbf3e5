"""Reductions over the segments of a concatenated tensor, and their transpose.

`offsets` cuts the rows of `data[total, ...]` into segments, some of them empty:

    data     a b c d e f          segment_sum(data, offsets)       a+b  0  c+d+e+f
    offsets  0 2 2 6              segment_expand(y, offsets, 6)    y0 y0 y2 y2 y2 y2

The order of the additions depends on the sizes alone, so that a replay is equal to the bit.
"""

from typing import Any

import torch
from torch import Tensor

from torchremat.errors import SegmentError, SegmentTypeError
from torchremat.kernels.segments import segment_ops


def segment_sum(
    data: Tensor, offsets: Tensor | None = None, *, lengths: Tensor | None = None
) -> Tensor:
    """The sum of each segment of the rows of `data`; 0 for an empty segment.

        y[s] = sum of data[i] for offsets[s] <= i < offsets[s + 1];   d data[i] = d y[segment of i]

    Halves are added up in float32. The values of offsets on a GPU are not looked at: rows outside
    of `data` count for nothing.

    >>> segment_sum(torch.arange(6.0), torch.tensor([0, 2, 2, 6]))
    tensor([ 1.,  0., 14.])
    >>> segment_sum(torch.ones(3, 2), lengths=torch.tensor([1, 2]))
    tensor([[1., 1.],
            [2., 2.]])
    """
    offsets = _check_segments("segment_sum", data, offsets, lengths)
    if data.is_complex():
        return torch.view_as_complex(_call("segment_sum", torch.view_as_real(data), offsets))
    return _call("segment_sum", data, offsets)


def segment_max(
    data: Tensor, offsets: Tensor | None = None, *, lengths: Tensor | None = None
) -> Tensor:
    """The greatest of each segment of the rows of `data`, elementwise; NaN wins.

    An empty segment gives -inf, or the least number of an integer dtype. Rows that tie share the
    gradient evenly, as in `torch.amax`.

    >>> segment_max(torch.tensor([3.0, 5.0, 4.0]), torch.tensor([0, 2, 2, 3]))
    tensor([5., -inf, 4.])
    """
    return _call("segment_max", data, _check_segments("segment_max", data, offsets, lengths))


def segment_min(
    data: Tensor, offsets: Tensor | None = None, *, lengths: Tensor | None = None
) -> Tensor:
    """The least of each segment, as `segment_max` gives the greatest.

    >>> segment_min(torch.tensor([3, 5, 4]), lengths=torch.tensor([2, 1]))
    tensor([3, 4])
    """
    return _call("segment_min", data, _check_segments("segment_min", data, offsets, lengths))


def segment_expand(values: Tensor, offsets: Tensor, total: int) -> Tensor:
    """The value of its segment for each of `total` rows, and 0 in rows that belong to none.

        y[i] = values[s] for offsets[s] <= i < offsets[s + 1];   d values = segment_sum(d y)

    >>> segment_expand(torch.tensor([7, 8, 9]), torch.tensor([0, 2, 2, 3]), 4)
    tensor([7, 7, 9, 0])
    """
    offsets = _check_segments("segment_expand", values, offsets, None)
    if offsets.shape[0] != values.shape[0] + 1:
        raise SegmentError(
            f"segment_expand is given {values.shape[0]} values and {offsets.shape[0]} offsets: "
            "it takes one offset more than values, the last being where the last segment ends"
        )
    if values.is_complex():
        real = _call("segment_expand", torch.view_as_real(values), offsets, total)
        return torch.view_as_complex(real)
    return _call("segment_expand", values, offsets, total)


def offsets_of(lengths: Tensor) -> Tensor:
    """Where segments of these lengths begin, and the last one ends: `[num_segments + 1]`, int64.

    >>> offsets_of(torch.tensor([2, 0, 4]))
    tensor([0, 2, 2, 6])
    """
    ends = lengths.cumsum(0, dtype=torch.int64)
    return torch.cat([ends.new_zeros(1), ends])


def _call(name: str, *args: Any) -> Tensor:
    return segment_ops.OPS[name](*args)  # type: ignore[no-any-return]


def _check_segments(
    name: str, data: Tensor, offsets: Tensor | None, lengths: Tensor | None
) -> Tensor:
    if (offsets is None) == (lengths is None):
        raise SegmentError(f"{name} takes either offsets or lengths, and is given {_both(offsets)}")
    kind, cuts = ("offsets", offsets) if lengths is None else ("lengths", lengths)
    for what, value in (("data", data), (kind, cuts)):
        if not isinstance(value, Tensor):
            raise SegmentTypeError(
                f"{name} takes {what} that is a tensor, and is given {type(value).__name__}"
            )
    assert cuts is not None
    _check_dtypes(name, data, kind, cuts)
    if data.dim() == 0 or cuts.dim() != 1 or (lengths is None and cuts.shape[0] == 0):
        least = "[num_segments + 1], at least [0]," if lengths is None else "[num_segments]"
        raise SegmentError(
            f"{name} takes data [total, ...] and {kind} {least} "
            f"and is given shapes {list(data.shape)} and {list(cuts.shape)}"
        )
    if data.device != cuts.device:
        raise SegmentError(
            f"{name} is given data on {data.device} and {kind} on {cuts.device}: "
            f"move one, as with {kind}.to(data.device)"
        )
    return cuts.to(torch.int64) if lengths is None else offsets_of(cuts)


def _check_dtypes(name: str, data: Tensor, kind: str, cuts: Tensor) -> None:
    if cuts.is_floating_point() or cuts.is_complex() or cuts.dtype == torch.bool:
        raise SegmentTypeError(f"{name} takes {kind} of an integer dtype, not {cuts.dtype}")
    if data.dtype == torch.bool:
        raise SegmentTypeError(f"{name} takes numbers, not bool: convert with data.to(torch.int64)")
    if data.is_complex() and name in ("segment_max", "segment_min"):
        raise SegmentTypeError(f"{name} takes real numbers, which have an order, not {data.dtype}")


def _both(offsets: Tensor | None) -> str:
    return "neither" if offsets is None else "both"
