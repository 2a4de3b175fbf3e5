"""DDP and FSDP2 of PyTorch, with two processes: `distributed_programs.py`."""

import pytest

from tests.clients.distributed_programs import NAMES
from tests.clients.harness import MARKS
from tests.parallel.processes import needs_gloo, run_processes

pytestmark = [*MARKS, needs_gloo]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes(name, tmp_path):
    for found in run_processes("tests.clients.distributed_programs", 2, tmp_path, (name,)):
        assert found[name] == "ok", found[name]
