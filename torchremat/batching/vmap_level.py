import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.api_util import flatten_axes
from torchremat.batching.axis_positions import matchaxis
from torchremat.batching.mapped_arguments import MappedLeaves, name_output
from torchremat.batching.sharding import spread_examples
from torchremat.batching.vmap_piles import has_piles, needs_piles, run_on_piles
from torchremat.batching.vmappable import is_vmappable, vmappable_of
from torchremat.core.source import current_source, name_of, source_of_error, warn_user
from torchremat.errors import AxisTypeError, ConcretizationError, LoopWarning
from torchremat.tracing.axes.mapped_functions import run_mapped
from torchremat.tracing.checks.mapped_checks import expect_errors_to_leave
from torchremat.tracing.error_messages import explain_unmapped_operator
from torchremat.tracing.tracing import current_tracing


@dataclass(frozen=True)
class Mapping:
    """The options of `vmap`, as its documentation has them. A call runs a function with them."""

    in_axes: Any = 0
    out_axes: Any = 0
    axis_name: Any = None
    axis_size: Any = None
    spmd_axis_name: Any = None
    sum_match: bool = False
    randomness: str = "error"

    def __call__(self, fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = MappedLeaves.of(fun, self.in_axes, args, kwargs)
        return self.run(call, call.size(self.axis_size))

    def run(self, call: MappedLeaves, size: int) -> Any:
        out_axes = _torch.tree_flatten(self.out_axes)[0]
        if has_piles(call) or needs_piles(out_axes):
            return self._run_on_piles(call, size)
        try:
            return self._run_level(call, size)
        except RuntimeError as error:
            explain_unmapped_operator(error)
            if not _torch.needs_mapped_value(error):
                raise
            if not _torch.asks_for_value(error) or not _may_be_sizes(call):
                raise ConcretizationError(
                    f"the value of a tensor that vmap maps is needed at {source_of_error(error)}, "
                    "but under vmap it stands for the values of all examples. Choose between "
                    "tensors with torch.where, between functions with torch.cond; pad and mask "
                    "where a size depends on values; or give the tensor None in in_axes."
                ) from error
        return self._run_on_piles(call, size)  # it makes tensors of sizes that it is given

    def _run_on_piles(self, call: MappedLeaves, size: int) -> Any:
        return run_on_piles(
            call,
            size,
            randomness=self.randomness,
            axis_name=self.axis_name,
            out_axes=self.out_axes,
            sum_match=self.sum_match,
        )

    def _run_level(self, call: MappedLeaves, size: int) -> Any:
        level = _Level(self, call, size)
        with _warn_of_loops():
            values, dims = run_mapped(
                level.run, level.in_dims, size, self.randomness, self.axis_name, self.spmd_axis_name
            )(*level.tensors)
        return level.unflatten_outputs(values, dims)


@dataclass(frozen=True)
class _Container:
    value: Any


class _Level:
    """The order of the tensors of containers is that in which `to_elt` calls its first argument."""

    def __init__(self, mapping: Mapping, call: MappedLeaves, size: int) -> None:
        self.mapping = mapping
        self.call = call
        self.size = size
        self.axis_size = size if mapping.axis_size is None else mapping.axis_size
        self.tensors: list[Tensor] = []
        self.in_dims: tuple[int | None, ...] = ()
        self.out_spec: Any = None
        self.out_leaves: list[Any] = []
        self.out_axes: list[Any] = []
        self._collect()

    def _collect(self) -> None:
        dims: list[int | None] = []

        def note(value: Any, axis: Any) -> Any:
            if isinstance(value, Tensor):
                self.tensors.append(value)
                dims.append(axis)
                return value if axis is None else value.select(axis, 0) if self.size else value
            return value

        for leaf, axis in zip(self.call.leaves, self.call.axes, strict=True):
            if is_vmappable(leaf):
                self._make_element(note, leaf, axis)
            elif isinstance(leaf, Tensor):
                self.tensors.append(leaf)
                dims.append(axis)
        self.in_dims = tuple(dims)

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.call.leaves, self.call.axes, strict=True)

    def _make_element(self, cont: Callable[..., Any], leaf: Any, axis: Any) -> Any:
        kind = vmappable_of(type(leaf))
        assert kind is not None

        def get_idx() -> Any:
            return cont(kind.numbers(self.axis_size, self.size), 0)

        return kind.to_elt(cont, get_idx, leaf, axis)

    def run(self, *tensors: Tensor) -> list[Any]:
        left = iter(tensors)

        def take(value: Any, axis: Any) -> Any:
            return next(left) if isinstance(value, Tensor) else value

        elements = [
            self._make_element(take, leaf, axis) if is_vmappable(leaf) else take(leaf, axis)
            for leaf, axis in self._pairs()
        ]
        args, kwargs = _torch.tree_unflatten(elements, self.call.spec)
        with expect_errors_to_leave():
            result = self.call.fun(*args, **kwargs)
        leaves, spec = _torch.tree_flatten(result, is_leaf=is_vmappable)
        self.out_axes = flatten_axes("vmap out_axes", spec, self.mapping.out_axes)
        self.out_spec = spec
        self.out_leaves = [
            _Container(self._make_container(leaf, axis)) if is_vmappable(leaf) else leaf
            for leaf, axis in zip(leaves, self.out_axes, strict=True)
        ]
        return [leaf for leaf in self.out_leaves if isinstance(leaf, Tensor)]

    def _make_container(self, element: Any, axis: Any) -> Any:
        """The container of all examples, made inside the level: its rule may compute."""
        level = _torch.transform_depth()

        def cont(_: Any, value: Any, axis: Any) -> Any:
            if isinstance(value, Tensor):
                return self._place_axis(*_torch.unwrap_batched_tensor(value, level), axis)
            return self._repeat(value, axis)

        kind = vmappable_of(type(element))
        assert kind is not None
        return kind.from_elt(cont, self.axis_size, element, axis)

    def unflatten_outputs(self, tensors: Sequence[Tensor], dims: Sequence[int | None]) -> Any:
        left = iter(zip(tensors, dims, strict=True))
        placed: list[Any] = []
        for i, (leaf, axis) in enumerate(zip(self.out_leaves, self.out_axes, strict=True)):
            with name_output(self.out_spec, i, self.out_axes):
                if isinstance(leaf, _Container):
                    placed.append(leaf.value)
                elif isinstance(leaf, Tensor):
                    placed.append(self._place_axis(*next(left), axis))
                else:
                    placed.append(self._repeat(leaf, axis))
        return _torch.tree_unflatten(placed, self.out_spec)

    def _place_axis(self, value: Tensor, dim: int | None, axis: Any) -> Tensor:
        mapping = self.mapping
        if axis is not None and not isinstance(axis, int):
            raise AxisTypeError(
                f"vmap was given {axis!r} as the axis of an output that is a tensor"
            )
        moved = matchaxis(mapping.axis_name, self.size, dim, axis, value, mapping.sum_match)
        if mapping.spmd_axis_name is None or axis is None:
            return moved
        return spread_examples(moved, axis % moved.dim(), mapping.spmd_axis_name)  # type: ignore[no-any-return]

    def _repeat(self, value: Any, axis: Any) -> Any:
        """A Python value, the same for all; a number becomes a tensor where it has an axis."""
        if axis is None or value is None:
            return value
        if not _is_number(value):
            raise AxisTypeError(
                f"vmap({name_of(self.call.fun)}) returns {value!r} ({type(value).__name__}) where "
                f"out_axes is {axis}: only tensors and numbers have an axis. Give None for it in "
                "out_axes, or return tensors."
            )
        return matchaxis(None, self.size, None, axis, torch.tensor(value))


def _may_be_sizes(call: MappedLeaves) -> bool:
    """Whether there are mapped integers, of which a function can make tensors of such sizes."""
    return any(
        isinstance(leaf, Tensor) and axis is not None and not _is_inexact(leaf)
        for leaf, axis in zip(call.leaves, call.axes, strict=True)
    )


def _is_inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex() or x.dtype is torch.bool


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex)


@contextmanager
def _warn_of_loops() -> Iterator[None]:
    """All threads share the filters of warnings: PyTorch's own stays outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found: dict[str, str] = {}

    def note(message: Any, category: Any, *rest: Any, **named: Any) -> None:
        name = _torch.find_looped_operator(str(message))
        if name is None:
            shown(message, category, *rest, **named)
        else:
            found.setdefault(name, str(current_source() or "an unknown line"))

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_torch.LOOP_WARNING)
        shown, warnings.showwarning = warnings.showwarning, note
        try:
            yield
        except SystemError as error:  # PyTorch calls `note` while the error of an operator is set
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None
    tracing = current_tracing()
    for name, source in found.items():
        if tracing is not None:
            tracing.note_loop(name)
        warn_user(
            f"{name}, at {source}, has no batching rule in PyTorch: vmap runs it in a loop, once "
            "for each example. Register a rule (torchremat.batching.primitive_batchers), or call "
            "something that has one.",
            LoopWarning,
        )
