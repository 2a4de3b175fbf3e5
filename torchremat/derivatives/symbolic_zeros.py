"""Zeros that are known to be zero, and inputs that know whether they are differentiated."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchremat.core.avals import Aval


@dataclass(frozen=True)
class SymbolicZero:
    """A tangent or cotangent that is zero because nothing is differentiated there.

    Rules with `symbolic_zeros=True` are given it, and may give it back.

    After `jax.custom_derivatives.SymbolicZero`.

    >>> import torch
    >>> zero = SymbolicZero(Aval((2,), torch.float32))
    >>> zero, zero.shape, zero.instantiate()
    (SymbolicZero(f32[2]), (2,), tensor([0., 0.]))
    """

    aval: Aval
    """Shape, dtype and device."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the zeros."""
        return self.aval.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the zeros."""
        return self.aval.dtype

    def instantiate(self) -> Tensor:
        """A tensor of zeros."""
        return torch.zeros(self.aval.shape, dtype=self.aval.dtype, device=self.aval.device)

    def __repr__(self) -> str:
        return f"SymbolicZero({self.aval})"


@dataclass(frozen=True)
class CustomVJPPrimal:
    """An argument of a forward rule with `symbolic_zeros=True`.

    After `jax.custom_derivatives.CustomVJPPrimal`.

    >>> CustomVJPPrimal(1.0, perturbed=False)
    CustomVJPPrimal(value=1.0, perturbed=False)
    """

    value: Any
    """The argument: a tensor, or a Python value."""
    perturbed: bool
    """Whether the function is differentiated with respect to it."""


def zero_of(value: Any, *, symbolic: bool) -> Any:
    """Zero for an `Aval` or a Python number; `None` if it can have no tangent."""
    if isinstance(value, float | complex):
        return type(value)(0)
    if not isinstance(value, Aval):
        return None
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return None
    zero = SymbolicZero(value)
    return zero if symbolic else zero.instantiate()
