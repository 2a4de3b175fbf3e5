"""Schedules of the sizes that one graph was called with, for the sizes between them.

No size falls where a symbol grows, so neither do bytes nor peaks. A schedule that keeps within a
budget does so for all smaller sizes too:

    2 x 100 tokens    a plan was chosen
    4 x 120           the same plan, without looking: it was chosen below and above
    4 x 180           the same plan was chosen
"""

import itertools
from typing import Any

from torch import Tensor, fx

from torchremat import _torch
from torchremat.graph.symbolic_sizes import SYMBOLIC, Sizes
from torchremat.planning.problem.problem import Schedule


class KnownSizes:
    """Remembers the schedules that were chosen for sizes of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._is_known_to_grow = _sizes_grow(graph)
        self._plain: list[Sizes] = []
        self._planned: list[tuple[Sizes, Schedule]] = []

    def note(self, sizes: Sizes, schedule: Schedule, *, is_plain: bool) -> None:
        """Note what was chosen; `is_plain` says that it recomputes nothing."""
        if not self._is_known_to_grow:
            return
        if is_plain:
            self._plain.append(sizes)
        self._planned.append((sizes, schedule))

    def find(self, sizes: Sizes) -> Schedule | None:
        """The schedule that would be chosen for `sizes`, if that is known."""
        above = [s for known, s in self._planned if _are_at_most(sizes, known)]
        if any(_are_at_most(sizes, known) for known in self._plain):
            return next(s for known, s in self._planned if known in self._plain)
        below = (s for known, s in self._planned if _are_at_most(known, sizes))
        return next((s for s in below if any(s is other for other in above)), None)


def _are_at_most(sizes: Sizes, others: Sizes) -> bool:
    return all(size <= others[name] for name, size in sizes.items())


def _sizes_grow(graph: fx.Graph) -> bool:
    """Whether no size of a value in the graph falls where a symbol grows."""
    found: dict[str, bool] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        values = value if isinstance(value, tuple | list) else [value]
        tensors = [v for v in values if isinstance(v, Tensor)]
        for size in itertools.chain.from_iterable(map(_sizes_of, tensors)):
            if isinstance(size, SYMBOLIC) and str(size) not in found:
                found[str(size)] = _torch.grows_with_symbols(size)
    return all(found.values())


def _sizes_of(value: Tensor) -> tuple[Any, ...]:
    return (*value.shape, *value.stride(), value.storage_offset())
