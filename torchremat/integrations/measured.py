"""What a step of training makes at most, as a library's loop runs it: from hook to hook."""

import torch

from torchremat.remat.measure import LiveBytes


class StepPeak:
    """The most bytes alive at one time of what is made between `start` and `stop`.

    On a GPU those asked of the allocator beyond what was there at the start; elsewhere those of
    `LiveBytes`, which counts each operator: for a step, not for a training.

    >>> peak = StepPeak(torch.device("cpu"))
    >>> peak.start()
    >>> x = torch.ones(256) + 1
    >>> peak.stop()
    2048
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: LiveBytes | None = None
        self._before: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has been started and not stopped."""
        return self._memory is not None or self._before is not None

    def start(self) -> None:
        """Begin to count."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = _requested(self._device, "current")
        else:
            self._memory = LiveBytes()
            self._memory.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> int:
        """End, and the peak."""
        if self._memory is not None:
            memory, self._memory = self._memory, None
            memory.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            return memory.peak
        assert self._before is not None, "it was not started"
        before, self._before = self._before, None
        return _requested(self._device, "peak") - before


def _requested(device: torch.device, which: str) -> int:
    return int(torch.cuda.memory_stats(device).get(f"requested_bytes.all.{which}", 0))
