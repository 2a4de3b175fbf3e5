"""Moments of the backward pass."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Moment:
    """A moment of the backward pass.

    Attributes:
        step: that of an operator of the backward pass.
        operator: one that is computed again for this step and runs just now; if it is larger than
            all operators, the moment is that of the step's own.
    """

    step: int
    operator: int = 1 << 60

    @property
    def is_burst(self) -> bool:
        """Whether it is one of what is computed again."""
        return self.operator != 1 << 60
