"""A backward pass that its caller runs in two parts: what the second needs of the first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchremat import _torch
from torchremat.remat.op.remat_op import run_graph
from torchremat.remat.program.region import Mask
from torchremat.remat.program.split_backward import SplitBackward


@dataclass(eq=False)
class SecondPart:
    """The second part of a backward pass whose first part has run for `cotangents`."""

    parts: SplitBackward
    given: Mask
    first: Mask
    cotangents: Sequence[Tensor]
    carried: list[Any]

    def __post_init__(self) -> None:
        self._versions = [_torch.version_of(ct) for ct in self.cotangents]

    def is_of(self, given: Mask, needed: Mask, cotangents: Sequence[Tensor]) -> bool:
        return (
            self.given == given
            and not any(a and b for a, b in zip(needed, self.first, strict=True))
            and all(a is b for a, b in zip(cotangents, self.cotangents, strict=True))
            and self._versions == [_torch.version_of(ct) for ct in cotangents]
        )

    def run(self, saved: list[Any], call: int) -> tuple[Any, ...]:
        return run_graph(self.parts.second, [*self.carried, *saved], call)
