import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.avals import dtype_name

_numbers = itertools.count(1)


@dataclass(frozen=True)
class SizeVar:
    """A name for the element of a pile in its `PileTy`; all are equal."""

    number: int = field(default_factory=lambda: next(_numbers), compare=False)

    def __repr__(self) -> str:
        return f"Var{self.number}"


@dataclass(frozen=True, eq=False)
class IndexedSize:
    """`longest` is a bound of the lengths that is known on the host, a power of two: so it seldom
    changes from batch to batch, and a trace that depends on it serves many.
    """

    binder: SizeVar
    lengths: Any
    longest: int

    def __repr__(self) -> str:
        lengths = self.lengths
        if not isinstance(lengths, Tensor):
            return f"{lengths}.{self.binder}"
        inner = _torch.innermost_tensor(lengths)
        if _torch.is_fake(inner):
            return f"[?].{self.binder}"
        return f"[{' '.join(map(str, inner.tolist()))}].{self.binder}"


@dataclass(frozen=True, eq=False)
class EltTy:
    """The type of an element of a pile: `f32[[3 1 4].Var1,2]`."""

    shape: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def ragged_dims(self) -> tuple[int, ...]:
        return tuple(d for d, size in enumerate(self.shape) if isinstance(size, IndexedSize))

    def __repr__(self) -> str:
        return f"{dtype_name(self.dtype)}[{','.join(map(repr, self.shape))}]"


@dataclass(frozen=True, eq=False)
class PileTy:
    """The type of a pile: `Var1:3 => f32[[3 1 4].Var1,2]`."""

    binder: SizeVar
    length: int
    elt_ty: EltTy

    def __repr__(self) -> str:
        return f"{self.binder}:{self.length} => {self.elt_ty}"
