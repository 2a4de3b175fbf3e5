"""Processes that run checks together: one program, run by each of them.

    python -m tests.parallel.processes MODULE SIZE FOLDER CHECKS [CHECKS ...]

`CHECKS` names functions of `MODULE`, joined with commas, which `SIZE` processes run one after
another; each further one is for as many others, at the same time. How each ended is in a file in
`FOLDER`. A check may have the attributes `patience`, how many seconds processes wait for one
another, and `takes_file`: it is given the file, to write how it ends before it does.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed

ROOT = Path(__file__).parents[2]
PATIENCE = 60

needs_gloo = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this PyTorch has no gloo",
)


def run_processes(module, size, folder, *parts, timeout=1000):
    """How each check of each part ended in each process: `ok`, or a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.parallel.processes", module, str(size), str(folder)]
        + [",".join(names) for names in parts],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        start_new_session=True,
    )
    said = ""
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        said = f"nothing in {timeout} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    found = []
    for rank in range(size):
        found.append({name: f"never ended: {said}" for names in parts for name in names})
        for file in folder.glob(f"*-{size}-{rank}.ended"):
            lines = map(json.loads, file.read_text().splitlines())
            found[-1] |= {name: ended for name, ended, _ in lines}
    return found


def run_as(module, rank, size, names, folder):
    """Be one of `size` processes: run checks, and write how each ended into a file."""
    checks = {name: getattr(module, name) for name in names}
    patience = min(getattr(check, "patience", PATIENCE) for check in checks.values())
    meeting = os.path.join(folder, f"{names[0]}-{size}")
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(meeting, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=patience),
    )
    distributed.barrier()  # a process that has no more to do may end before others are connected
    with open(f"{meeting}-{rank}.ended", "w") as file:
        for name, check in checks.items():
            start = time.monotonic()
            try:
                check(*[file][: getattr(check, "takes_file", False)])
                ended = "ok"
            except BaseException:
                ended = traceback.format_exc()
            seconds = round(time.monotonic() - start, 1)
            print(json.dumps([name, ended, seconds]), file=file, flush=True)
            if ended != "ok":
                return


def main() -> None:
    """Fork the processes of each part from one that has imported all, and wait for them."""
    name, size, folder, *parts = sys.argv[1:]
    module = importlib.import_module(name)
    children = []
    for part in parts:
        for rank in range(int(size)):
            child = os.fork()
            if child == 0:
                run_as(module, rank, int(size), part.split(","), folder)
                os._exit(0)
            children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
