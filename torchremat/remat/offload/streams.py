"""Streams over which values are copied to the host and back, beside the operators.

A copy begins when the operators and the copies that were queued before it are done. Before anybody
reads its target or frees its source, the operators that follow must wait for it:

    operators   mm   sin   mul ...  (wait)  mm           the memory of what mm made is free here
    copies         [ what mm made  ]

On a GPU that is a CUDA stream for each device. On the CPU a copy is done at once.
"""

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Copy", "CopyStream", "stream_of"]


class Copy(Protocol):
    """A copy that has begun."""

    def is_done(self) -> bool:
        """Whether it is done already; asks without waiting."""

    def is_of_here(self) -> bool:
        """Whether it waited for the operators of the stream that is current now."""

    def wait(self) -> None:
        """Let the operators that follow, on the stream it waited for, wait for it."""


class CopyStream(Protocol):
    """The copies of one device, one after the other."""

    def copy(self, target: Tensor, source: Tensor) -> Copy | None:
        """Begin to copy `source` to `target`, one of them on the device; `None` if it is done."""

    def synchronize(self) -> None:
        """Wait, on the host, until all copies that have begun are done."""


class _CpuStream:
    def copy(self, target: Tensor, source: Tensor) -> Copy | None:
        target.copy_(source)
        return None

    def synchronize(self) -> None:
        """Nothing has only begun."""


class _GpuStream:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def copy(self, target: Tensor, source: Tensor) -> Copy | None:
        operators = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(operators)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return _GpuCopy(self.stream.record_event(), operators)

    def synchronize(self) -> None:
        self.stream.synchronize()


class _GpuCopy:
    __slots__ = ("event", "operators")

    def __init__(self, event: torch.cuda.Event, operators: torch.cuda.Stream) -> None:
        self.event = event
        self.operators = operators

    def is_done(self) -> bool:
        return bool(self.event.query())

    def is_of_here(self) -> bool:
        return bool(torch.cuda.current_stream(self.operators.device) == self.operators)

    def wait(self) -> None:
        self.operators.wait_event(self.event)


_streams: dict[torch.device, CopyStream] = {}
_cpu_stream = _CpuStream()


def stream_of(device: torch.device) -> CopyStream:
    """The stream of `device`, always the same.

    >>> stream_of(torch.device("cpu")).copy(torch.empty(2), torch.ones(2)) is None
    True
    """
    if device.type != "cuda":
        return _cpu_stream
    stream = _streams.get(device)
    return _streams.setdefault(device, _GpuStream(device)) if stream is None else stream
