"""A process has the second device for good, so these tests run in one of their own.

`tests/test_second_device.py` starts it, and `scripts/test_second_device.sh` does.
"""

import os

import pytest
import torch

from tests.second_device.late_device import make_late_device

collect_ignore_glob = [] if os.environ.get("TORCHREMAT_SECOND_DEVICE") else ["test_*.py"]


@pytest.fixture(params=["copies last", "copies first"])
def late(request):
    """The device, whose copies beside the operators are as late, or as early, as they may be."""
    module = make_late_device()
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    module.show_copies_first(request.param == "copies first")
    torch.manual_seed(0)
    yield module
    module.set_limit(1 << 40)
    module.show_copies_first(False)
