"""Segment reductions in Triton. To be imported only where `triton` is installed.

A program reduces one segment, in a block of columns: it adds up blocks of rows elementwise, then
the rows of the block. A long segment would keep one program busy alone. So it is first cut into
pieces of `LONG` rows, counted from its start. A program for each `LONG` rows of the data reduces
the one whole piece that begins there, if there is one:

    rows       0         LONG      2 LONG    3 LONG
    segments   [ a  ][ b                       ][c]
    pieces           [ b, 0   ][ b, 1   ]              whose sums are in places 0 and 1; the rest
                                                       of b is added by the program of b

No two pieces begin in the same place: between their first rows are at least `LONG` rows. So nothing
is counted beforehand, and nothing waits. No atomics: the order of additions within a segment
depends on its size alone.
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
"""Rows above which a segment is cut into pieces of as many.

On an H100, 512 and 2,048 take between 0.9 and 1.1 times as long (`scripts/check_gpu_kernels.py`).
"""
CUT_ABOVE = 8192
"""Rows of all segments up to which nothing is cut: there the cutting takes longer than it saves."""
IS_INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether `TRITON_INTERPRET=1` was set: kernels run on the CPU, in NumPy."""

# Numbers in one block, rows times columns, which a program adds at once. On an H100, 2,048 and
# 4,096 take up to 1.7 times as long on short segments of 64 columns, and gain nothing on long ones.
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
def _reduce_rows(acc, REDUCTION: tl.constexpr):  # type: ignore[no-untyped-def]
    if REDUCTION == "sum":
        return tl.reduce(acc, 0, _sum)
    elif REDUCTION == "max":
        return tl.reduce(acc, 0, _max)
    else:
        return tl.reduce(acc, 0, _min)


@triton.jit
def piece_kernel(  # type: ignore[no-untyped-def]
    data, offsets, partials, num_segments, num_rows, num_cols, row_stride, col_stride,
    IDENTITY: tl.constexpr, FLOATING: tl.constexpr, HALF: tl.constexpr, REDUCTION: tl.constexpr,
    LONG_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """`partials[p] = reduction of data[first:first + LONG_ROWS]`, `p = first // LONG_ROWS`.

    `first` is where a whole piece of a segment begins. Where none begins, nothing is written.
    """
    identity: tl.constexpr = float(IDENTITY) if FLOATING else int(IDENTITY)
    dtype: tl.constexpr = tl.float32 if HALF else data.dtype.element_ty
    piece = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    # a piece that begins here has the last row here: its segment is the last that begins before
    last = piece * LONG_ROWS + LONG_ROWS - 1
    segment = piece * 0
    beyond = segment + num_segments
    while beyond - segment > 1:
        middle = (segment + beyond) // 2
        is_before = tl.load(offsets + middle) <= last
        segment = tl.where(is_before, middle, segment)
        beyond = tl.where(is_before, beyond, middle)
    start = tl.maximum(tl.load(offsets + segment), 0)
    end = tl.minimum(tl.load(offsets + segment + 1), num_rows)
    before = tl.maximum(piece * LONG_ROWS - start, 0)
    first = start + (before + LONG_ROWS - 1) // LONG_ROWS * LONG_ROWS
    if (first <= last) & (first + LONG_ROWS <= end):
        acc = tl.full([BLOCK_ROWS, BLOCK_COLS], identity, dtype)
        acc = _add_rows(
            acc, data, first, first + LONG_ROWS, cols, num_cols, row_stride, col_stride, identity,
            REDUCTION, BLOCK_ROWS,
        )  # fmt: skip
        result = _reduce_rows(acc, REDUCTION)
        tl.store(partials + piece * num_cols + cols, result, mask=cols < num_cols)


@triton.jit
def segment_kernel(  # type: ignore[no-untyped-def]
    data, offsets, partials, out, num_rows, num_cols, row_stride, col_stride,
    IDENTITY: tl.constexpr, FLOATING: tl.constexpr, HALF: tl.constexpr, REDUCTION: tl.constexpr,
    LONG_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """`out[s] = reduction of data[offsets[s]:offsets[s + 1]]`.

    With `LONG_ROWS`, the whole pieces of a longer segment are in `partials`.
    """
    # bools, numbers and text alone are arguments that inductor can write into its own code
    identity: tl.constexpr = float(IDENTITY) if FLOATING else int(IDENTITY)
    dtype: tl.constexpr = tl.float32 if HALF else data.dtype.element_ty
    segment = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    # never outside of the data, whatever the offsets say
    start = tl.maximum(tl.load(offsets + segment), 0)
    end = tl.minimum(tl.load(offsets + segment + 1), num_rows)
    acc = tl.full([BLOCK_ROWS, BLOCK_COLS], identity, dtype)
    if LONG_ROWS > 0:
        if end - start > LONG_ROWS:
            first = start // LONG_ROWS
            num_pieces = (end - start) // LONG_ROWS
            acc = _add_rows(
                acc, partials, first, first + num_pieces, cols, num_cols, num_cols, 1, identity,
                REDUCTION, BLOCK_ROWS,
            )  # fmt: skip
            start += num_pieces * LONG_ROWS
    acc = _add_rows(
        acc, data, start, end, cols, num_cols, row_stride, col_stride, identity,
        REDUCTION, BLOCK_ROWS,
    )  # fmt: skip
    result = _reduce_rows(acc, REDUCTION)
    target = out + segment * num_cols + cols
    tl.store(target, result.to(out.dtype.element_ty), mask=cols < num_cols)


def constants_of(dtype: torch.dtype, num_cols: int, reduction: str) -> dict[str, Any]:
    """The constants of both kernels, but for `LONG_ROWS`."""
    block_cols = min(triton.next_power_of_2(num_cols), 128)
    return {
        "IDENTITY": str(identity_of(dtype, reduction)),
        "FLOATING": dtype.is_floating_point,
        "HALF": accumulator_dtype(dtype) != dtype,
        "REDUCTION": reduction,
        "BLOCK_ROWS": min(_BLOCK_SIZE // block_cols, 128),
        "BLOCK_COLS": block_cols,
    }


def launch_reduction(data: Tensor, offsets: Tensor, reduction: str) -> Tensor:
    num_segments = offsets.shape[0] - 1
    out = data.new_empty((num_segments, *data.shape[1:]))
    if out.numel() == 0:
        return out
    num_cols = out.numel() // num_segments
    rows = data.reshape(data.shape[0], num_cols)  # a view unless strides forbid it
    sizes = (rows.shape[0], num_cols, rows.stride(0), rows.stride(1))
    constants = constants_of(data.dtype, num_cols, reduction)
    num_blocks = triton.cdiv(num_cols, constants["BLOCK_COLS"])
    # PyTorch 2.11 wraps no kernel that is interpreted
    on_pieces = piece_kernel if IS_INTERPRETED else wrap_triton(piece_kernel)
    on_segments = segment_kernel if IS_INTERPRETED else wrap_triton(segment_kernel)
    partials, long_rows = out, 0  # without pieces, the kernel reads no partial result
    if data.shape[0] > CUT_ABOVE:
        num_pieces, long_rows = data.shape[0] // LONG, LONG
        partials = data.new_empty((num_pieces, num_cols), dtype=accumulator_dtype(data.dtype))
        on_pieces[num_pieces, num_blocks](
            rows, offsets, partials, num_segments, *sizes, **constants, LONG_ROWS=LONG
        )
    on_segments[num_segments, num_blocks](
        rows, offsets, partials, out, *sizes, **constants, LONG_ROWS=long_rows
    )
    return out
