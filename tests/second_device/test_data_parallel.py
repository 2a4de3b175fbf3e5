"""DistributedDataParallel on the device: gradients are added up as they are made."""

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import torchremat as tr
from tests.helpers import assert_same
from tests.second_device.training import build_encoder, make_input, train


def _work_done(result):
    future = Future()
    future.set_result(result)
    return _create_work_from_future(future)


class _Alike(dist.ProcessGroup):
    """Two processes that have the same values, of which this is one."""

    def getBackendName(self):  # noqa: N802 (the name that PyTorch calls)
        return "alike"

    def allreduce(self, tensors, options=None):
        for tensor in tensors:
            tensor.mul_(2)
        return _work_done(tensors)

    def broadcast(self, tensors, options=None):
        return _work_done(tensors)

    def allgather(self, outputs, inputs, options=None):
        for gathered, given in zip(outputs, inputs, strict=True):
            for output in gathered:
                output.copy_(given)
        return _work_done(outputs)


@pytest.fixture(scope="module", autouse=True)
def processes():
    dist.Backend.register_backend(
        "alike", lambda store, rank, size, timeout: _Alike(rank, size), devices=["late", "cpu"]
    )
    dist.init_process_group("alike", rank=0, world_size=2, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def _offload(*_args, **_params):
    return tr.Offloadable("device", "pinned_host")


@pytest.mark.parametrize(
    ("policy", "select"),
    [("full", None), ("full", "*"), ("dots", None), ("budget:90%", None), (_offload, "*")],
)
@pytest.mark.filterwarnings("ignore:Time stats are currently only collected")
def test_training_is_plain_pytorchs(late, policy, select):
    x = make_input((4, 16, 32))
    wrapped = tr.nn.wrap(build_encoder(), policy, select=select)
    found, expected = (
        train(DistributedDataParallel(model, bucket_cap_mb=1), x)
        for model in (wrapped, build_encoder())
    )
    assert_same(found, expected)
    assert expected[1][0].abs().sum() > 0
    assert not torch.equal(expected[0][0], expected[0][-1])
