from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.batching.ragged.checkpoint_bodies import run_body
from torchremat.batching.ragged.interpret import interpret
from torchremat.batching.ragged.layouts.flat import flat_pile_data, pad_flat
from torchremat.batching.ragged.layouts.layouts import Packed, Padded, Shared, Value, pack
from torchremat.batching.ragged.layouts.layouts import batch as batch_of
from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize, Sizes
from torchremat.batching.ragged.pile import ConcatAxis, Pile, round_up_to_power
from torchremat.batching.ragged.pile_type import IndexedSize
from torchremat.batching.ragged.rules.op_call import Batch
from torchremat.batching.ragged.trace.element_graph import (
    ElementGraph,
    ElementSpec,
    find_element_graph,
)
from torchremat.errors import RaggedTypeError
from torchremat.tracing.axes.named_axes import AxisFrame, axis_environment, in_scope


@dataclass(frozen=True, eq=False)
class Dense:
    """An output whose elements have one size: the batch is along `dim`, if they vary."""

    tensor: Any
    dim: int | None


@dataclass(frozen=True, eq=False)
class Ragged:
    """An output whose elements differ in size."""

    value: Packed | Padded


def run_ragged(
    function: Callable[[Sequence[Tensor]], Sequence[Any]],
    values: Sequence[Any],
    axes: Sequence[Any],
    axis_size: int,
    *,
    randomness: str = "error",
    axis_name: Any = None,
    owner: Any = None,
    key: Any = (),
) -> list[Dense | Ragged]:
    """Map `function`, which takes the tensors of one element, over the elements of `values`.

    `axes` has for each value an int, `None` (all elements share it) or `pile_axis`. The graph of
    one element lives as long as `owner`. By default that is `function`, which then must be the same
    object from call to call. The graph depends on `key` besides the tensors' dtypes and sizes.
    """
    inputs = _Inputs(axis_size)
    specs = [inputs.add(v, axis, i) for i, (v, axis) in enumerate(zip(values, axes, strict=True))]
    owner = function if owner is None else owner
    with _name_axis(axis_name, axis_size):
        graph, captured = find_element_graph(
            function, specs, owner, (key, axis_environment()), [of for of, *_ in inputs.lengths]
        )
    extra = [torch.empty(0)] if graph.has_extra_input else []
    lifted = [Shared(t) for t in [*extra, *captured]]
    batch = Batch(
        axis_size, inputs.make_sizes(graph), randomness, axis_name, graph.assumed_of_values
    )
    found = interpret(
        graph.module,
        [*inputs.make_values(batch.sizes, graph), *lifted],
        batch,
        graph.outputs,
        graph.items,
        run_body,
    )
    return [_make_output(value) for value in found]


def _name_axis(axis_name: Any, axis_size: int) -> AbstractContextManager[None]:
    """A block in which the axis of the elements has its name, and cannot be reached yet."""
    return in_scope() if axis_name is None else in_scope(AxisFrame(axis_name, axis_size, None))


def _make_output(value: Any) -> Dense | Ragged:
    if isinstance(value, Shared):
        return Dense(value.data, None)
    if isinstance(value, Padded):
        value = pack(value)
    if isinstance(value, Packed) or (isinstance(value, Padded) and value.is_ragged):
        return Ragged(value)
    if isinstance(value, Padded):
        return Dense(value.data, 0)
    return Dense(value, None)


def as_pile(value: Dense | Ragged, axis_size: int) -> Pile:
    """An output as users get it: a `Pile` of `axis_size` elements."""
    if isinstance(value, Dense):
        tensor = value.tensor
        if value.dim is None:
            tensor = torch.as_tensor(tensor)
            tensor = tensor.expand(axis_size, *tensor.shape)
        else:
            tensor = tensor.movedim(value.dim, 0)
        return Pile.of(tensor, [], [], tensor.shape[1:])
    ragged = value.value
    sizes = ragged.sizes
    dims = [d for d, size in enumerate(sizes) if isinstance(size, RaggedSize)]
    extents = [sizes[d] for d in dims]
    bounds = [
        round_up_to_power(e.longest if e.known_longest is None else e.known_longest)
        for e in extents
    ]
    data = ragged.data if isinstance(ragged, Packed) else flat_pile_data(ragged)
    return Pile.of(data, [e.lengths for e in extents], dims, sizes, bounds)


class _Inputs:
    def __init__(self, axis_size: int) -> None:
        self.axis_size = axis_size
        self.lengths: list[tuple[Tensor, int, Any]] = []
        self.pending: list[Callable[[dict[int, RaggedSize]], Value]] = []

    def add(self, value: Any, axis: Any, position: int) -> ElementSpec:
        if isinstance(value, Pile) != isinstance(axis, ConcatAxis):
            raise RaggedTypeError(_describe_wrong_axis(value, axis, position))
        if isinstance(value, Pile):
            return self._add_pile(value)
        tensor = value
        if axis is None:
            self.pending.append(lambda extents: Shared(tensor))
            shape = tuple(tensor.shape)
        else:
            moved = tensor.movedim(axis, 0)
            self.pending.append(lambda extents: batch_of(moved))
            shape = tuple(moved.shape[1:])
        return _spec(tensor, shape)

    def _add_pile(self, pile: Pile) -> ElementSpec:
        elt = pile.aval.elt_ty
        dims = elt.ragged_dims
        data = pile.data
        if not dims:
            self.pending.append(lambda extents: batch_of(data))
            return _spec(data, tuple(elt.shape))
        shape = list(elt.shape)
        for dim in dims:
            total = data.shape[dim] if len(dims) == 1 else None
            shape[dim] = -1 - self._find_size(elt.shape[dim], total)
        if len(dims) == 1:
            number = shape[dims[0]]
            self.pending.append(lambda extents: Packed(data, dims[0], extents[number]))
        else:
            self.pending.append(
                lambda extents: pad_flat(data, [extents[s] if s < 0 else s for s in shape])
            )
        return _spec(data, tuple(shape))

    def _find_size(self, size: IndexedSize, total: Any) -> int:
        """Find the number of a size; equal lengths are one size."""
        for i, (lengths, longest, known) in enumerate(self.lengths):
            if lengths is size.lengths or _are_equal(lengths, size.lengths):
                self.lengths[i] = (lengths, min(longest, size.longest), known or total)
                return i
        self.lengths.append((size.lengths, size.longest, total))
        return len(self.lengths) - 1

    def make_sizes(self, graph: ElementGraph) -> Sizes:
        symbols: dict[str, Any] = {}
        for name, (lengths, longest, total) in zip(graph.symbols, self.lengths, strict=True):
            symbols[name] = RaggedSize(name, lengths.to(torch.int64), total, longest)
        return Sizes(self.axis_size, symbols)

    def make_values(self, sizes: Sizes, graph: ElementGraph) -> list[Value]:
        extents = {-1 - i: sizes.symbols[name] for i, name in enumerate(graph.symbols)}
        return [make(extents) for make in self.pending]


def _spec(tensor: Tensor, shape: tuple[Any, ...]) -> ElementSpec:
    requires_grad = _torch.requires_grad_at_any_level(tensor)
    return ElementSpec(shape, tensor.dtype, tensor.device, requires_grad)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    a, b = _torch.innermost_tensor(a), _torch.innermost_tensor(b)
    if a is b:
        return True
    if _torch.is_fake(a) or _torch.is_fake(b) or a.shape != b.shape or a.device != b.device:
        return False
    return torch.equal(a, b)


def _describe_wrong_axis(value: Any, axis: Any, position: int) -> str:
    if isinstance(value, Pile):
        return (
            f"pile input without using pile_axis in_axes spec: input {position} is a Pile "
            f"({value.aval}), and its entry of in_axes is {axis!r}; give it pile_axis"
        )
    return (
        f"pile_axis in in_axes for input {position}, which is not a Pile but "
        f"{type(value).__name__}: make one with Pile.from_list, or give an int"
    )
