"""The time of a search: of the processor, so that other programs change its answers little.

                     alone    beside another program     beside many
on the wall          4 s      8 s                        8 s, twice as long at most
of the processor     4 s      4 s                        2 s
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

# Seconds that count as worked at the least: a search that has just begun is not slowed down.
_LEAST_SECONDS = 0.05


class CpuTimer:
    """Seconds of this thread on the processor; at least a part of those on the wall.

    Args:
        stretch: how many seconds on the wall count as one at the least; 1 for the wall alone.

    >>> CpuTimer(1.0).slowdown
    1.0
    """

    def __init__(self, stretch: float) -> None:
        self.stretch = stretch
        self._wall = time.monotonic()
        self._thread = time.thread_time()

    @property
    def now(self) -> float:
        worked = time.thread_time() - self._thread
        return max(worked, (time.monotonic() - self._wall) / self.stretch)

    @property
    def slowdown(self) -> float:
        """How many seconds on the wall one of these took so far."""
        wall = time.monotonic() - self._wall
        return min(max(wall / max(self.now, _LEAST_SECONDS), 1.0), self.stretch)

    def within(self, seconds: float) -> "Deadline":
        return Deadline(self, self.now + seconds)


@dataclass(frozen=True)
class Deadline:
    """A time on a timer; without one it is never over."""

    timer: CpuTimer | None = None
    at: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.timer is not None and self.timer.now > self.at


NEVER = Deadline()


class TimeSlice:
    """The time of a part of a search; `progress` gets its elapsed fraction now and then."""

    def __init__(
        self, timer: CpuTimer, seconds: float, progress: Callable[[float], None] | None = None
    ) -> None:
        self.timer = timer
        self.seconds = seconds
        self.progress = progress
        self.start = timer.now
        self.reported = 0.0

    @property
    def elapsed_fraction(self) -> float:
        return (self.timer.now - self.start) / max(self.seconds, 1e-9)

    def seconds_until(self, fraction: float) -> float:
        return max(0.0, (fraction - self.elapsed_fraction) * self.seconds)

    def deadline(self, fraction: float) -> Deadline:
        return Deadline(self.timer, self.start + fraction * self.seconds)

    def report(self) -> None:
        """Report how far the search is; the fraction never falls."""
        self.reported = max(self.reported, min(self.elapsed_fraction, 1.0))
        if self.progress is not None:
            self.progress(self.reported)
