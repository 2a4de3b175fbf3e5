"""DDP, FSDP2, tensor parallel and pipelines around checkpoints: `training_programs.py`."""

import pytest

from tests.helpers import skip_in_2_11
from tests.parallel.processes import needs_gloo
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


@needs_gloo
@pytest.mark.parametrize(("size", "names", "name"), CASES)
def test_training(run_once, size, names, name):
    if name == "a_pipeline_whose_backward_is_split":
        skip_in_2_11("its split backward loses the nodes of each torch.autograd.Function")
    for found in run_once("tests.parallel.training_programs", size, names, timeout=2000):
        assert found[name] == "ok", found[name]
