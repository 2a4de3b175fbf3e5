"""Specialise a joint graph with symbolic sizes to given sizes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.joint import Joint
from torchremat.graph.nodes import attribute
from torchremat.graph.notes import note_graph
from torchremat.graph.symbolic_sizes import Size, Sizes, value_of


def specialize_joint(joint: Joint, sizes: Sizes) -> tuple[Joint, Mapping[fx.Node, fx.Node]]:
    """The joint graph at `sizes`, and the node in it for each node of `joint`."""
    module, nodes = _Specializer(sizes).module(joint.module)

    def translate(entries: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(nodes[e] if isinstance(e, fx.Node) else e for e in entries)

    return (
        Joint(
            module,
            translate(joint.inputs),
            translate(joint.outputs),
            tuple((i, nodes[value]) for i, value in joint.mutations),
            translate(joint.cotangents),
            translate(joint.gradients),
            joint.opened,
            parts=tuple((i, nodes[value]) for i, value in joint.parts),
        ),
        nodes,
    )


class _Specializer:
    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.fake_mode = _torch.new_fake_mode()

    def module(self, module: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
        graph = fx.Graph()
        nodes: dict[fx.Node, fx.Node] = {}
        attributes: dict[str, Any] = {}
        for node in module.graph.nodes:
            copy = nodes[node] = graph.node_copy(node, nodes.__getitem__)
            copy.args = fx.node.map_aggregate(copy.args, self._number)
            copy.kwargs = fx.node.map_aggregate(copy.kwargs, self._number)
            if "val" in node.meta:
                copy.meta["val"] = _torch.tree_map(self._value, node.meta["val"])
            if node.op == "get_attr":
                held = attribute(module, str(node.target))
                if isinstance(held, fx.GraphModule):
                    body = self.module(held)[0]
                    body.meta = dict(held.meta)
                    note_graph(body, runner=None)
                    held = body
                attributes[str(node.target)] = held
        return fx.GraphModule(attributes, graph), nodes

    def _number(self, value: Any) -> Any:
        return value.at(self.sizes) if isinstance(value, Size) else value

    def _value(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value_of(value, self.sizes)
        shape = [value_of(size, self.sizes) for size in value.shape]
        stride = [value_of(size, self.sizes) for size in value.stride()]
        with self.fake_mode:
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
