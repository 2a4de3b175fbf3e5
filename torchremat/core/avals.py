"""Abstract values: what is known of a tensor without its data."""

from dataclasses import dataclass
from math import prod

import torch

from torchremat._torch import hint_of

__all__ = ["Aval"]


def __dir__() -> list[str]:
    return sorted(__all__)


_SHORT_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


@dataclass(frozen=True, slots=True)
class Aval:
    """The abstract value of a tensor: shape, dtype and device.

    `weak_type` marks a value that came from a Python scalar and so does not take part in type
    promotion (JAX's `ShapedArray.weak_type`).

    >>> import torch
    >>> Aval((3, 4), torch.float32)
    f32[3,4]
    >>> Aval.of(torch.ones(2, dtype=torch.int64)).nbytes
    16
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")
    weak_type: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Aval":
        """The abstract value of `tensor` (a real, fake, meta or wrapped tensor).

        A size that is a symbol counts as what it was when it was traced.
        """
        shape = tuple(size if type(size) is int else hint_of(size) for size in tensor.shape)
        return cls(shape, tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        """Bytes of a dense tensor of this shape and dtype."""
        return prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype, as in `f32`.

    >>> import torch
    >>> dtype_name(torch.bfloat16), dtype_name(torch.float8_e4m3fn)
    ('bf16', 'float8_e4m3fn')
    """
    return _SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))
