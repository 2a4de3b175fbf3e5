"""Outputs that are an input after a write to it, or views of one: they stay what they are.

    def f(x, cache):                joint graph     new = add(cache, x);  part = select(new, 0, 0)
        cache.add_(x)               mutations       cache := new
        return cache[0]             outputs         part

What a graph computes is a value of its own. So after the write the views are taken of the input.
So are values that the backward pass reads, where a derivative reads them as they are: plain PyTorch
saves the input then, and a later write to it raises.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from torchremat.graph.nodes import is_view
from torchremat.graph.notes import notes_of
from torchremat.graph.symbolic_sizes import Size, Sizes


@dataclass(frozen=True, eq=False)
class WrittenOutput:
    """The output at `position` is the input `written`, after the operators `views` one by one."""

    position: int
    written: int
    views: tuple[fx.Node, ...]

    def of(self, value: Tensor, sizes: Sizes | None) -> Tensor:
        def literal(argument: Any) -> Any:
            if not isinstance(argument, Size):
                return argument
            return argument.symbolic if sizes is None else argument.at(sizes)

        for view in self.views:
            args = fx.node.map_aggregate(view.args[1:], literal)
            kwargs = fx.node.map_aggregate(dict(view.kwargs), literal)
            value = view.target(value, *args, **kwargs)  # type: ignore[operator]
        return value


def find_written_residuals(
    residuals: Sequence[fx.Node], mutations: Sequence[tuple[int, fx.Node]]
) -> tuple[WrittenOutput, ...]:
    """The residuals for which a written input stands, as it does in plain PyTorch."""
    found = find_written_outputs(residuals, mutations)
    return tuple(r for r in found if is_read_by_derivative(residuals[r.position]))


def is_read_by_derivative(value: fx.Node) -> bool:
    """Whether a derivative reads `value`, or a view of it, which is none of a recomputation."""
    return any(
        is_read_by_derivative(user) if is_view(user) else _is_derivative(user)
        for user in value.users
    )


def _is_derivative(node: fx.Node) -> bool:
    return node.op == "call_function" and notes_of(node).phase == "backward"


def find_written_outputs(
    outputs: Sequence[fx.Node], mutations: Sequence[tuple[int, fx.Node]]
) -> tuple[WrittenOutput, ...]:
    inputs = {value: i for i, value in mutations}
    found = []
    for position, output in enumerate(outputs):
        base = output
        views: list[fx.Node] = []
        while base not in inputs and is_view(base) and len(base.all_input_nodes) == 1:
            views.insert(0, base)
            base = base.all_input_nodes[0]
        if base in inputs:
            found.append(WrittenOutput(position, inputs[base], tuple(views)))
    return tuple(found)
