"""Calls of operators as values that hash: all that their costs depend on, sizes as numbers.

    y = mm(x, w)    Call(aten.mm.default, (Place(0), Place(1)), (), (f32[64,256], f32[256,512]),
                         f32[64,512])

Calls of the same operator in layers that are alike are equal, and so are counted or timed once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from torchremat import _torch
from torchremat.graph.symbolic_sizes import SYMBOLIC, Size


class Layout(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def span(self) -> int:
        """The number of elements from the first to the last in memory."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        """The bytes in memory that it has: an expanded tensor has those of what it expands.

        >>> Layout((4, 8), (0, 1), torch.float32).nbytes
        32
        """
        strided = prod(n for n, s in zip(self.shape, self.stride, strict=True) if s)
        return min(strided * (0 not in self.shape), self.span) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Place:
    """Stands in the arguments of a `OpSignature` for a tensor: one of `inputs`."""

    index: int


@dataclass(frozen=True, slots=True)
class Opaque:
    """Stands in the arguments of a `OpSignature` for what is not a number, dtype or the like."""

    kind: str


class OpSignature(NamedTuple):
    """A call of an operator as a value that hashes: all that its cost depends on.

    `inputs` are those of `node.all_input_nodes`, each once, `None` for one that is not a tensor.
    """

    target: Any
    args: Any
    kwargs: Any
    inputs: tuple[Any, ...]
    output: Any

    @classmethod
    def of(cls, node: fx.Node) -> "OpSignature":
        inputs = node.all_input_nodes
        places = {n: Place(i) for i, n in enumerate(inputs)}
        return cls(
            node.target,
            _freeze(node.args, places),
            _freeze(node.kwargs, places),
            tuple(_layouts(n.meta.get("val")) for n in inputs),
            _layouts(node.meta.get("val")),
        )

    def tensors(self) -> list[Layout]:
        return [layout for layout in self.inputs if isinstance(layout, Layout)]

    def outputs(self) -> list[Layout]:
        found = self.output if type(self.output) is tuple else (self.output,)
        return [layout for layout in found if isinstance(layout, Layout)]


_LITERALS = (
    int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


def _freeze(value: Any, places: dict[fx.Node, Place]) -> Any:
    if isinstance(value, fx.Node):
        return places[value]
    if isinstance(value, tuple | list):
        return tuple([_freeze(v, places) for v in value])
    if isinstance(value, _LITERALS):
        return value
    if isinstance(value, dict):
        return tuple([(name, _freeze(v, places)) for name, v in value.items()])
    if isinstance(value, Size):
        value = value.symbolic
    if isinstance(value, SYMBOLIC):
        return _torch.hint_of(value)
    return Opaque(type(value).__name__)


def _layouts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        shape = tuple(map(_torch.hint_of, value.shape))
        if value.layout is not torch.strided:
            return Layout(shape, _contiguous(shape), value.dtype)
        return Layout(shape, tuple(map(_torch.hint_of, value.stride())), value.dtype)
    if isinstance(value, tuple | list):
        return tuple([_layouts(v) for v in value])
    return None


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def signature_of_call(
    target: Any,
    args: Any,
    kwargs: Any,
    outputs: Sequence[Any],
    geometry_of: Callable[[Any], Any],
) -> OpSignature:
    """The signature of a call that ran, where tensors have a size, a stride and a dtype.

    `geometry_of` gives these of an argument, and `None` for one that is not a tensor.

    >>> from collections import namedtuple
    >>> Lies = namedtuple("Lies", "size stride dtype")
    >>> x = Lies((2, 3), (3, 1), torch.float32)
    >>> find = lambda value: value if isinstance(value, Lies) else None
    >>> signature_of_call("sin", [x], {}, [x], find).output
    Layout(shape=(2, 3), stride=(3, 1), dtype=torch.float32)
    """
    inputs: list[Layout] = []

    def freeze(value: Any) -> Any:
        geometry = geometry_of(value)
        if geometry is not None:
            inputs.append(Layout(tuple(geometry.size), tuple(geometry.stride), geometry.dtype))
            return Place(len(inputs) - 1)
        if isinstance(value, tuple | list):
            return tuple([freeze(item) for item in value])
        return value if isinstance(value, _LITERALS) else Opaque(type(value).__name__)

    frozen = freeze(args)
    named = tuple((name, freeze(value)) for name, value in kwargs.items())
    made = tuple(Layout(tuple(g.size), tuple(g.stride), g.dtype) for g in outputs)
    return OpSignature(target, frozen, named, tuple(inputs), made[0] if len(made) == 1 else made)
