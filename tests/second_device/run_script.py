"""Run a script with the second device: `python -m tests.second_device.run_script SCRIPT ...`."""

import os
import runpy
import sys
from pathlib import Path

from tests.second_device.late_device import make_late_device

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as if it had been run itself
    make_late_device()
    status: object = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    sys.stdout.flush()
    # threads of autograd that let go of a Python object while Python ends would abort the process
    os._exit(int(bool(status)))
