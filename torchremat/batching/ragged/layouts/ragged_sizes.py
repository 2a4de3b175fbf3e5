"""Sizes that differ from element to element of a batch, and numbers computed from them.

In the graph of one element such a size is a symbol, `s0`; others are computed from it, as `s0 - 1`
and `4*s0`. For a batch each is a `RaggedSize`: the lengths of all elements.

    lengths  2 0 3        offsets  0 2 2 5        total  5        longest  3
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.errors import RaggedError
from torchremat.graph.symbolic_sizes import SYMBOLIC, Size, format_size, value_of
from torchremat.kernels.segments.segments import offsets_of, segment_expand


class _ReadMode(threading.local):
    gives_symbols = False
    """Whether reading the value of a tensor, while a graph is traced, makes a symbol."""


read_mode = _ReadMode()


@dataclass(eq=False)
class RaggedSize:
    """A size that differs from element to element: one extent of a batch."""

    text: str
    """The size as an expression: equal texts are equal extents in one run."""
    lengths: Tensor
    """`[axis_size]`, of int64, on the device of the data."""
    known_total: Any = None
    """The sum of the lengths, where it is known without reading them."""
    known_longest: Any = None
    """No length is greater; known without reading them."""
    symbolic: Any = None
    """The size in the graph of one element, if it is computed from others."""

    @cached_property
    def offsets(self) -> Tensor:
        return offsets_of(self.lengths)

    @cached_property
    def total(self) -> Any:
        if self.known_total is not None:
            return self.known_total
        return self._read(lambda lengths: lengths.sum())

    @property
    def has_total(self) -> bool:
        """Whether `total` can be known: while a trace is around, that of some sizes cannot."""
        if self.known_total is not None or read_mode.gives_symbols:
            return True
        return not _torch.is_fake(_torch.innermost_tensor(self.lengths))

    @cached_property
    def longest(self) -> Any:
        """The greatest length, or a bound of it."""
        if _is_on_host(self.lengths):
            return self._read(lambda lengths: lengths.max())
        if self.known_longest is not None:
            return self.known_longest
        return self._read(lambda lengths: lengths.max())

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    @property
    def known_on_host(self) -> bool:
        return _is_on_host(self.lengths)

    @cached_property
    def host(self) -> list[int]:
        if _torch.is_fake(_torch.innermost_tensor(self.lengths)):
            raise RaggedError(
                "the lengths of the elements of a batch must be known here as numbers. They are "
                f"not while a function is traced (the size {self.text} of its graph)"
            )
        return list(_torch.innermost_tensor(self.lengths).tolist())

    def _read(self, of: Callable[[Tensor], Tensor]) -> Any:
        lengths = _torch.innermost_tensor(self.lengths)
        if _torch.is_fake(lengths) and read_mode.gives_symbols:
            return of(self.lengths).item()
        if _torch.is_fake(lengths):
            raise RaggedError(
                f"the size {self.text} differs from element to element, and how much memory it "
                "takes in all cannot be known while a function is traced: the size comes from the "
                "values of a tensor. Make the ragged tensor outside, and pass it as a Pile."
            )
        return int(of(lengths)) if lengths.numel() else 0

    @cached_property
    def element_of_row(self) -> Tensor:
        elements = torch.arange(self.lengths.shape[0], device=self.lengths.device)
        return segment_expand(elements, self.offsets, self.total)

    @cached_property
    def position_of_row(self) -> Tensor:
        starts = segment_expand(self.offsets[:-1], self.offsets, self.total)
        return torch.arange(self.total, device=starts.device) - starts

    @cached_property
    def is_valid(self) -> Tensor:
        """`[axis_size, longest]`: where a padded tensor has values."""
        places = torch.arange(self.longest, device=self.lengths.device)
        return places < self.lengths[:, None]

    @cached_property
    def padding(self) -> tuple[Tensor, Tensor]:
        """The indices for `take_rows` from concatenated rows to padded ones, and back."""
        places = torch.arange(self.longest, device=self.lengths.device)
        rows = torch.where(self.is_valid, self.offsets[:-1, None] + places, -1)
        return rows.flatten(), self.element_of_row * self.longest + self.position_of_row


def _is_on_host(lengths: Tensor) -> bool:
    """Whether reading `lengths` costs nothing: a device would have to be waited for."""
    lengths = _torch.innermost_tensor(lengths)
    return lengths.device.type == "cpu" and not _torch.is_fake(lengths)


def _maximum(*values: Any) -> Any:
    result = values[0]
    for value in values[1:]:
        result = torch.maximum(*map(torch.as_tensor, (result, value)))
    return result


def _minimum(*values: Any) -> Any:
    return -_maximum(*(-value for value in values))


NAMES_OF_TENSORS = {
    "max": _maximum,
    "min": _minimum,
    "math": torch,
    "torch": SimpleNamespace(_sym_sqrt=torch.sqrt, sym_float=lambda x: x.to(torch.float64)),
    "float": lambda x: x.to(torch.float64),
}


@dataclass(eq=False)
class Sizes:
    """`symbols` has for each symbol an extent, or a number where all elements have the same."""

    axis_size: int
    symbols: dict[str, Any]
    extents: dict[str, RaggedSize] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.extents |= {e.text: e for e in self.symbols.values() if isinstance(e, RaggedSize)}

    def of(self, size: Any) -> Any:
        if isinstance(size, Size):
            size = size.symbolic
        if not isinstance(size, SYMBOLIC):
            return size
        text = format_size(size)
        if text in self.extents:
            return self.extents[text]
        names = _torch.names_in_size(size)
        values = {name: self.symbols[name] for name in names}
        varying = {n: e for n, e in values.items() if isinstance(e, RaggedSize)}
        if not varying:
            return value_of(size, values)
        extent = self._compute_size(text, size, values, varying)
        self.extents[text] = extent
        return extent

    def varies(self, size: Any) -> bool:
        if isinstance(size, Size):
            size = size.symbolic
        if not isinstance(size, SYMBOLIC):
            return False
        return any(isinstance(self.symbols[n], RaggedSize) for n in _torch.names_in_size(size))

    def per_element(self, number: Any) -> Tensor:
        """`[axis_size]`: a number for each element."""
        if self.varies(number):
            return self.compute_numbers(number)
        return torch.full((self.axis_size,), int(self.of(number)), device=self.device)

    def per_symbol(self, name: str) -> Tensor:
        value = self.symbols[name]
        return value.lengths if isinstance(value, RaggedSize) else torch.tensor(value)

    @property
    def device(self) -> torch.device:
        extents = [e for e in self.symbols.values() if isinstance(e, RaggedSize)]
        return extents[0].lengths.device if extents else torch.device("cpu")

    def shape(self, tensor: Any) -> tuple[Any, ...]:
        return tuple(self.of(size) for size in tensor.shape)

    def compute_numbers(self, size: Any) -> Tensor:
        if isinstance(size, Size):
            size = size.symbolic
        names = _torch.names_in_size(size)
        values = {name: self.symbols[name] for name in names}
        scope = {n: e.lengths if isinstance(e, RaggedSize) else e for n, e in values.items()}
        if isinstance(size, torch.SymFloat):  # as numbers of Python: integers would give float32
            scope = {n: v.double() if isinstance(v, Tensor) else v for n, v in scope.items()}
        return eval(format_size(size), dict(NAMES_OF_TENSORS), scope)  # type: ignore[no-any-return]

    def _compute_size(
        self, text: str, size: Any, values: Mapping[str, Any], varying: Mapping[str, RaggedSize]
    ) -> RaggedSize:
        extent = RaggedSize(text, self.compute_numbers(size).clamp(min=0), symbolic=size)
        if len(varying) == len(values) and all(
            e.known_longest is not None for e in varying.values()
        ):
            longest = {n: e.known_longest for n, e in varying.items()}
            greatest = _torch.greatest_value(size, longest)
            extent.known_longest = None if greatest is None else max(0, greatest)
        form = _torch.linear_form(size)
        if form is None or len(varying) < len(values):
            return extent
        constant, slopes = form
        is_a_length = constant >= 0 and min(slopes.values()) >= 0  # others are 0 where below it
        if is_a_length and all(e.known_total is not None for e in varying.values()):
            extent.known_total = constant * self.axis_size + sum(
                slopes[n] * e.known_total for n, e in varying.items()
            )
        return extent
