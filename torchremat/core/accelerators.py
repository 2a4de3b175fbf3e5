"""The accelerator of this machine, of whatever kind: one of CUDA or ROCm, or another of PyTorch's.

Nothing here asks for a kind by name that PyTorch's own functions for all accelerators serve.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


def list_kinds() -> tuple[str, ...]:
    """`"cpu"`, `"cuda"` (which a graph may be planned for anywhere), and the kind that is here.

    >>> list_kinds()[:2]
    ('cpu', 'cuda')
    """
    here = torch.accelerator.current_accelerator()
    return ("cpu", "cuda") if here is None or here.type == "cuda" else ("cpu", "cuda", here.type)


def is_here(device: torch.device) -> bool:
    """Whether tensors can be made on `device`, which is not the CPU.

    >>> is_here(torch.device("meta"))
    False
    """
    here = torch.accelerator.current_accelerator()
    return here is not None and here.type == device.type and torch.accelerator.is_available()


def has_streams(device: torch.device) -> bool:
    """Whether `device` has streams, pinned memory and counts of what its allocator lent."""
    # Apple's shares the memory of the host
    return device.type not in ("cpu", "mps") and is_here(device)


def is_captured() -> bool:
    """Whether a CUDA graph is being recorded, of which the state of a generator is no part."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def read_free_bytes(device: torch.device) -> int | None:
    """The bytes that are free on an accelerator; `None` if it does not tell."""
    try:
        return torch.accelerator.get_memory_info(device)[0]
    except RuntimeError:  # Apple's, and others
        return None


def read_allocated_bytes(device: torch.device, which: str) -> int:
    """The bytes that the allocator of an accelerator has lent, unrounded where it counts those.

    `which` is `"current"`, or `"peak"` since it was last reset.
    """
    stats = torch.accelerator.memory_stats(device)
    kinds = ("requested_bytes", "allocated_bytes")
    return next((n for kind in kinds if (n := int(stats.get(f"{kind}.all.{which}", 0)))), 0)


def get_generator_state(device: torch.device) -> Tensor:
    """The state of the default generator of `device`.

    >>> torch.equal(get_generator_state(torch.device("cpu")), torch.get_rng_state())
    True
    """
    if device.type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device)
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    with torch.accelerator.device_index(index):
        state: Tensor = module.get_rng_state()
    return state


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Set the default generator of `device` to a state that `get_generator_state` gave."""
    if device.type == "cpu":
        torch.set_rng_state(state)
        return
    module = torch.get_device_module(device)
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    with torch.accelerator.device_index(index):
        module.set_rng_state(state)


@dataclass(frozen=True)
class DefaultGenerator:
    """The default generator of a device, of which PyTorch has no object for every kind."""

    device: torch.device

    def get_state(self) -> Tensor:
        return get_generator_state(self.device)

    def set_state(self, state: Tensor) -> None:
        set_generator_state(self.device, state)


def get_all_generator_states() -> dict[torch.device, Tensor]:
    """The states of all default generators that may have been used."""
    return {torch.device("cpu"): torch.get_rng_state(), **get_accelerator_states()}


def get_accelerator_states() -> dict[torch.device, Tensor]:
    """The states of the default generators that are not of the CPU."""
    return {device: get_generator_state(device) for device in _list_used_devices()}


def set_all_generator_states(states: Iterable[tuple[torch.device, Tensor]]) -> None:
    """Set default generators back, each to the state that belongs to its device."""
    for device, state in states:
        set_generator_state(device, state)


def _list_used_devices() -> list[torch.device]:
    here = torch.accelerator.current_accelerator()
    if here is None:
        return []
    module = torch.get_device_module(here)
    if not getattr(module, "is_initialized", module.is_available)():
        return []
    return [torch.device(here.type, index) for index in range(torch.accelerator.device_count())]
