"""Checks that what a tape recomputes is what autograd was to save.

A write that PyTorch does not see is not on a tape: one through `tensor.numpy()`, or of a kernel
that is called by address. The gradients would be wrong, and nothing else would tell.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Kernels on a GPU may add in another order each time. Chosen by hand: it lets rounding through, and
# NumPy, which cannot write there, needs no finer one.
_TOLERANCE_OF_DEVICES = 1e-3


@dataclass(frozen=True, slots=True)
class Checksum:
    """The sum of the elements, and that of their magnitudes."""

    sums: tuple[Tensor | float, ...]
    """Tensors where a number would be waited for."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Checksum":
        sums = _sums_of(tensor.detach())
        return cls(tuple(map(float, sums)) if tensor.device.type == "cpu" else sums)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether `tensor` has it: exactly on a CPU, where kernels repeat themselves."""
        before, again = ([float(n) for n in sums] for sums in (self.sums, _sums_of(tensor)))
        if any(map(math.isnan, before)):
            return any(map(math.isnan, again))
        if tensor.device.type == "cpu" or math.isinf(before[-1]):
            return before == again
        eps = torch.finfo(tensor.dtype).eps if tensor.dtype.is_floating_point else 0.0
        allowed = max(_TOLERANCE_OF_DEVICES, 4 * eps) * abs(before[-1])
        return all(abs(a - b) <= allowed for a, b in zip(before, again, strict=True))


def _sums_of(tensor: Tensor) -> tuple[Tensor, ...]:
    found = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not found.is_floating_point():
        return (found.sum(dtype=torch.int64),)
    if found.itemsize == 1:  # no kernel adds up numbers of 8 bits
        found = found.float()
    exact = torch.float32 if found.device.type == "mps" else torch.float64
    return found.sum(dtype=exact), torch.linalg.vector_norm(found, 1, dtype=exact)


@dataclass(frozen=True, slots=True)
class WholeValue:
    """All of it, for `config.verify_recomputation`; the tape then frees nothing."""

    tensor: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> "WholeValue":
        return cls(tensor.detach().clone())

    def is_of(self, tensor: Tensor) -> bool:
        return same_bits(self.tensor, tensor.detach())


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bits_of(a), _bits_of(b))


def _bits_of(tensor: Tensor) -> Tensor:
    """The bytes of `tensor`, in which NaNs can be compared."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
