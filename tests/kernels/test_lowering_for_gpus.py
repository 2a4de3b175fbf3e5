"""Halves of a plan become kernels of GPUs that are not here, and these assemble.

The script tells PyTorch and Triton by hand what they ask of a device; so it runs in a process of
its own. What it leaves out needs a device: inductor runs several configurations of each kernel, and
takes the fastest.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "lower_for_gpus.py"
PAGE = SCRIPT.parents[1] / "docs" / "measured" / "lowered.md"


@pytest.fixture(scope="module")
def rows():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(SCRIPT), "--quick"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="a build for CUDA has a guard of its own"
)
def test_both_halves_are_lowered_for_cuda_and_for_rocm(rows):
    assert {row["target"] for row in rows} == {"sm_90", "gfx942"}
    for row in rows:
        assert row["kernels"] >= 4
        assert row["others"] >= 12  # products of four layers, forward and backward
        assert row["spills"] == 0
        assert 0 < row["registers"] <= 255


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="a build for CUDA has a guard of its own"
)
def test_a_plan_needs_less_than_the_minimum_cut(rows):
    """By inductor's own count of the buffers of the code that it makes."""
    for target in ("sm_90", "gfx942"):
        cut, plan = (row["peak"] for row in rows if row["target"] == target)
        assert plan < 0.9 * cut


def test_the_page_has_all_gpus():
    text = PAGE.read_text()
    assert all(f"| {name} |" in text for name in ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx942"))
    assert text.count("| plan, 70 % |") == text.count("| the minimum cut |") == 15
