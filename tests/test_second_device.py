"""What depends on a device, on one that is not the CPU and does everything late."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(
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
