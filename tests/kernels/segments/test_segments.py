"""Reductions over segments equal a loop over slices, on each device and under the interpreter."""

import pytest
import torch

from torchremat.errors import SegmentError, SegmentTypeError
from torchremat.kernels.segments import segment_ops
from torchremat.kernels.segments.segments import (
    offsets_of,
    segment_expand,
    segment_max,
    segment_min,
    segment_sum,
)

REDUCTIONS = {"sum": segment_sum, "max": segment_max, "min": segment_min}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
LENGTHS = {
    "mixed": [2, 0, 4, 1, 0],
    "no segments": [],
    "no rows": [0, 0],
    "one": [7],
    "a huge one": [1, 0, 200, 3, 2],
}


def by_loop(data, offsets, reduction):
    """The oracle: each segment's slice, reduced by PyTorch in double precision."""
    wide = data.double() if data.dtype.is_floating_point else data.long()
    rows = [wide[a:b] for a, b in zip(offsets.tolist(), offsets.tolist()[1:], strict=False)]
    empty = {"sum": 0, "max": lowest(data.dtype), "min": highest(data.dtype)}[reduction]
    reduce = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[reduction]
    kept = [reduce(r, 0) if len(r) else wide.new_full(wide.shape[1:], empty) for r in rows]
    out = torch.stack(kept) if kept else wide.new_empty((0, *wide.shape[1:]))
    return out.to(data.dtype)


def lowest(dtype):
    return -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype):
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def numbers(*shape, dtype=torch.float32, device="cpu"):
    """Multiples of 1/4, whose sums are exact in float32."""
    return ((torch.randn(shape) * 36).round() / 4).to(dtype=dtype, device=device)


@pytest.fixture
def small_pieces(monkeypatch):
    """Segments of more than 16 rows are long, for the kernel in Triton where there is one."""
    if segment_ops.HAS_TRITON:
        monkeypatch.setattr("torchremat.kernels.segments.segments_triton.LONG", 16)
        monkeypatch.setattr("torchremat.kernels.segments.segments_triton.CUT_ABOVE", 20)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("trailing", [(), (3,), (2, 5)])
@pytest.mark.usefixtures("small_pieces")
def test_equals_a_loop(device, reduction, dtype, trailing):
    offsets = offsets_of(torch.tensor(LENGTHS["mixed"] + LENGTHS["a huge one"], device=device))
    data = numbers(int(offsets[-1]), *trailing, dtype=dtype, device=device)
    actual = REDUCTIONS[reduction](data, offsets)
    expected = by_loop(data, offsets, reduction)
    if segment_ops.IS_INTERPRETED:  # it rounds to bfloat16 towards zero
        torch.testing.assert_close(actual, expected)
    else:
        assert torch.equal(actual, expected)
    assert actual.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("trailing", [(), (0,), (300,)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_any_lengths_and_widths(device, lengths, trailing, reduction):
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    data = numbers(int(lengths.sum()), *trailing, device=device)
    offsets = offsets_of(lengths)
    actual = REDUCTIONS[reduction](data, lengths=lengths)
    torch.testing.assert_close(actual, by_loop(data, offsets, reduction))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "view",
    [lambda x: x.t(), lambda x: x[::2], lambda x: x[:, ::2], lambda x: x[1:, :1].expand(-1, 4)],
    ids=["transposed", "every second row", "every second column", "expanded"],
)
def test_strides(device, view):
    data = view(numbers(12, 12, device=device))
    offsets = torch.tensor([0, 1, 1, 5], device=device)
    torch.testing.assert_close(segment_sum(data, offsets), by_loop(data, offsets, "sum"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows_outside_of_all_segments_do_not_count(device, reduction):
    data = numbers(9, 2, device=device)
    data[0] = data[-1] = float("nan")
    offsets = torch.tensor([1, 3, 8], device=device)
    actual = REDUCTIONS[reduction](data, offsets)
    torch.testing.assert_close(actual, by_loop(data, offsets, reduction))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nan_wins_in_its_own_segment(device, reduction):
    data = torch.tensor([1.0, float("nan"), 3.0, 4.0, 5.0], device=device)
    actual = REDUCTIONS[reduction](data, torch.tensor([0, 3, 5], device=device))
    assert actual.isnan().tolist() == [True, False]


@pytest.mark.parametrize("device", DEVICES)
def test_halves_are_added_up_in_float32(device):
    ones = torch.ones(3008, dtype=torch.bfloat16, device=device)  # added up in bfloat16: 256
    assert segment_sum(ones, torch.tensor([0, 3008], device=device)).item() == 3008


@pytest.mark.parametrize("device", DEVICES)
def test_twice_is_equal_to_the_bit(device):
    data = numbers(500, 7, device=device)
    offsets = torch.tensor([0, 3, 450, 500], device=device)
    assert torch.equal(segment_sum(data, offsets), segment_sum(data, offsets))


def test_on_the_cpu_rows_are_added_in_their_order():
    if segment_ops.IS_INTERPRETED:
        pytest.skip("the kernel in Triton adds up in blocks")
    data = torch.tensor([1e8, 1.0, -1e8, 1.0])
    assert segment_sum(data, torch.tensor([0, 4])).item() == ((1e8 + 1.0) - 1e8) + 1.0 - 1.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_expand_repeats_values(device, dtype):
    lengths = torch.tensor([2, 0, 3], device=device)
    values = numbers(3, 2, dtype=dtype, device=device)
    actual = segment_expand(values, offsets_of(lengths), 5)
    assert torch.equal(actual, values.repeat_interleave(lengths, 0))


def test_expand_gives_zeros_outside_of_all_segments():
    actual = segment_expand(torch.tensor([5, 6]), torch.tensor([1, 2, 3]), 5)
    assert actual.tolist() == [0, 5, 6, 0, 0]
    assert segment_expand(torch.ones(0, 2), torch.tensor([0]), 3).tolist() == [[0, 0]] * 3


def test_complex_numbers():
    data = torch.randn(5, 2, dtype=torch.complex64)
    actual = segment_sum(data, torch.tensor([0, 2, 5]))
    torch.testing.assert_close(actual, torch.stack([data[:2].sum(0), data[2:].sum(0)]))


OFFSETS = torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: segment_sum(x), SegmentError, "either offsets or lengths.*neither"),
        (lambda x: segment_sum(x, OFFSETS, lengths=OFFSETS), SegmentError, "both"),
        (lambda x: segment_sum([1.0], OFFSETS), SegmentTypeError, "data that is a tensor.*list"),
        (lambda x: segment_sum(x, [0, 2]), SegmentTypeError, "offsets that is a tensor.*list"),
        (lambda x: segment_sum(x, lengths=(1,)), SegmentTypeError, "lengths that is.*tuple"),
        (lambda x: segment_sum(x, OFFSETS.float()), SegmentTypeError, "integer dtype.*float32"),
        (lambda x: segment_max(x > 0, OFFSETS), SegmentTypeError, "not bool: convert"),
        (lambda x: segment_max(x + 1j, OFFSETS), SegmentTypeError, "real numbers"),
        (lambda x: segment_sum(x[0], OFFSETS), SegmentError, r"shapes \[\] and \[2\]"),
        (lambda x: segment_sum(x, OFFSETS[:0]), SegmentError, r"\[num_segments \+ 1\].*and \[0\]"),
        (lambda x: segment_sum(x.to("meta"), OFFSETS), SegmentError, "data on meta and.*cpu"),
        (lambda x: segment_expand(x, OFFSETS, 4), SegmentError, "3 values and 2 offsets"),
        (lambda x: segment_sum(x, torch.tensor([0, 2, 1])), SegmentError, r"offsets\[1\] is 2"),
        (lambda x: segment_min(x, torch.tensor([-1, 2])), SegmentError, "from -1 to 2"),
        (lambda x: segment_max(x, torch.tensor([0, 4])), SegmentError, "to 4.*the 3 rows"),
        (lambda x: segment_sum(x, lengths=torch.tensor([2, -1])), SegmentError, "never negative"),
        (lambda x: segment_expand(x[:1], OFFSETS, 1), SegmentError, "to 2.*the 1 rows"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.ones(3))
