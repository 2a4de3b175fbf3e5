"""The kernels in Triton, run by its interpreter and compiled for GPUs that need not be here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

kernels = pytest.importorskip("scripts.compile_gpu_kernels", reason="Triton is not installed")

HERE = Path(__file__).parent
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


@pytest.mark.parametrize("target", kernels.TARGETS)
@pytest.mark.sampled(2)
def test_compiles_and_takes_no_more_than_the_page_says(target):
    limits = kernels.read_page()
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    variants = list(kernels.list_variants([target], dtypes, ["max"], [128]))
    found = kernels.measure(variants)
    assert len(found) == 2 * len(dtypes)
    assert all(resources.spills == 0 for resources in found.values())
    if f"Triton {kernels.triton.__version__}." in kernels.PAGE.read_text():  # others assemble anew
        above = {k: (r, limits[k]) for k, r in found.items() if not r.at_most(limits[k])}
        assert not above


def test_the_page_has_every_kernel_dtype_and_target():
    limits = kernels.read_page()
    assert len(limits) == len(kernels.KERNELS) * len(kernels.TYPES) * len(kernels.TARGETS)
    assert all(r.registers > 0 and r.spills == 0 for r in limits.values())


@pytest.mark.parametrize("num_cols", [1, 3, 100, 128, 5000])
def test_the_widths_are_those_that_the_launcher_can_choose(num_cols):
    for dtype in kernels.TYPES:
        chosen = kernels.segments_triton.constants_of(dtype, num_cols, "sum")
        listed = (kernels.segments_triton.constants_of(dtype, n, "sum") for n in kernels.NUM_COLS)
        assert chosen in listed


def test_inductor_finds_the_kernel():
    from torch._library.triton import get_triton_kernels_for_op

    from torchremat.kernels.segments import segment_ops
    from torchremat.kernels.segments.segments_triton import piece_kernel, segment_kernel

    assert segment_ops.HAS_TRITON
    found = get_triton_kernels_for_op("torchremat::segment_max")
    assert found == [piece_kernel, segment_kernel]
