"""Axes: round numbers between two bounds, and where they stand."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TickAxis:
    """A scale from `low` to `high`, drawn from the pixel `start` to the pixel `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1)
        return self.start + share * (self.end - self.start)


def byte_ticks(low: float, high: float, most: int = 6) -> list[int]:
    """Multiples of a power of two between two bounds, at most `most + 1`.

    >>> byte_ticks(0, 5000)
    [0, 1024, 2048, 3072, 4096]
    """
    step = 2 ** max(0, math.ceil(math.log2(max((high - low) / most, 1))))
    return [step * i for i in _multiples(step, low, high)]


def decimal_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two bounds.

    >>> decimal_ticks(0, 0.0123)
    [0.0, 0.005, 0.01]
    """
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * m for m in (1, 2, 5, 10) if power * m * most >= high - low)
    return [step * i for i in _multiples(step, low, high)]


def _multiples(step: float, low: float, high: float) -> range:
    return range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
