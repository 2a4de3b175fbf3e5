from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from torchremat.autodiff.bodies import BatchedBody, Body
from torchremat.autodiff.jvp_graph import TensorsOf, check_pure, spec_of, trace_body
from torchremat.batching.mapped_arguments import check_randomness
from torchremat.errors import ArgumentTypeError, ArgumentValueError
from torchremat.tracing.axes.named_axes import AxisName
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.tracing import Tracing
from torchremat.typed_graph.building import build_graph
from torchremat.typed_graph.dce import copy_graph, set_outputs
from torchremat.typed_graph.typed_graph import TypedGraph

Axes = int | None | Sequence[int | None]
aten = torch.ops.aten
_EMPTIES = {aten.empty_like.default, aten.new_empty.default}


def batch_graph(
    g: TypedGraph,
    axis_size: int,
    in_axes: Axes,
    out_axes: Axes = None,
    *,
    randomness: str = "error",
    axis_name: AxisName = None,
) -> tuple[TypedGraph, list[int | None]]:
    """Map a graph over an axis of its inputs.

    Args:
        g: the graph of one example. It must write to nothing; its constants have no such axis.
        axis_size: the size of the axis.
        in_axes: where the axis is in each input, in the order of `in_avals`: an int (negative ones
            count from the end of the input with the axis), or `None` for an input that all examples
            share. One int or `None` stands for all.
        out_axes: where each output has it, in the order of `out_avals`. An output that is
            the same for all examples is repeated for an int. `None` leaves an output as it comes:
            with the axis first, or without it if it is the same for all.
        axis_name: the name of the axis. Collectives of `g` over it become plain operators.
        randomness: what random operators do: `"error"`, draw `"different"` numbers for each
            example, or the `"same"` ones.

    Returns:
        A graph that takes the arguments of `g` with the axis, and gives its result with the axis. A
        list: where the axis is in each output, `None` for an output without it.

    Raises:
        ValueError: if an axis is out of range or missing, or `axis_size` is not positive.
        GraphError: (a `ValueError`) if `g` writes to its inputs or constants.
        TypeError: if an axis is neither an int nor `None`.

    After `jax.interpreters.batching.batch_jaxpr`.

    >>> import torch, torchremat as tr
    >>> g = tr.make_graph(torch.dot)(torch.ones(3), torch.ones(3))
    >>> batched, out_axes = batch_graph(g, 2, (0, None))
    >>> out_axes, tr.eval_graph(batched, torch.ones(2, 3), torch.ones(3))
    ([0], tensor([3., 3.]))
    """
    check_pure(g, "batch_graph")
    _check_size(axis_size)
    check_randomness(randomness)
    axes = _as_axes(in_axes, [len(a.shape) for a in g.in_avals], "in_axes", "input")
    wanted = _as_axes(out_axes, [len(a.shape) for a in g.out_avals], "out_axes", "output")
    in_dims = (*(None for _ in g.consts), *axes)
    example = _with_shared_empties(g) if randomness == "same" else g
    mapped = BatchedBody(TensorsOf(example), in_dims, axis_size, randomness, axis_name)
    body = _PlaceAxes(mapped, g.outputs, tuple(wanted))
    nodes = [*g.const_nodes, *g.input_nodes]
    specs = [
        spec if dim is None else _with_axis(spec, dim, axis_size)
        for spec, dim in zip(map(spec_of, nodes), in_dims, strict=True)
    ]
    traced = trace_body(g, body, specs, [node.name for node in nodes])
    structures = (g.in_structure, g.out_structure)
    return build_graph(traced.module, traced.inputs, traced.outputs, structures), body.out_axes


def _with_shared_empties(g: TypedGraph) -> TypedGraph:
    """Dropout draws into `empty_like(x)`: PyTorch draws alike for all only if that is unmapped."""
    module, copies = copy_graph(g)
    set_outputs(module.graph, [copies.get(value, value) for value in g.outputs])
    for node in module.graph.nodes:
        if node.target in _EMPTIES:
            value = node.meta["val"]
            node.target = aten.empty_strided.default
            node.args = (list(value.shape), list(value.stride()))
            node.kwargs = {"dtype": value.dtype, "device": value.device}
    return replace(g, graph_module=module)


@dataclass(eq=False)
class _PlaceAxes(Body):
    """After a run `out_axes` says where the axis of each output is."""

    of: BatchedBody
    outputs: Sequence[Any]
    wanted: tuple[int | None, ...]
    out_axes: list[int | None] = ()  # type: ignore[assignment]

    def run(self, tracing: Tracing, inputs: Sequence[Tensor]) -> list[Any]:
        results = iter(self.of.run(tracing, inputs))
        dims = iter(self.of.out_dims)
        placed: list[Any] = []
        self.out_axes = []
        for output, axis in zip(self.outputs, self.wanted, strict=True):
            is_tensor = isinstance(output, fx.Node)
            value = next(results) if is_tensor else output
            dim = next(dims) if is_tensor else None
            if axis is None:
                placed.append(value)
                self.out_axes.append(dim)
            else:
                placed.append(self._place_axis(value, dim, axis))
                self.out_axes.append(axis)
        return placed

    def _place_axis(self, value: Any, dim: int | None, axis: int) -> Tensor:
        if not isinstance(value, Tensor):
            return torch.full((self.of.axis_size,), value)
        if dim is not None:
            return torch.movedim(value, dim, axis)
        shape = list(value.shape)
        shape.insert(axis, self.of.axis_size)
        return value.unsqueeze(axis).expand(shape)


def _check_size(axis_size: Any) -> None:
    if isinstance(axis_size, bool) or not isinstance(axis_size, int):
        raise ArgumentTypeError(
            f"axis_size must be an int, but it is {axis_size!r} ({type(axis_size).__name__})"
        )
    if axis_size < 1:
        raise ArgumentValueError(f"axis_size must be at least 1, but it is {axis_size}")


def _as_axes(axes: Any, ranks: Sequence[int], what: str, of_what: str) -> list[int | None]:
    if axes is None or isinstance(axes, int):
        axes = [axes] * len(ranks)
    if not isinstance(axes, Sequence) or isinstance(axes, str):
        raise ArgumentTypeError(
            f"{what} must be an int, None, or a sequence of them, one for each {of_what}, but it "
            f"is {axes!r} ({type(axes).__name__})"
        )
    if len(axes) != len(ranks):
        raise ArgumentValueError(
            f"{what} must have one entry for each {of_what}: the graph has {len(ranks)}, and "
            f"{what} has {len(axes)} entries"
        )
    return [
        _as_axis(a, rank + 1, f"{what}[{i}]")
        for i, (a, rank) in enumerate(zip(axes, ranks, strict=True))
    ]


def _as_axis(axis: Any, rank: int, what: str) -> int | None:
    if axis is None:
        return None
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise ArgumentTypeError(
            f"{what} must be an int or None, but it is {axis!r} ({type(axis).__name__})"
        )
    if not -rank <= axis < rank:
        raise ArgumentValueError(
            f"{what} is {axis}, but with the mapped axis the tensor has {rank} dimension(s): an "
            f"axis must be at least {-rank} and less than {rank}"
        )
    return axis % rank


def _with_axis(spec: InputSpec, axis: int, size: int) -> InputSpec:
    shape = list(spec.shape)
    shape.insert(axis, size)
    strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return replace(spec, shape=tuple(shape), stride=strides)
