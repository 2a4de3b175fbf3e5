"""The devices that programs run on: those of this process, and those of all processes.

Without `torch.distributed` there is one process, number 0. With an initialised process group (as
`torchrun` helps to start) there are as many as the group has ranks, and each brings its devices:

    2 hosts with 8 GPUs and one process each       devices() 16, local_devices() 8
    1 host with 8 GPUs and 8 processes (torchrun)  devices() 8,  local_devices() 1: cuda:LOCAL_RANK
    1 host with 8 GPUs and 2 processes             devices() 8,  local_devices() 4
    2 processes without an accelerator             devices() 2,  local_devices() 1: cpu
"""

import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from torchremat import config
from torchremat.errors import DeviceError, nearest_names

__all__ = ["Device"]


def __dir__() -> list[str]:
    return sorted(__all__)


_SAME_AS_CUDA = ("gpu", "rocm")  # names that JAX has; PyTorch calls both kinds "cuda"


@dataclass(frozen=True, slots=True)
class Device:
    """A device of one of the processes; it hashes, and can be pickled.

    Attributes:
        process_index: the rank of the process that it belongs to.
        torch_device: what that process calls it. `cuda:0` of two processes are two devices.

    >>> devices("cpu")[0]
    cpu of process 0
    """

    process_index: int
    torch_device: torch.device

    @property
    def kind(self) -> str:
        """`"cuda"` (ROCm's too), `"xpu"`, `"mps"`, ..., or `"cpu"`."""
        return self.torch_device.type

    def __repr__(self) -> str:
        return f"{self.torch_device} of process {self.process_index}"


def devices(backend: str | None = None) -> list[Device]:
    """The devices of all processes, those of process 0 first: the same list in each of them.

    Args:
        backend: the kind of devices: `"cpu"`, or the accelerator's (`"cuda"`, also written
            `"gpu"`; `"xpu"`, ...). By default the accelerator's, where any process has one.

    Raises:
        DeviceError: if no process has such a device.

    With several processes the first call is collective, as every process has to tell the others
    what it has: call it in all of them. Under NCCL, set the current device before.

    After `jax.devices`.

    >>> [device.torch_device for device in devices("cpu")]
    [device(type='cpu')]
    """
    return _of_kind(_everywhere(), backend, "")


def local_devices(process_index: int | None = None, backend: str | None = None) -> list[Device]:
    """The devices of one process, by default this one.

    Of processes on one host that see the same accelerators, each has its share of them, by
    `LOCAL_RANK` and `LOCAL_WORLD_SIZE`, which `torchrun` sets.

    Args:
        process_index: which process. For another than this one the first call is collective, as
            that of `devices`.
        backend: the kind of devices, as for `devices`; by default this process's accelerator's.

    Raises:
        DeviceError: if the process has no such device, or there is no such process.

    After `jax.local_devices`.

    >>> local_devices(backend="cpu")
    [cpu of process 0]
    """
    here, num_processes = _this_process(), process_count()
    if process_index is None or process_index == here:
        return _of_kind(_own_devices(here), backend, f" in process {here}")
    if not 0 <= process_index < num_processes:
        raise DeviceError(
            f"there is no process {process_index!r}: {num_processes} take part, numbered from 0"
            + ("" if _is_distributed() else ", since torch.distributed is not initialised")
        )
    of_process = [d for d in _everywhere() if d.process_index == process_index]
    return _of_kind(of_process, backend, f" in process {process_index}")


def device_count(backend: str | None = None) -> int:
    """How many devices all processes have together: `len(devices(backend))`.

    >>> device_count("cpu")
    1
    """
    return len(devices(backend))


def local_device_count(backend: str | None = None) -> int:
    """How many devices this process has: `len(local_devices(backend=backend))`.

    >>> local_device_count("cpu")
    1
    """
    return len(local_devices(backend=backend))


def process_index() -> int:
    """The number of this process: its rank in the default process group, 0 without one.

    >>> process_index()
    0
    """
    return distributed.get_rank() if _is_distributed() else 0


def process_count() -> int:
    """How many processes there are: the size of the default process group, 1 without one.

    >>> process_count()
    1
    """
    return distributed.get_world_size() if _is_distributed() else 1


_this_process = process_index  # `local_devices` has an argument of that name
host_id = process_index
host_count = process_count


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _of_kind(found: list[Device], backend: str | None, where: str) -> list[Device]:
    kinds = list(dict.fromkeys(device.kind for device in found))
    asked = "cuda" if backend in _SAME_AS_CUDA else backend
    if asked is None:
        asked = next((kind for kind in kinds if kind != "cpu"), "cpu")
    if asked not in kinds:
        raise DeviceError(
            f"there is no device of the backend {backend!r}{where}; {nearest_names(asked, kinds)}"
        )
    return [device for device in found if device.kind == asked]


def _own_devices(process: int) -> list[Device]:
    number = config.num_cpu_devices
    names = [f"cpu:{i}" for i in range(number)] if number > 1 else ["cpu"]
    own = [Device(process, torch.device(name)) for name in names]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        indices = _share(torch.accelerator.device_count())
        own += [Device(process, torch.device(accelerator.type, index)) for index in indices]
    return own


def _share(num_visible: int) -> range:
    """The accelerators, of those that this process sees, that are its own.

    If it sees fewer than there are processes on the host, its environment has chosen for it, as
    with `CUDA_VISIBLE_DEVICES`.
    """
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not _is_distributed() or num_visible < num_processes:
        return range(num_visible)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    return range(rank * num_visible // num_processes, (rank + 1) * num_visible // num_processes)


def _everywhere() -> list[Device]:
    """The devices of all processes and kinds, gathered once for each process group."""
    here = _this_process()
    if process_count() == 1:
        return _own_devices(here)
    group = distributed.group.WORLD
    found = _gathered.get(group)
    if found is None:
        answers: list[Any] = [None] * process_count()
        distributed.all_gather_object(answers, _own_devices(here))
        found = _gathered[group] = [device for answer in answers for device in answer]
    return found


_gathered: weakref.WeakKeyDictionary[Any, list[Device]] = weakref.WeakKeyDictionary()
"""The devices of all processes of a group."""
