"""DDP, FSDP2, tensor parallel and pipelines around checkpoints: `training_programs.py`."""

import functools

import pytest

from tests.parallel.processes import needs_gloo, run_processes
from tests.parallel.training_programs import CHECKS, SLOW_CHECKS

CASES = [
    pytest.param(size, names, name, marks=slow, id=f"{name}-{size}")
    for size, names, slow in (
        (2, tuple(CHECKS), ()),
        (1, tuple(n for n in CHECKS if "pipeline" not in n), pytest.mark.slow),
        (2, tuple(SLOW_CHECKS), pytest.mark.slow),
        (4, (*CHECKS, *SLOW_CHECKS), pytest.mark.slow),
    )
    for name in names
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How the checks ended, which run when the first of them is asked for."""

    @functools.cache
    def run(size, names):
        folder = tmp_path_factory.mktemp("training")
        return run_processes("tests.parallel.training_programs", size, folder, names, timeout=400)

    return run


@needs_gloo
@pytest.mark.parametrize(("size", "names", "name"), CASES)
def test_training(ended, size, names, name):
    for found in ended(size, names):
        assert found[name] == "ok", found[name]
