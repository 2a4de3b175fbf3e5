"""Devices of one process, and of two that talk through gloo."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from torchremat import (
    device_count,
    devices,
    host_count,
    host_id,
    local_device_count,
    local_devices,
    process_count,
    process_index,
)
from torchremat.errors import DeviceError
from torchremat.parallel import devices as module
from torchremat.parallel.devices import Device

ROOT = Path(__file__).parents[2]
CPU = Device(0, torch.device("cpu"))

needs_gloo = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this PyTorch has no gloo",
)


@pytest.fixture
def accelerators(monkeypatch):
    """Pretend that this process sees some GPUs."""

    def pretend(number):
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)

    return pretend


def test_without_a_process_group_there_is_one_process():
    assert (process_index(), process_count()) == (host_id(), host_count()) == (0, 1)
    assert devices() == local_devices() == local_devices(0)
    assert device_count() == local_device_count() == len(devices())
    assert devices("cpu") == [CPU]


def test_the_default_is_the_accelerator_if_there_is_one():
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    number = torch.accelerator.device_count() if accelerator else 1
    kind = accelerator.type if accelerator else "cpu"
    assert [device.kind for device in devices()] == [kind] * number


def test_each_accelerator_is_a_device(accelerators):
    accelerators(3)
    assert [str(device.torch_device) for device in devices()] == ["cuda:0", "cuda:1", "cuda:2"]
    assert devices("gpu") == devices("cuda") == devices()
    assert devices("cpu") == [CPU]


def test_a_device_is_a_value():
    assert repr(CPU) == "cpu of process 0"
    assert pickle.loads(pickle.dumps(CPU)) == CPU
    assert len({CPU, Device(0, torch.device("cpu")), Device(1, torch.device("cpu"))}) == 2


@pytest.mark.parametrize(
    ("visible", "processes", "shares"),
    [
        (8, 8, [[i] for i in range(8)]),
        (5, 2, [[0, 1], [2, 3, 4]]),
        (1, 4, [[0]] * 4),
        (3, 1, [[0, 1, 2]]),
    ],
)
def test_processes_of_a_host_share_its_accelerators(
    accelerators, monkeypatch, visible, processes, shares
):
    accelerators(visible)
    monkeypatch.setattr(module, "_is_distributed", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(distributed, "get_world_size", lambda: processes)
    for rank, share in enumerate(shares):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setattr(distributed, "get_rank", lambda rank=rank: rank)
        expected = [Device(rank, torch.device("cuda", index)) for index in share]
        assert local_devices() == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: devices("tpu"), "no device of the backend 'tpu'; nearest: 'cpu'"),
        (lambda: local_devices(backend="cpi"), "'cpi' in process 0; nearest: 'cpu'"),
        (lambda: devices("hpu"), "the backend 'hpu'.*cpu"),
        (lambda: local_devices(1), "no process 1: 1 take part.*not initialised"),
        (lambda: local_devices(-1), "no process -1"),
    ],
)
def test_errors(call, message):
    with pytest.raises(DeviceError, match=message):
        call()


PROGRAM = """
import sys
from datetime import timedelta
import torch.distributed as dist
import torchremat.parallel.devices as tr

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
assert (tr.process_index(), tr.process_count()) == (rank, 2)
print(tr.local_devices(backend="cpu"), tr.devices("cpu"), tr.device_count("cpu"))
print(tr.local_devices(1 - rank, "cpu"))
assert tr.devices() == tr.devices()
for call in (lambda: tr.local_devices(2), lambda: tr.devices("tpu")):
    try:
        call()
    except tr.DeviceError as error:
        print(error)
dist.destroy_process_group()
assert (tr.process_index(), len(tr.devices("cpu"))) == (0, 1)
"""


@needs_gloo
def test_two_processes(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (out, errors) in enumerate(outputs):
        assert processes[rank].returncode == 0, errors
        both = "[cpu of process 0, cpu of process 1]"
        assert out.splitlines()[:2] == [
            f"[cpu of process {rank}] {both} 2",
            f"[cpu of process {1 - rank}]",
        ]
        assert "there is no process 2: 2 take part, numbered from 0\n" in out
        assert "no device of the backend 'tpu'; nearest: 'cpu'" in out
