"""Segment reductions in Triton. To be imported only where `triton` is installed.

A program reduces one segment, in a block of columns: it adds up blocks of rows elementwise, then
the rows of the block. A long segment would keep one program busy alone, so long segments are first
cut into pieces of `LONG` rows, whose results are reduced again. How many pieces there are is known
on the device only; that there are at most 2 * (total // LONG) is known before, so nothing waits.
No atomics: the order of additions depends on sizes alone.
"""
# Triton's code is not Python: a kernel takes what it reads one by one, and a condition on a
# constant is decided while it is compiled, in an `if` of its own
# ruff: noqa: PLR0913, PLR0917, SIM102

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from torchremat.kernels.segments.segments_eager import accumulator_dtype, identity_of

LONG = 1024
"""Rows above which a segment is cut into pieces of as many."""
CUT_ABOVE = 8192
"""Rows of all segments up to which nothing is cut: there the cutting takes longer than it saves."""
IS_INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether `TRITON_INTERPRET=1` was set: kernels run on the CPU, in NumPy."""

# Numbers in one block, rows times columns, which a program adds at once. Chosen by hand.
_BLOCK_SIZE = 1024


@triton.jit
def _combine(a, b, REDUCTION: tl.constexpr):  # type: ignore[no-untyped-def]
    if REDUCTION == "sum":
        return a + b
    elif REDUCTION == "max":
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _sum(a, b):  # type: ignore[no-untyped-def]
    return a + b


@triton.jit
def _max(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _min(a, b):  # type: ignore[no-untyped-def]
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _add_rows(  # type: ignore[no-untyped-def]
    acc, data, start, end, cols, num_cols, row_stride, col_stride, identity,
    REDUCTION: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    columns = data + cols[None, :].to(tl.int64) * col_stride
    first = start
    while first < end:  # not `range`: the interpreter cannot take bounds from arrays of NumPy 2.4
        rows = first + tl.arange(0, BLOCK_ROWS)
        mask = (rows < end)[:, None] & (cols < num_cols)[None, :]
        block = tl.load(columns + rows[:, None] * row_stride, mask=mask, other=identity)
        acc = _combine(acc, block.to(acc.dtype), REDUCTION)
        first += BLOCK_ROWS
    return acc


@triton.jit
def segment_kernel(  # type: ignore[no-untyped-def]
    data, starts, ends, partials, bounds, out, num_rows, num_cols, row_stride, col_stride,
    IDENTITY: tl.constexpr, FLOATING: tl.constexpr, HALF: tl.constexpr, REDUCTION: tl.constexpr,
    LONG_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """`out[s] = reduction of data[starts[s]:ends[s]]`.

    With `LONG_ROWS`, that of a longer segment is of `partials[bounds[s]:bounds[s + 1]]`.
    """
    # bools, numbers and text alone are arguments that inductor can write into its own code
    identity: tl.constexpr = float(IDENTITY) if FLOATING else int(IDENTITY)
    dtype: tl.constexpr = tl.float32 if HALF else data.dtype.element_ty
    segment = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    # never outside of the data, whatever the offsets say
    start = tl.maximum(tl.load(starts + segment), 0)
    end = tl.minimum(tl.load(ends + segment), num_rows)
    acc = tl.full([BLOCK_ROWS, BLOCK_COLS], identity, dtype)
    if LONG_ROWS > 0:
        if end - start > LONG_ROWS:
            first = tl.load(bounds + segment)
            last = tl.load(bounds + segment + 1)
            acc = _add_rows(
                acc, partials, first, last, cols, num_cols, num_cols, 1, identity,
                REDUCTION, BLOCK_ROWS,
            )  # fmt: skip
            end = start
    acc = _add_rows(
        acc, data, start, end, cols, num_cols, row_stride, col_stride, identity,
        REDUCTION, BLOCK_ROWS,
    )  # fmt: skip
    if REDUCTION == "sum":
        result = tl.reduce(acc, 0, _sum)
    elif REDUCTION == "max":
        result = tl.reduce(acc, 0, _max)
    else:
        result = tl.reduce(acc, 0, _min)
    target = out + segment * num_cols + cols
    tl.store(target, result.to(out.dtype.element_ty), mask=cols < num_cols)


def launch_reduction(data: Tensor, offsets: Tensor, reduction: str) -> Tensor:
    num_segments = offsets.shape[0] - 1
    out = data.new_empty((num_segments, *data.shape[1:]))
    if out.numel() == 0:
        return out
    num_cols = out.numel() // num_segments
    rows = data.reshape(data.shape[0], num_cols)  # a view unless strides forbid it
    block_cols = min(triton.next_power_of_2(num_cols), 128)
    block_rows = min(_BLOCK_SIZE // block_cols, 128)
    accumulator = accumulator_dtype(data.dtype)

    def launch(out: Tensor, starts: Tensor, ends: Tensor, pieces: Any) -> None:
        partials, bounds, long_rows = pieces
        grid = (starts.shape[0], triton.cdiv(num_cols, block_cols))
        # PyTorch 2.11 wraps no kernel that is interpreted
        kernel = segment_kernel if IS_INTERPRETED else wrap_triton(segment_kernel)
        kernel[grid](
            rows, starts, ends, partials, bounds, out,
            rows.shape[0], num_cols, rows.stride(0), rows.stride(1),
            IDENTITY=str(identity_of(data.dtype, reduction)),
            FLOATING=data.dtype.is_floating_point, HALF=accumulator != data.dtype,
            REDUCTION=reduction, LONG_ROWS=long_rows, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
        )  # fmt: skip

    starts, ends = offsets.narrow(0, 0, num_segments), offsets.narrow(0, 1, num_segments)
    whole = (offsets, offsets, 0)  # what the kernel does not read
    if data.shape[0] > CUT_ABOVE:
        bounds, piece_starts, piece_ends = _pieces(offsets, data.shape[0])
        partials = data.new_empty((piece_starts.shape[0], num_cols), dtype=accumulator)
        launch(partials, piece_starts, piece_ends, whole)
        whole = (partials, bounds, LONG)
    launch(out, starts, ends, whole)
    return out


def _pieces(offsets: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut segments longer than `LONG`: the range of pieces of each, their starts and ends.

    Rows 0 to 3 * LONG in one segment:  bounds 0 3;  starts 0 1 2 3 4 5 and ends 1 2 3 3 3 3, times
    LONG. The pieces beyond the last are of no segment, and nobody reads them.
    """
    lengths = offsets.diff()
    num_pieces = torch.where(lengths > LONG, (lengths + LONG - 1) // LONG, 0)
    bounds = torch.cat([offsets.new_zeros(1), num_pieces.cumsum(0)])
    piece = torch.arange(2 * (num_rows // LONG), device=offsets.device)
    segment = torch.searchsorted(bounds, piece, right=True) - 1
    segment = segment.clamp(max=lengths.shape[0] - 1)
    first = offsets.index_select(0, segment)
    starts = first + (piece - bounds.index_select(0, segment)) * LONG
    ends = torch.minimum(starts + LONG, offsets.index_select(0, segment + 1))
    return bounds, starts, ends
