"""Tiles in graphs that inductor compiles: the graph calls them, and inductor compiles the body.

    tiled_p(body, layout, x, w)  ->  run_tiles("tiles_5f0c...", [x, w])

To inductor a call is an operator that it cannot look into. What runs in a tile it compiles as a
graph of its own, for the number of rows that most tiles have.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchremat.autodiff.tiles.tiled_op import TileLayout, run_tiles, split_products, tiled_p
from torchremat.graph.codegen import Runner, compile_graph
from torchremat.graph.nodes import body_of
from torchremat.graph.symbolic_sizes import SYMBOLIC

Lower = Callable[[fx.GraphModule], Runner]
"""Compiles a body."""


class _NamedTiles:
    """The tiles of a call, which its name in a compiled graph stands for."""

    def __init__(self, body: fx.GraphModule, layout: TileLayout, lower: Lower) -> None:
        self.layout = layout
        module = split_products(body, layout)
        inputs = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
        self._shapes = [tuple(value.shape) for value in inputs]
        self._by_operator = compile_graph(module, "tile")
        varies = any(isinstance(size, SYMBOLIC) for shape in self._shapes for size in shape)
        self._compiled = self._by_operator if varies else lower(module)

    def run(self, operands: Sequence[Tensor]) -> list[Tensor]:
        return [x.contiguous() for x in run_tiles(self._run_tile, self.layout, operands)]

    def run_fake(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """As `run`, for fake tensors: one tile has results of the same shapes as many."""
        whole = self.layout._replace(num_tiles=1)
        found = run_tiles(self._by_operator, whole, operands)
        return [x.new_empty(tuple(x.shape)) for x in found]

    def _run_tile(self, inputs: list[Any]) -> tuple[Any, ...]:
        is_usual = all(x.shape == shape for x, shape in zip(inputs, self._shapes, strict=True))
        return (self._compiled if is_usual else self._by_operator)(inputs)


_tiles: dict[str, _NamedTiles] = {}
"""By name: what is compiled has nothing but the name, and lives as long as the process."""


def name_tiles(module: fx.GraphModule, lower: Lower) -> fx.GraphModule:
    """A copy of a graph with its tiles called by name; `module` itself, if it has none."""
    if not module.graph.find_nodes(op="call_function", target=tiled_p):
        return module
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.target is not tiled_p:
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
            continue
        _, layout, *operands = node.args
        name = f"tiles_{uuid.uuid4().hex}"  # no other process has it: caches do not mix them up
        _tiles[name] = _NamedTiles(body_of(node), layout, lower)
        call = graph.call_function(call_tiles, (name, [nodes[o] for o in operands]))
        call.meta = dict(node.meta)
        nodes[node] = call
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    copy = fx.GraphModule(module, graph)
    copy.meta.update(module.meta)
    return copy


_library = torch.library.Library("torchremat", "FRAGMENT")
_library.define("call_tiles(str name, Tensor[] operands) -> Tensor[]")
_library.impl(
    "call_tiles",
    lambda name, operands: _tiles[name].run(operands),
    "CompositeExplicitAutograd",
)
torch.library.register_fake(
    "torchremat::call_tiles",
    lambda name, operands: _tiles[name].run_fake(operands),
    lib=_library,
)
call_tiles = torch.ops.torchremat.call_tiles.default
