#!/usr/bin/env python
"""Compare the kernels in Triton with the same in plain PyTorch, on a GPU, and time both.

    python scripts/check_gpu_kernels.py        takes under 2 minutes, most of it compiling kernels

Each reduction, dtype and distribution of lengths is compared with a loop on the CPU in double
precision and differentiated. A second run must be equal to the bit. Then kernel and twin are timed,
with the bytes that each moves in a second, and `torch.compile` is tried. The exit status is 1 if
anything differs. Without a GPU the twin is checked on what is there, and nothing is timed.
"""

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerator import describe_device, find_device

from torchremat.kernels.segments import segment_ops
from torchremat.kernels.segments.segments import offsets_of, segment_max, segment_min, segment_sum
from torchremat.kernels.segments.segments_eager import reduce_segments

REDUCTIONS = {"sum": segment_sum, "max": segment_max, "min": segment_min}
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int32,
    torch.int64,
)
LENGTHS = {
    "none": [],
    "empty": [0, 0, 0],
    "mixed": [3, 0, 17, 1, 0, 200],
    "huge": [5, 0, 30_000, 1, 2000, 7],
}
TRAILING = ((), (3,), (2, 65), (300,))
TIMED = {  # lengths, trailing dims
    "100,000 segments of 0-20 rows": (lambda: torch.randint(0, 21, (100_000,)), (64,)),
    "1,000 segments of 0-2,000 rows": (lambda: torch.randint(0, 2001, (1000,)), (64,)),
    "one of 1,000,000 rows among 1,000": (lambda: torch.tensor([10] * 999 + [1_000_000]), (64,)),
    "1,000,000 segments of 0-20, no dims": (lambda: torch.randint(0, 21, (1_000_000,)), ()),
    "256 segments of 0-1,000, 1,024 wide": (lambda: torch.randint(0, 1001, (256,)), (1024,)),
    "64 segments of 10 rows": (lambda: torch.full((64,), 10), (64,)),
}


def main() -> int:
    """Print what is there, what differs, and times."""
    torch.manual_seed(0)
    device = find_device()
    print(f"PyTorch {torch.__version__}, Triton {triton_version()}, {describe_device(device)}")
    begun = time.perf_counter()
    wrong = check_values(device) + check_gradients(device)
    print(f"checked in {time.perf_counter() - begun:.0f} s: {len(wrong)} wrong")
    for line in wrong:
        print("  WRONG", line)
    if device.type != "cuda":
        print(f"no GPU: the twin was checked on {device.type}, and no kernel")
        return int(bool(wrong))
    if not segment_ops.HAS_TRITON:
        print("no Triton: the twin was checked on the GPU, and no kernel")
        return int(bool(wrong))
    wrong += check_compiled(device)
    time_all(device)
    print(f"{time.perf_counter() - begun:.0f} s in all")
    return int(bool(wrong))


def triton_version() -> str:
    if not segment_ops.HAS_TRITON:
        return "not installed"
    import triton  # noqa: PLC0415

    return str(triton.__version__)


def check_values(device: torch.device) -> list[str]:
    """Differences from a loop over slices."""
    wrong = []
    for dtype, (kind, lengths), trailing in itertools.product(DTYPES, LENGTHS.items(), TRAILING):
        offsets = offsets_of(torch.tensor(lengths, dtype=torch.int64))
        data = (torch.randn(int(offsets[-1]), *trailing) * 20).round().div(4).to(dtype)
        on_device = data.to(device), offsets.to(device)
        for reduction, reduce in REDUCTIONS.items():
            actual = reduce(*on_device)
            same = torch.equal(actual, reduce(*on_device))
            twin = reduce_segments(*on_device, reduction).cpu()
            expected = by_loop(data, offsets, reduction)
            # multiples of 1/4: sums are exact but for the rounding to a half, which is one rounding
            if not (torch.equal(actual.cpu(), expected) and torch.equal(twin, expected) and same):
                wrong.append(f"{reduction} {dtype} {kind} {trailing}; equal when repeated: {same}")
    return wrong


def by_loop(data: Tensor, offsets: Tensor, reduction: str) -> Tensor:
    wide = data.double() if data.dtype.is_floating_point else data.long()
    limits = torch.finfo if data.dtype.is_floating_point else torch.iinfo
    least, most = limits(data.dtype).min, limits(data.dtype).max
    if data.dtype.is_floating_point:
        least, most = -float("inf"), float("inf")
    empty = {"sum": 0, "max": least, "min": most}[reduction]
    reduce = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[reduction]
    ends = offsets.tolist()
    out = wide.new_full((len(ends) - 1, *data.shape[1:]), empty)
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        if end > start:
            out[i] = reduce(wide[start:end], 0)
    return out.to(data.dtype)


def check_gradients(device: torch.device) -> list[str]:
    """Derivatives that are not those of finite differences, to second order."""
    wrong = []
    offsets = torch.tensor([0, 2, 5], device=device)
    x = torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True)
    for name, reduce in REDUCTIONS.items():

        def f(x: Tensor, reduce: Callable[..., Tensor] = reduce) -> Tensor:
            return reduce(x, offsets).sin()

        try:
            torch.autograd.gradcheck(f, x, check_forward_ad=True, check_batched_grad=True)
            torch.autograd.gradgradcheck(f, x)
        except Exception as error:  # reported with the others
            wrong.append(f"derivative of {name}: {error}")
    return wrong


def check_compiled(device: torch.device) -> list[str]:
    """Reductions that `torch.compile` gets wrong, or cannot compile."""
    wrong = []
    offsets = offsets_of(torch.tensor(LENGTHS["huge"], device=device))
    x = torch.randn(int(offsets[-1]), 8, device=device, requires_grad=True)
    for name, reduce in REDUCTIONS.items():

        def f(x: Tensor, offsets: Tensor, reduce: Callable[..., Tensor] = reduce) -> Tensor:
            values: Tensor = reduce(x.sin(), offsets)
            return torch.where(values.isinf(), 0, values).square().sum()

        try:
            compiled = torch.compile(f, fullgraph=True)
            pairs = [torch.autograd.grad(g(x, offsets), x)[0] for g in (f, compiled)]
            torch.testing.assert_close(*pairs)
        except Exception as error:
            wrong.append(f"compiled {name}: {str(error)[:2000]}")
    print(f"under torch.compile: {len(wrong)} of {len(REDUCTIONS)} wrong", *wrong, sep="\n  ")
    return wrong


def time_all(device: torch.device) -> None:
    """Print microseconds and GB/s of the kernel and of the twin."""
    print(f"{'':38} {'dtype':10} {'kernel':>10} {'':>11} {'twin':>10} {'ratio':>7}")
    for (name, (make, trailing)), dtype in itertools.product(
        TIMED.items(), (torch.float32, torch.bfloat16)
    ):
        offsets = offsets_of(make()).to(device)
        data = torch.randn(int(offsets[-1]), *trailing, device=device).to(dtype)
        out = segment_sum(data, offsets)
        kernel = seconds_of(lambda d=data, o=offsets: segment_sum(d, o))
        twin = seconds_of(lambda d=data, o=offsets: reduce_segments(d, o, "sum"))
        rate = (data.nbytes + out.nbytes + offsets.nbytes) / kernel / 1e9
        print(
            f"{name:38} {str(dtype)[6:]:10} {kernel * 1e6:7.0f} us {rate:6.0f} GB/s"
            f" {twin * 1e6:7.0f} us {kernel / twin:7.3f}"
        )


def seconds_of(call: Callable[[], object], *, repeats: int = 20) -> float:
    """The median of `repeats`."""
    for _ in range(3):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in pairs)[repeats // 2] / 1e3


if __name__ == "__main__":
    sys.exit(main())
