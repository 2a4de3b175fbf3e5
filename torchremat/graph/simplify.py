"""Take operators out of a graph that change nothing, neither a value nor how it lies in memory."""

import torch
from torch import fx

aten = torch.ops.aten


def simplify(graph: fx.Graph) -> None:
    """Remove transposes of transposes: a backward pass has two for each `nn.Linear`.

    u = t(w);  v = t(u)     v is w, strides and all
    """
    for node in graph.find_nodes(op="call_function", target=aten.t.default):
        inner = node.args[0]
        if isinstance(inner, fx.Node) and inner.target is aten.t.default:
            source = inner.args[0]
            assert isinstance(source, fx.Node)
            node.replace_all_uses_with(source)
    for node in reversed(list(graph.nodes)):
        if node.target is aten.t.default and not node.users:
            graph.erase_node(node)
