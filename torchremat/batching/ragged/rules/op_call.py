import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.batching.ragged.layouts.layouts import (
    Packed,
    Padded,
    Shared,
    Value,
    is_ragged,
    pack,
    pad,
)
from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize, Sizes
from torchremat.errors import RaggedError
from torchremat.graph.symbolic_sizes import Size
from torchremat.tracing.axes.mapped_functions import run_mapped
from torchremat.tracing.axes.named_axes import AxisName

Rule = Callable[["RaggedCall"], Any]
RULES: dict[str, Rule] = {}
"""The rules for values whose sizes differ, by the name of the operator's packet."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators of ATen; it answers `NotImplemented` where it does not hold."""

    def register(function: Rule) -> Rule:
        RULES.update((f"aten.{name}", function) for name in names)
        return function

    return register


@dataclass(eq=False)
class Batch:
    """The batch of a call: its number of elements, their sizes, and what random numbers do."""

    axis_size: int
    sizes: Sizes
    randomness: str = "error"
    axis_name: AxisName = None
    assumed: Sequence[tuple[Any, Any]] = ()
    """Questions about values of tensors, with what the graph takes for the answer."""


@dataclass(frozen=True, eq=False)
class RaggedCall:
    """A call of `op`: arguments with values in them, and the `result` for one element."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    batch: Batch
    source: Any = None

    @cached_property
    def name(self) -> str:
        """The name of the packet: `aten.sum`."""
        return str(getattr(self.op, "overloadpacket", self.op))

    @cached_property
    def values(self) -> list[Value]:
        return list(_find_leaves((self.args, dict(self.kwargs)), (Shared, Padded, Packed)))

    @cached_property
    def has_varying_numbers(self) -> bool:
        """Whether an argument is, or has in it, a number that differs from element to element."""
        numbers = _find_leaves((self.args, dict(self.kwargs)), (Size,))
        return any(map(self.batch.sizes.varies, numbers))

    @property
    def is_ragged(self) -> bool:
        return self.has_varying_numbers or any(map(is_ragged, self.values))

    @cached_property
    def bound(self) -> dict[str, Any]:
        """The arguments by their names in the schema, with defaults."""
        bound = {}
        for i, argument in enumerate(_torch.schema_arguments(self.op)):
            if i < len(self.args):
                bound[argument.name] = self.args[i]
            else:
                bound[argument.name] = self.kwargs.get(argument.name, argument.default_value)
        return bound

    def dims_along(self, rank: int, name: str = "dim") -> tuple[int, ...]:
        """The argument `dim`, as dims from 0; all if there is none."""
        given = self.bound.get(name)
        if given is None or (isinstance(given, Sequence) and not given):
            return tuple(range(rank))
        given = given if isinstance(given, Sequence) else [given]
        return tuple(d % rank if rank else 0 for d in given)

    def sizes_of(self, result: Any) -> tuple[Any, ...]:
        return self.batch.sizes.shape(result)

    def check_random(self) -> None:
        if torch.Tag.nondeterministic_seeded not in getattr(self.op, "tags", ()):
            return
        if self.batch.randomness == "error":
            raise RuntimeError(
                "vmap: called random operation while in randomness error mode. Please either use "
                "the 'same' or 'different' randomness flags on vmap or perform the randomness "
                f"operation out of vmap ({self.name} at {self.source})"
            )
        if self.batch.randomness == "same":
            raise RaggedError(
                f"{self.name} at {self.source} draws for elements of different sizes, which cannot "
                "draw the same numbers: use randomness='different', or draw outside"
            )

    def run(self, convert: Callable[[Value], Tensor], size: Callable[[Any], Any]) -> Any:
        def swap(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return convert(leaf)
            return size(self.batch.sizes.of(leaf)) if isinstance(leaf, Size) else leaf

        return self.op(*_map_arguments(swap, self.args), **_map_arguments(swap, dict(self.kwargs)))

    def find_number(self, leaf: Any) -> Any:
        """The number that all elements have for a size; `leaf` if it is no size."""
        return self.batch.sizes.of(leaf) if isinstance(leaf, Size) else leaf

    def wrap(self, outputs: Any, make: Callable[[Tensor, tuple[Any, ...]], Value]) -> Any:
        if isinstance(outputs, Tensor):
            return make(outputs, self.sizes_of(self.result))
        if isinstance(outputs, tuple | list):
            return [
                make(o, self.sizes_of(r)) if isinstance(o, Tensor) else o
                for o, r in zip(outputs, self.result, strict=True)
            ]
        return outputs


def run_on_packed(call: RaggedCall) -> Any:
    """For operators that treat each place along the dim that differs alike."""
    if call.has_varying_numbers:
        return NotImplemented
    call.check_random()
    outputs = call.run(lambda v: v.data, lambda s: s)
    return call.wrap(outputs, _as_packed)


def _as_packed(data: Tensor, sizes: tuple[Any, ...]) -> Value:
    places = [i for i, size in enumerate(sizes) if isinstance(size, RaggedSize)]
    if not places:
        return Shared(data)
    (dim,) = places
    return Packed(data, dim, sizes[dim])


def run_on_padded(call: RaggedCall, fill: Callable[[Padded], Tensor] | None = None) -> Any:
    """For operators that are right wherever their arguments are; `fill` is harmless elsewhere."""
    if call.has_varying_numbers:
        return NotImplemented
    call.check_random()

    def convert(value: Value) -> Value:
        if not is_ragged(value):
            return value
        full = pad(value, call.batch.axis_size)
        return replace(full, data=fill(full) if fill else full.data)

    outputs = run_mapped_call(call, convert)
    return call.wrap(outputs, as_padded)


def as_padded(data: Tensor, sizes: tuple[Any, ...]) -> Value:
    """Take padded data `[axis_size, ...]` for elements of `sizes`; pack it where it can be."""
    extents = tuple(size if isinstance(size, RaggedSize) else None for size in sizes)
    return pack(Padded(data, extents))


def run_mapped_call(
    call: RaggedCall,
    convert: Callable[[Value], Value] = lambda v: v,
    place: Callable[[Tensor, int | None], Any] | None = None,
) -> Any:
    """`place` gets each output and where the batch is in it; by default it goes to the front."""
    tree = _map_arguments(
        lambda leaf: convert(leaf) if isinstance(leaf, Value) else call.find_number(leaf),
        [call.args, dict(call.kwargs)],
    )
    values = list(_find_leaves(tree, (Shared, Padded, Packed)))
    results: list[Any] = []

    def run(*inner: Tensor) -> tuple[Tensor, ...]:
        left = iter(inner)
        fill = _map_arguments(lambda x: next(left) if isinstance(x, Value) else x, tree)
        results[:] = [call.op(*fill[0], **fill[1])]
        return tuple(_find_leaves(results, (Tensor,)))

    batch = call.batch
    dims = tuple(None if isinstance(v, Shared) else 0 for v in values)
    outputs, out_dims = run_mapped(run, dims, batch.axis_size, batch.randomness, batch.axis_name)(
        *(v.data for v in values)
    )
    if place is None:
        place = functools.partial(_move_to_front, batch.axis_size)
    (result,) = results
    placed = [place(o, dim) for o, dim in zip(outputs, out_dims, strict=True)]
    if result is None or isinstance(result, Tensor):  # None: a check, of an inverse say
        return placed[0] if placed else None
    left = iter(placed)
    return [next(left) if isinstance(o, Tensor) else None for o in result]


def _move_to_front(axis_size: int, output: Tensor, dim: int | None) -> Tensor:
    return output.expand(axis_size, *output.shape) if dim is None else output.movedim(dim, 0)


def _as_value(output: Tensor, dim: int | None) -> Value:
    if dim is None:
        return Shared(output)
    return Padded(output.movedim(dim, 0), (None,) * (output.dim() - 1))


def run_dense(call: RaggedCall) -> Any:
    """Run a call none of whose values is ragged: once if no value has the batch, else by `vmap`."""
    if is_collective(call):
        return run_mapped_call(call, place=_as_value)
    draws = torch.Tag.nondeterministic_seeded in getattr(call.op, "tags", ())
    if all(isinstance(v, Shared) for v in call.values) and not draws:
        outputs = call.run(lambda v: v.data, lambda s: s)
        return call.wrap(outputs, lambda data, _: Shared(data))
    return call.wrap(
        run_mapped_call(call), lambda data, _: Padded(data, (None,) * (data.dim() - 1))
    )


def check_sizes(call: RaggedCall, result: Any) -> None:
    """Raise if a rule gives other sizes than the graph of an element has.

    The two come about apart: the trace knows sizes as symbols, a rule computes with numbers. So a
    rule that takes a size for what it is not, or a wrong answer to a question, is met here.
    """
    pairs = (
        zip(result, call.result, strict=True)
        if isinstance(result, list)
        else [(result, call.result)]
    )
    for value, expected in pairs:
        if not isinstance(value, Value) or not isinstance(expected, Tensor):
            continue
        wanted = call.sizes_of(expected)
        if len(wanted) != value.rank or not all(map(_are_one_size, value.sizes, wanted)):
            raise RaggedError(
                f"{call.name}, at {call.source}, gives sizes {_describe(value.sizes)} for the "
                f"elements of a batch, and {_describe(wanted)} for one element: torchremat has a "
                "wrong rule for it. Write it with other operators, and report this."
            )


def _are_one_size(a: Any, b: Any) -> bool:
    if a is b or (type(a) is int and a == b):
        return True
    if isinstance(a, RaggedSize) and isinstance(b, RaggedSize):
        return a.text == b.text or not a.known_on_host or not b.known_on_host or a.host == b.host
    ragged, number = (a, b) if isinstance(a, RaggedSize) else (b, a)
    if not isinstance(ragged, RaggedSize):
        return bool(a == b)
    return ragged.known_on_host and all(length == number for length in ragged.host)


def _describe(sizes: Sequence[Any]) -> str:
    return "[" + ", ".join(str(getattr(size, "text", size)) for size in sizes) + "]"


def is_collective(call: RaggedCall) -> bool:
    """Whether the call goes over the named axis of the batch."""
    return call.batch.axis_name is not None and "axis_name" in call.kwargs


def _map_arguments(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, tuple | list):
        return type(tree)(_map_arguments(function, item) for item in tree)
    if isinstance(tree, dict):
        return {key: _map_arguments(function, item) for key, item in tree.items()}
    return function(tree)


def _find_leaves(tree: Any, kinds: tuple[type, ...]) -> Iterator[Any]:
    if isinstance(tree, tuple | list):
        for item in tree:
            yield from _find_leaves(item, kinds)
    elif isinstance(tree, dict):
        yield from _find_leaves(list(tree.values()), kinds)
    elif isinstance(tree, kinds):
        yield tree
