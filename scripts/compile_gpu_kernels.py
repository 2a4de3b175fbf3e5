#!/usr/bin/env python
"""Compile the kernels in Triton for GPUs that need not be here, and write what they take.

    python scripts/compile_gpu_kernels.py            15 minutes on two cores

Each kernel is compiled for each target, dtype and constant that its launcher can choose, also where
the launcher knows that columns lie one after another and pointers are aligned. The assembler tells
of registers, spills and shared memory; the largest of all variants is in docs/measured/kernels.md.
The exit status is 1 if a kernel spills.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchremat.kernels.segments import segments_triton
from torchremat.kernels.segments.segments_eager import accumulator_dtype

PAGE = Path(__file__).resolve().parents[1] / "docs" / "measured" / "kernels.md"
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx90a": ("hip", "gfx90a", 64),
    "gfx942": ("hip", "gfx942", 64),
}
"""Those of A100, H100, B200, MI250 and MI300."""
TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
REDUCTIONS = ("sum", "max", "min")
KERNELS = ("piece_kernel", "segment_kernel")
NUM_COLS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Of which each gives other blocks; more than 128 give those of 128."""
HOW = """
## How it was measured

Made by `python scripts/compile_gpu_kernels.py`, which needs no GPU: Triton compiles for any target.
A target has {count} variants: {dtypes} dtypes, sums, maxima and minima, 8 widths of blocks, with
and without pieces. The widest and narrowest are compiled for unknown strides too. Registers are
those of a thread. For `sm_*` they come from `cuobjdump --dump-resource-usage`, and for `gfx*` from
the assembler's text, where they are vector registers. Shared memory is that of a block of four
warps, as Triton asks for it. Each kernel is compared with its twin in plain PyTorch under Triton's
interpreter, in `tests/kernels`.

Triton {triton}.
"""


@dataclass(frozen=True)
class Variant:
    """One kernel, compiled with one choice of constants.

    Attributes:
        is_plain: whether columns lie one after another and pointers are aligned to 16 bytes.
    """

    kernel: str
    target: str
    dtype: torch.dtype
    reduction: str
    num_cols: int
    has_pieces: bool
    is_plain: bool = True


@dataclass(frozen=True)
class Resources:
    """What a kernel takes: registers of a thread, what spills from them, and bytes of a block."""

    registers: int
    spills: int
    shared: int

    def at_most(self, other: "Resources") -> bool:
        return all(a <= b for a, b in zip(astuple(self), astuple(other), strict=True))


def list_variants(
    targets: Iterable[str] = tuple(TARGETS),
    dtypes: Iterable[torch.dtype] = tuple(TYPES),
    reductions: Iterable[str] = REDUCTIONS,
    widths: Sequence[int] = NUM_COLS,
) -> Iterator[Variant]:
    """All that the launcher can choose, of these."""
    for choice in itertools.product(targets, dtypes, reductions, widths):
        target, dtype, reduction, num_cols = choice
        for is_plain in (True, False) if num_cols in (NUM_COLS[0], NUM_COLS[-1]) else (True,):
            for kernel, has_pieces in zip((*KERNELS, KERNELS[1]), (True, True, False), strict=True):
                yield Variant(kernel, target, dtype, reduction, num_cols, has_pieces, is_plain)


def compile_variant(variant: Variant) -> Resources:
    """Compile, and read what it takes from the assembler's output."""
    kernel = getattr(segments_triton, variant.kernel)
    constants: dict[str, Any] = segments_triton.constants_of(
        variant.dtype, variant.num_cols, variant.reduction
    )
    constants["LONG_ROWS"] = segments_triton.LONG if variant.has_pieces else 0
    types = _types_of(variant)
    if variant.is_plain:
        constants["col_stride"] = 1
    types |= dict.fromkeys(constants, "constexpr")
    signature = {argument: types[argument] for argument in kernel.arg_names}
    pointers = [i for i, a in enumerate(kernel.arg_names) if signature[a].startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers} if variant.is_plain else {}
    source = ASTSource(kernel, signature, constants, aligned)
    binary = triton.compile(source, target=GPUTarget(*TARGETS[variant.target]))
    return read_resources(binary)


def read_resources(binary: Any) -> Resources:
    """What a compiled kernel takes, by the assembler's output."""
    return _read_cubin(binary) if "cubin" in binary.asm else _read_amdgcn(binary)


def _types_of(variant: Variant) -> dict[str, str]:
    data = f"*{TYPES[variant.dtype]}"
    partials = f"*{TYPES[accumulator_dtype(variant.dtype)]}" if variant.has_pieces else data
    numbers = ("num_segments", "num_rows", "num_cols", "row_stride", "col_stride")
    pointers = {"data": data, "out": data, "partials": partials, "offsets": "*i64"}
    return pointers | dict.fromkeys(numbers, "i32")


def _read_cubin(binary: Any) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Resources(found["REG"], found["STACK"] + found["LOCAL"], binary.metadata.shared)


def _read_amdgcn(binary: Any) -> Resources:
    text = binary.asm["amdgcn"]
    found = {key: int(n) for key, n in re.findall(r"\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    spills = found["vgpr_spill_count"] + found["sgpr_spill_count"]
    return Resources(found["vgpr_count"], spills, binary.metadata.shared)


def _largest(found: Iterable[Resources]) -> Resources:
    return Resources(*(max(column) for column in zip(*map(astuple, found), strict=True)))


Limits = dict[tuple[str, str, str], Resources]
"""The largest by kernel, dtype and target."""


def measure(variants: Sequence[Variant]) -> Limits:
    with tempfile.TemporaryDirectory() as cache:
        # Triton 3.9 warns where the second is not set
        settings = {"TRITON_CACHE_DIR": cache, "TRITON_DEFAULT_FP_FUSION": "1"}
        with ProcessPoolExecutor(initializer=os.environ.update, initargs=(settings,)) as pool:
            found = list(pool.map(compile_variant, variants, chunksize=16))
    groups: dict[tuple[str, str, str], list[Resources]] = {}
    for variant, resources in zip(variants, found, strict=True):
        key = (variant.kernel, TYPES[variant.dtype], variant.target)
        groups.setdefault(key, []).append(resources)
    return {key: _largest(group) for key, group in groups.items()}


def write_page(limits: Limits, count: int) -> None:
    spilling = [key for key, found in limits.items() if found.spills]
    registers = max(found.registers for found in limits.values())
    shared = max(found.shared for found in limits.values())
    result = f"{len(spilling)} of {len(limits)} spill" if spilling else "None spills registers"
    lines = [
        "# Kernels, compiled for GPUs that are not here\n",
        f"The two kernels in Triton compile for {len(TARGETS)} targets, in {count:,} variants.",
        f"{result}. The most are {registers} registers, and {shared:,} bytes of shared memory.\n",
        "Registers, bytes of shared memory, and what spills if anything does: the most of all",
        "variants.\n",
        f"| kernel | dtype | {' | '.join(TARGETS)} |",
        "|---|---|" + "---:|" * len(TARGETS),
    ]
    for kernel, dtype in itertools.product(KERNELS, TYPES.values()):
        cells = (limits[kernel, dtype, target] for target in TARGETS)
        lines.append(f"| {kernel} | {dtype} | {' | '.join(map(_write_cell, cells))} |")
    how = HOW.format(count=count // len(TARGETS), dtypes=len(TYPES), triton=triton.__version__)
    PAGE.write_text("\n".join(lines) + "\n" + how)


def _write_cell(found: Resources) -> str:
    spills = f", {found.spills}" if found.spills else ""
    return f"{found.registers}, {found.shared:,}{spills}"


def read_page() -> Limits:
    """The limits that the page gives."""
    limits: Limits = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[0] in KERNELS:
            kernel, dtype, *rest = cells
            for target, cell in zip(TARGETS, rest, strict=True):
                registers, shared, *spills = (int(n.replace(",", "")) for n in cell.split(", "))
                limits[kernel, dtype, target] = Resources(registers, sum(spills), shared)
    return limits


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    variants = list(list_variants())
    limits = measure(variants)
    write_page(limits, len(variants))
    return int(any(found.spills for found in limits.values()))


if __name__ == "__main__":
    sys.exit(main())
