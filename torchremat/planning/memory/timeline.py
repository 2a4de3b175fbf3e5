"""Timelines: the bytes alive at each operator of a step, and what they are."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torchremat.core.formatting import human_bytes
from torchremat.planning.memory.arena import Arena, Moments, place
from torchremat.planning.memory.caching_allocator import count_reserved

__all__ = ["Lifetime", "LiveValue", "Point"]

# Values that the text names, the largest first; the rest is one line.
_SHOWN = 5


def __dir__() -> list[str]:
    return sorted(__all__)


CATEGORIES = ("output", "gradient", "saved", "recomputed", "temporary", "cotangent")
"""Categories of values. `saved`: by the forward pass for the backward pass, and not an output."""


@dataclass(frozen=True, slots=True)
class Point:
    """An operator that runs.

    Attributes:
        name: of its node; `"call/node"` for one inside the checkpoint that `call` runs.
        phase: `"forward"` or `"backward"`.
        live: bytes alive while it runs: what it reads and writes, and what waits meanwhile.
        after: bytes alive when it has run and what it was the last to read is freed.
    """

    name: str
    phase: str
    live: int
    after: int


@dataclass(frozen=True, slots=True)
class LiveValue:
    """A storage: the node that made it, its bytes, and one of `CATEGORIES`."""

    name: str
    nbytes: int
    category: str

    def __str__(self) -> str:
        return f"{human_bytes(self.nbytes)} {self.name} ({self.category})"


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A value, and the positions of the first and of the last point at which it is alive."""

    value: LiveValue
    first: int
    last: int


@dataclass(frozen=True)
class Timeline:
    """The bytes alive at each operator of a step: what `simulate` gives.

    Its length is the number of operators that run, and it iterates over its points.

    Attributes:
        points: the operators, those of the forward pass first.
        lifetimes: the values, in the order in which they are made.
        saved_bytes: bytes that the forward pass saves for the backward pass, outputs excluded.
        offloaded_bytes: bytes that it copies to the host for it.

    >>> points = (Point("sin", "forward", 8, 8), Point("mul", "backward", 20, 12))
    >>> sin, g = LiveValue("sin", 8, "saved"), LiveValue("mul", 12, "gradient")
    >>> timeline = Timeline(points, (Lifetime(sin, 0, 1), Lifetime(g, 1, 1)), saved_bytes=8)
    >>> print(timeline)
    peak 20 B at mul (backward, 2 of 2); 8 B saved by the forward pass
      12 B mul (gradient)
      8 B sin (saved)
    """

    points: tuple[Point, ...]
    lifetimes: tuple[Lifetime, ...]
    saved_bytes: int
    offloaded_bytes: int = 0

    @cached_property
    def live(self) -> tuple[int, ...]:
        """The bytes alive at each point.

        >>> Timeline((Point("sin", "forward", 8, 4),), (), 4).live
        (8,)
        """
        return tuple(point.live for point in self.points)

    @property
    def peak(self) -> int:
        """The most bytes alive at one point.

        >>> Timeline((Point("sin", "forward", 8, 4),), (), 4).peak
        8
        """
        return max(self.live, default=0)

    @cached_property
    def at_peak(self) -> tuple[LiveValue, ...]:
        """The values alive at the first point of the peak, the largest first; they add up to it.

        What an operator such as `torch.cond` needs inside is one value, with the operator's name.

        >>> value = LiveValue("sin", 8, "output")
        >>> Timeline((Point("sin", "forward", 8, 8),), (Lifetime(value, 0, 0),), 0).at_peak
        (LiveValue(name='sin', nbytes=8, category='output'),)
        """
        if not self.points:
            return ()
        where = self.live.index(self.peak)
        found = [t.value for t in self.lifetimes if t.first <= where <= t.last and t.value.nbytes]
        inside = self.peak - sum(value.nbytes for value in found)
        if inside:
            found.append(LiveValue(f"inside {self.points[where].name}", inside, "temporary"))
        return tuple(sorted(found, key=lambda value: -value.nbytes))

    def by_category(self) -> dict[str, tuple[int, ...]]:
        """For each of `CATEGORIES` the bytes alive at each point; together they are `live`.

        >>> value = LiveValue("sin", 8, "output")
        >>> timeline = Timeline((Point("sin", "forward", 8, 8),), (Lifetime(value, 0, 0),), 0)
        >>> timeline.by_category()["output"]
        (8,)
        """
        changes = {category: [0] * (len(self.points) + 1) for category in CATEGORIES}
        for lifetime in self.lifetimes:
            change = changes[lifetime.value.category]
            change[lifetime.first] += lifetime.value.nbytes
            change[lifetime.last + 1] -= lifetime.value.nbytes
        found = {category: list(accumulate(change))[:-1] for category, change in changes.items()}
        inside = self._inside
        found["temporary"] = [a + b for a, b in zip(found["temporary"], inside, strict=True)]
        return {category: tuple(nbytes) for category, nbytes in found.items()}

    def count_reserved_bytes(
        self, resident: Iterable[int] = (), *, expandable_segments: bool = False
    ) -> int:
        """The bytes that PyTorch's caching allocator takes from a device for the step.

        They are more than the peak: small tensors share segments of 2 MiB, larger ones have
        segments of 20 MiB or their own, and freed memory lies in pieces.

        Args:
            resident: the bytes of each tensor that is there before the step.
            expandable_segments: as `PYTORCH_ALLOC_CONF=expandable_segments:True` has it.

        >>> value = LiveValue("sin", 3 << 20, "output")
        >>> timeline = Timeline((Point("sin", "forward", 3 << 20, 0),), (Lifetime(value, 0, 0),), 0)
        >>> timeline.count_reserved_bytes() >> 20
        20
        """
        moments = self._moments()
        return count_reserved(moments, resident, expandable_segments=expandable_segments)

    def place_values(self) -> Arena:
        """Addresses of all values in one buffer that is hardly larger than the peak.

        The first addresses are those of `lifetimes`, in their order. Those of what operators such
        as `torch.cond` need inside follow. It takes seconds for thousands of values.

        >>> a, b = LiveValue("a", 128, "saved"), LiveValue("b", 64, "temporary")
        >>> points = (Point("a", "forward", 128, 128), Point("b", "forward", 192, 128))
        >>> Timeline(points, (Lifetime(a, 0, 1), Lifetime(b, 1, 1)), 128).place_values()
        Arena(nbytes=192, offsets=(0, 128), peak=192)
        """
        return place(self._moments())

    def _moments(self) -> list[Moments]:
        moments = [(t.first, t.last, t.value.nbytes) for t in self.lifetimes]
        return moments + [(i, i, nbytes) for i, nbytes in enumerate(self._inside) if nbytes]

    @cached_property
    def _inside(self) -> list[int]:
        """The bytes at each point that an operator such as `torch.cond` needs inside."""
        changes = [0] * (len(self.points) + 1)
        for lifetime in self.lifetimes:
            changes[lifetime.first] += lifetime.value.nbytes
            changes[lifetime.last + 1] -= lifetime.value.nbytes
        return [a - b for a, b in zip(self.live, accumulate(changes), strict=False)]

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __str__(self) -> str:
        if not self.points:
            return "no operators run"
        where = self.live.index(self.peak)
        point = self.points[where]
        saved = human_bytes(self.saved_bytes)
        lines = [
            f"peak {human_bytes(self.peak)} at {point.name} ({point.phase}, {where + 1} of "
            f"{len(self)}); {saved} saved by the forward pass"
        ]
        lines += [f"  {value}" for value in self.at_peak[:_SHOWN]]
        if rest := self.at_peak[_SHOWN:]:
            lines.append(f"  {human_bytes(sum(v.nbytes for v in rest))} in {len(rest)} more")
        return "\n".join(lines)
