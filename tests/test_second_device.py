"""What depends on a device, on one that is not the CPU and does everything late."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="the device is compiled, and c++ is not here"
)


def test_what_depends_on_a_device_holds_on_a_second_one():
    # a process that has made the device has it for good
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/second_device"],
        cwd=_ROOT,
        check=False,
        env={**os.environ, "TORCHREMAT_SECOND_DEVICE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


@pytest.mark.slow
def test_the_command_for_a_gpu_runs_there(tmp_path):
    page = tmp_path / "gpu.md"
    run = subprocess.run(
        ["bash", "scripts/gpu_evidence.sh", "--second-device", str(page)],
        cwd=_ROOT,
        check=False,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    text = page.read_text() if page.exists() else ""
    assert run.returncode == 0, run.stdout + run.stderr + text
    assert "Parts that failed: none." in text
    assert re.search(r"late; PyTorch \d", text)
    assert "12 passed" in text
    assert "NOT EQUAL" not in text
    assert len(re.findall(r"requested .* equal; workspaces", text)) == 8
    assert len(re.findall(r"^\| gpt \|.*\| equal \|$", text, re.MULTILINE)) == 6
    assert "losses equal" in text
    assert "0 wrong" in text
