"""A backward pass in two parts, as pipeline schedules run it: some gradients first, others later.

`torch.autograd.grad(loss, inputs, retain_graph=True)` and then the gradients of the weights for the
same cotangents: the second part goes on from what the first has computed, and nothing is computed
again twice. What it needs of that is kept with the call until then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchremat.remat.op import run_graph
from torchremat.remat.region import Mask
from torchremat.remat.two_parts import TwoParts


@dataclass(eq=False)
class SecondPart:
    """What is left to run of a backward pass whose first part has run for `cotangents`."""

    parts: TwoParts
    given: Mask
    first: Mask
    cotangents: Sequence[Tensor]
    handed: list[Any]

    def __post_init__(self) -> None:
        self._versions = [ct._version for ct in self.cotangents]

    def is_of(self, given: Mask, needed: Mask, cotangents: Sequence[Tensor]) -> bool:
        """Whether the gradients that are `needed` now are its own, for the same cotangents."""
        return (
            self.given == given
            and not any(a and b for a, b in zip(needed, self.first, strict=True))
            and all(a is b for a, b in zip(cotangents, self.cotangents, strict=True))
            and self._versions == [ct._version for ct in cotangents]
        )

    def run(self, saved: list[Any], call: int) -> tuple[Any, ...]:
        """The gradients of the second part."""
        return run_graph(self.parts.second, [*self.handed, *saved], call)


def run_first(
    parts: TwoParts,
    saved: list[Any],
    call: int,
    given: Mask,
    first: Mask,
    cotangents: Sequence[Tensor],
) -> tuple[tuple[Any, ...], SecondPart]:
    """The gradients of the first part, and what is left to run."""
    results = run_graph(parts.first, list(saved), call)
    cut = len(results) - parts.num_handed
    return results[:cut], SecondPart(parts, given, first, cotangents, list(results[cut:]))
