"""A graph for a compiler: the body of each checkpoint stands in its place.

    y = remat_p[sin] x                      y = sin(x)
    g = remat_p[sin, cos, mul] x, ct        z = sin(x);  c = cos(z);  g = mul(ct, c)

Without the boundary a compiler sees that z is y, may compute it once, and then saves it: nothing is
rematerialised. `prevent_cse` says of each input of a checkpoint whether the values that are
recomputed from it must stay unmerged.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from torchremat import _torch
from torchremat.graph.nodes import attribute, is_checkpoint, is_item
from torchremat.graph.notes import notes_of


def inline_bodies(module: fx.GraphModule) -> fx.GraphModule:
    """Replace checkpoints by their bodies, and merge across these where `prevent_cse=False`."""
    if not any(is_checkpoint(node) for node in module.graph.nodes):
        return module
    inliner = _Inliner()
    placeholders = module.graph.find_nodes(op="placeholder")
    inputs = [inliner.graph.node_copy(node) for node in placeholders]
    inliner.graph.output(tuple(inliner.copy(module, inputs)))
    graph = _torch.merge_alike(inliner.graph)
    for node in graph.find_nodes(op="call_function", target=merge_barrier):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    flat = fx.GraphModule(inliner.attributes, graph)
    flat.meta = dict(module.meta)
    return flat


def merge_barrier(x: Any) -> Any:
    """Return `x` as a value of its own, so that its readers do not merge with readers of `x`."""
    return x


class _Inliner:
    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}

    def copy(self, module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        env: dict[fx.Node, Any] = {}
        remaining = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(remaining)
            elif node.op == "output":
                return list(fx.node.map_arg(node.args[0], env.__getitem__))
            elif node.op == "get_attr":
                if not all(is_checkpoint(user) for user in node.users):
                    env[node] = self._copy_attribute(module, node)
            elif is_checkpoint(node):
                reference, *operands = node.args
                assert isinstance(reference, fx.Node)
                body = attribute(module, str(reference.target))
                given = [env.get(o) if isinstance(o, fx.Node) else o for o in operands]
                inner = body.graph.find_nodes(op="placeholder")
                pairs = zip(given, inner, strict=True)
                env[node] = self.copy(body, [self._add_barrier(*pair) for pair in pairs])
            elif is_item(node) and isinstance(env[node.args[0]], list):
                env[node] = env[node.args[0]][node.args[1]]
            else:
                env[node] = self.graph.node_copy(node, env.__getitem__)
        raise AssertionError("a graph has an output")

    def _add_barrier(self, value: Any, inner: fx.Node) -> Any:
        if not notes_of(inner).is_kept_apart or not isinstance(value, fx.Node):
            return value
        copy = self.graph.call_function(merge_barrier, (value,))
        copy.meta = dict(value.meta)
        return copy

    def _copy_attribute(self, module: fx.GraphModule, node: fx.Node) -> fx.Node:
        name = f"constant_{len(self.attributes)}"
        self.attributes[name] = attribute(module, str(node.target))
        copy = self.graph.get_attr(name)
        copy.meta = dict(node.meta)
        return copy
