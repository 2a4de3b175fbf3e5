"""Streams over which values are copied to the host and back, beside the operators.

A copy begins when the operators and the copies that were queued before it are done. Before anybody
reads its target or frees its source, the operators that follow must wait for it:

    operators   mm   sin   mul ...  (wait)  mm           the memory of what mm made is free here
    copies         [ what mm made  ]

On an accelerator each device has a stream for them. On the CPU a copy is done at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchremat.core.accelerators import has_streams


@dataclass(slots=True, eq=False)
class Copy:
    """A copy on an accelerator that has begun."""

    event: torch.Event
    operators: torch.Stream

    def is_done(self) -> bool:
        """Whether it is done already; asks without waiting."""
        return bool(self.event.query())

    def is_of_here(self) -> bool:
        """Whether it waited for the operators of the stream that is current now."""
        return bool(torch.accelerator.current_stream(self.operators.device) == self.operators)

    def wait(self) -> None:
        """Let the operators that follow, on the stream it waited for, wait for it."""
        self.operators.wait_event(self.event)


class _CpuStream:
    def copy(self, target: Tensor, source: Tensor) -> Copy | None:
        target.copy_(source)
        return None

    def synchronize(self) -> None:
        """Do nothing: each copy is done at once."""


class _DeviceStream:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device)

    def copy(self, target: Tensor, source: Tensor) -> Copy:
        """Begin to copy `source` to `target`, one of them on the device."""
        operators = torch.accelerator.current_stream(self.device)
        self.stream.wait_stream(operators)
        with self.stream:
            target.copy_(source, non_blocking=True)
            return Copy(self.stream.record_event(), operators)

    def synchronize(self) -> None:
        """Wait, on the host, until all copies that have begun are done."""
        self.stream.synchronize()


_streams: dict[torch.device, _DeviceStream] = {}
_cpu_stream = _CpuStream()


def stream_of(device: torch.device) -> _CpuStream | _DeviceStream:
    """The stream of `device`, always the same.

    >>> stream_of(torch.device("cpu")).copy(torch.empty(2), torch.ones(2)) is None
    True
    """
    stream = _streams.get(device)
    if stream is not None:
        return stream
    if not has_streams(device):
        return _cpu_stream
    return _streams.setdefault(device, _DeviceStream(device))
