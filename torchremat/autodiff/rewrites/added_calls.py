"""Calls that rewrites add to a graph, each with its fake result and the notes of another."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from torchremat import _torch
from torchremat.graph.aliasing import lie_alike
from torchremat.graph.notes import notes_of, set_notes
from torchremat.graph.symbolic_sizes import Size, literal_size


def add_like(
    node: fx.Node,
    target: Any,
    args: tuple[Any, ...],
    value: Any,
    kwargs: Mapping[str, Any] | None = None,
) -> fx.Node:
    """Add a call that stands in the user's code where `node` does; `value` is its fake result."""
    made = node.graph.call_function(target, args, dict(kwargs or {}))
    made.meta["val"] = value
    if "stack_trace" in node.meta:
        made.meta["stack_trace"] = node.meta["stack_trace"]
    set_notes(made, notes_of(node))
    return made


def add_call(
    node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> fx.Node:
    """`add_like` with the result on fake tensors; sizes among the arguments may be symbols."""
    given = fx.node.map_aggregate((args, dict(kwargs or {})), literal_size)
    return add_like(node, target, given[0], run_on_fakes(target, args, kwargs), given[1])


def run_on_fakes(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """The result of an operator for the fake results of the nodes among its arguments."""
    fakes: list[Tensor] = []

    def read(argument: Any) -> Any:
        if isinstance(argument, Size):
            return argument.symbolic
        if not isinstance(argument, fx.Node):
            return argument
        value = argument.meta["val"]
        if fakes and isinstance(value, Tensor):
            value = lie_alike(value, fakes[0].fake_mode)  # type: ignore[attr-defined]
        if _torch.is_fake(value):
            fakes.append(value)
        return value

    values = fx.node.map_aggregate((args, dict(kwargs or {})), read)
    return target(*values[0], **values[1])
