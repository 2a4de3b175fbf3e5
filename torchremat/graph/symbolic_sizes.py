"""Sizes that vary from call to call: one graph for many lengths.

The graph of a trace with symbols has sizes as literals: `view(x, [s0*4, 64])`. So its nodes are
tensors only, and code that cuts or rewrites it need not know of symbols. The function that runs the
graph takes their values.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchremat import _torch
from torchremat.graph.nodes import inner_graphs_of

Sizes = Mapping[str, int]
"""The values of symbols, by name."""

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, eq=False, slots=True)
class Size:
    """A size, or a number made of sizes, that stands in a graph as a literal."""

    symbolic: torch.SymInt | torch.SymFloat | torch.SymBool

    def __repr__(self) -> str:
        return format_size(self.symbolic)

    def at(self, sizes: Sizes) -> Any:
        return value_of(self.symbolic, sizes)


class Interpreter(fx.Interpreter):
    """An `fx.Interpreter` of a graph in which sizes may be literals."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        return fx.node.map_aggregate(super().fetch_args_kwargs_from_env(n), _symbolic)


def _symbolic(value: Any) -> Any:
    if not isinstance(value, Size):
        return value
    mode = _torch.innermost_proxy_mode()
    if mode is not None:
        track_from_elsewhere(value.symbolic, mode.tracer)
    return value.symbolic


def track_from_elsewhere(size: Any, tracer: Any) -> None:
    _torch.track_size(size, tracer, _size_from_elsewhere)


def _size_from_elsewhere() -> None:
    """Stands in a trace for a size that it did not compute, until the trace is finished."""


def is_size_from_elsewhere(node: fx.Node) -> bool:
    return node.target is _size_from_elsewhere


def sizes_as_literals(graph: fx.Graph) -> None:
    computing = [n for n in graph.nodes if isinstance(n.meta.get("val"), SYMBOLIC)]
    values = {node: literal_size(node.meta["val"]) for node in computing}

    def literal(node: fx.Node) -> Any:
        return values.get(node, node)

    for node in graph.nodes:
        if node not in values:
            node.args = fx.node.map_arg(node.args, literal)
            node.kwargs = fx.node.map_arg(node.kwargs, literal)
    for node in reversed(computing):
        graph.erase_node(node)


def literal_size(size: Any) -> Any:
    """The literal for a size in a graph: a number where it is settled, else a `Size`."""
    if not isinstance(size, SYMBOLIC):
        return size
    settled = _torch.settle_size(size)
    return Size(settled) if isinstance(settled, SYMBOLIC) else settled


def format_size(size: Any) -> str:
    return _torch.print_size(size) if isinstance(size, SYMBOLIC) else repr(size)


def value_of(size: Any, sizes: Sizes) -> Any:
    if not isinstance(size, SYMBOLIC):
        return size
    return eval(format_size(size), dict(_torch.NAMES_IN_SIZES), dict(sizes))


def symbols_in(module: fx.GraphModule) -> tuple[str, ...]:
    """The names of the symbols that the graph of `module`, or a body in it, needs the values of."""
    found: set[str] = set()
    for node in module.graph.nodes:
        for size in _sizes_in((node.args, node.kwargs)):
            found |= _torch.names_in_size(size.symbolic)
        for body in inner_graphs_of(node):
            found.update(symbols_in(body))
    return tuple(sorted(found))


def shapes_in(module: fx.GraphModule) -> _torch.ShapeEnv | None:
    """The environment of the symbols in the graph of `module`, or in a body in it, if any."""
    for node in module.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        sizes = value.shape if isinstance(value, torch.Tensor) else ()
        for size in (*(s.symbolic for s in _sizes_in((node.args, node.kwargs))), *sizes):
            if isinstance(size, SYMBOLIC):
                return _torch.shape_env_of(size)
        for body in inner_graphs_of(node):
            if (shapes := shapes_in(body)) is not None:
                return shapes
    return None


def _sizes_in(value: Any) -> Iterable[Size]:
    if isinstance(value, Size):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _sizes_in(item)
    elif isinstance(value, dict):
        yield from _sizes_in(list(value.values()))
    elif isinstance(value, slice):
        yield from _sizes_in([value.start, value.stop, value.step])
