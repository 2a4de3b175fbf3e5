"""The device that scripts measure on: the accelerator that is here, of any kind, or the CPU."""

import gc
from collections.abc import Callable

import torch

from torchremat.core.accelerators import read_allocated_bytes
from torchremat.measure import LiveBytes


def find_device() -> torch.device:
    """The accelerator of this machine, else the CPU."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if here is None else torch.device(here.type, 0)


def synchronize(device: torch.device) -> None:
    """Wait for all that was launched on `device`."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_peak(run: Callable[[], object], device: torch.device) -> int:
    """The bytes that `run` has at its peak above those that are there before.

    On an accelerator they are what its allocator was asked for, workspaces of kernels included.
    """
    gc.collect()  # else garbage of what ran before may go meanwhile
    if device.type == "cpu":
        with LiveBytes() as memory:
            run()
        return memory.peak
    synchronize(device)
    before = read_allocated_bytes(device, "current")
    torch.accelerator.reset_peak_memory_stats(device)
    run()
    synchronize(device)
    return read_allocated_bytes(device, "peak") - before


def describe_device(device: torch.device) -> str:
    """Its name, of a GPU that of the card."""
    if device.type == "cpu":
        return "no GPU"
    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", None)
    return device.type if name is None else str(name(device))
