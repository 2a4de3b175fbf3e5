"""The time of a search: work that is counted, so that one model has one plan on every machine.

                          idle machine    busy machine    plan
limit on the clock        40 programs     13 programs     another
limit on work             40 programs     40 programs     the same, later

Each part of a search charges for what it does: operators simulated, sets looked at, iterations of a
program. A charge is in seconds of a core of about 3 GHz, roughly.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from torchremat.core.interrupts import let_interrupts_in


class WorkTimer:
    """Seconds of counted work; with `has_wall` at least those on the wall.

    Args:
        has_wall: whether a user gave the time. The clock may then end a search, too.

    >>> timer = WorkTimer()
    >>> timer.charge(0.5)
    >>> timer.now
    0.5
    """

    def __init__(self, *, has_wall: bool = False) -> None:
        self.has_wall = has_wall
        self._work = 0.0
        self._start = time.monotonic()

    def charge(self, seconds: float) -> None:
        self._work += seconds
        let_interrupts_in()

    @property
    def now(self) -> float:
        if self.has_wall:
            return max(self._work, time.monotonic() - self._start)
        return self._work

    def within(self, seconds: float) -> "Deadline":
        return Deadline(self, self.now + seconds)


@dataclass(frozen=True)
class Deadline:
    """A time on a timer; without one it is never over."""

    timer: WorkTimer | None = None
    at: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.timer is not None and self.timer.now > self.at

    def charge(self, seconds: float) -> None:
        if self.timer is not None:
            self.timer.charge(seconds)


NEVER = Deadline()


class TimeSlice:
    """The time of a part of a search; `progress` gets its elapsed fraction now and then."""

    def __init__(
        self, timer: WorkTimer, seconds: float, progress: Callable[[float], None] | None = None
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
