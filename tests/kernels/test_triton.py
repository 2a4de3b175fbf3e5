"""The kernels in Triton, run by its interpreter and compiled for GPUs that need not be here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).parent
TARGETS = {"sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64"}
is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(is_interpreted, reason="this is the interpreter's run")


@pytest.mark.parametrize(
    "selected",
    [
        ["test_users_ops.py"],
        ["segments/test_segments.py", "-k", "outside or nan or halves or strides"],
        pytest.param(["segments/test_segments.py"], marks=pytest.mark.slow),
        pytest.param(
            ["segments/test_segment_derivatives.py", "-k", "loop or tie or outside"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_passes_under_the_interpreter(selected):
    """Triton reads TRITON_INTERPRET when it is imported, so that a process of its own is needed."""
    file, *options = selected
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(HERE / file)]
    result = subprocess.run(
        command,
        cwd=HERE.parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3000,  # of a run that hangs: a busy machine takes ten times as long
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("reduction", ["sum", "max"])
@pytest.mark.parametrize("name", ["piece_kernel", "segment_kernel"])
def test_compiles(name, target, dtype, reduction, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from torchremat.kernels.segments import segments_triton
    from torchremat.kernels.segments.segments_eager import accumulator_dtype, identity_of

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not set
    kernel = getattr(segments_triton, name)
    data, partials = f"*{NAMES[dtype]}", f"*{NAMES[accumulator_dtype(dtype)]}"
    pointers = {"data": data, "out": data, "partials": partials}
    constants = {
        "IDENTITY": str(identity_of(dtype, reduction)),
        "FLOATING": dtype.is_floating_point,
        "HALF": dtype.itemsize == 2,
        "REDUCTION": reduction,
        "LONG_ROWS": segments_triton.LONG,
        "BLOCK_ROWS": 8,
        "BLOCK_COLS": 128,
    }
    numbers = ("num_segments", "num_rows", "num_cols", "row_stride", "col_stride")
    types = {"offsets": "*i64"} | pointers | dict.fromkeys(numbers, "i32")
    types |= dict.fromkeys(constants, "constexpr")
    signature = {argument: types[argument] for argument in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    binary = triton.compile(source, target=GPUTarget(*TARGETS[target]))
    assert {"cubin", "hsaco"} & set(binary.asm)


def test_inductor_finds_the_kernel():
    from torch._library.triton import get_triton_kernels_for_op

    from torchremat.kernels.segments import segment_ops
    from torchremat.kernels.segments.segments_triton import piece_kernel, segment_kernel

    assert segment_ops.HAS_TRITON
    found = get_triton_kernels_for_op("torchremat::segment_max")
    assert found == [piece_kernel, segment_kernel]
