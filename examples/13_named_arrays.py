"""Arrays with named dimensions, mapped along a name.

    python examples/13_named_arrays.py

`register_vmappable` registers functions that split a type of your own into elements, and join them.
The axis is given by a type of your own too: a name here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torchremat as tr
from torchremat.batching import register_vmappable


@dataclass(frozen=True)
class NamedArray:
    """A tensor whose dimensions have names."""

    names: tuple[str, ...]
    data: Tensor

    def __matmul__(self, other: "NamedArray") -> "NamedArray":
        assert self.names[-1] == other.names[0], "the names of the summed dimensions differ"
        return NamedArray(self.names[:-1] + other.names[1:], self.data @ other.data)


@dataclass(frozen=True)
class Along:
    """The dimension to map over; in `out_axes`, the first of the result."""

    name: str


def element_of(
    cont: Callable[[Any, Any], Any], _: Callable[[], Any], array: NamedArray, axis: Along
) -> NamedArray:
    """One element of `array` along `axis`, which need not be its first."""
    i = array.names.index(axis.name)
    return NamedArray(array.names[:i] + array.names[i + 1 :], cont(array.data, i))


def array_of(
    cont: Callable[[Any, Any, Any], Any], size: int, element: NamedArray, axis: Along
) -> NamedArray:
    """The array of all elements."""
    return NamedArray((axis.name, *element.names), cont(size, element.data, 0))


def main() -> None:
    """Matrix-vector products along a name, and their gradient."""
    register_vmappable(NamedArray, Along, int, element_of, array_of)
    matrices = NamedArray(("row", "batch", "column"), torch.arange(12.0).reshape(2, 2, 3))
    vectors = NamedArray(("column", "batch"), torch.ones(3, 2))
    product = tr.vmap(lambda a, b: a @ b, (Along("batch"), Along("batch")), Along("batch"))
    result = product(matrices, vectors)
    print(result.names, result.data.tolist())

    def total(data: Tensor) -> Tensor:
        return product(matrices, NamedArray(("column", "batch"), data)).data.sum()

    print("gradient:", tr.grad(total)(vectors.data).tolist())


if __name__ == "__main__":
    main()
