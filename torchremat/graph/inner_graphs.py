"""The graphs inside a graph: what `torch.cond`, `scan` and a checkpoint run."""

from torch import fx

from torchremat import _torch


def inner_graphs_of(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a call of a higher-order operator is given; none for other nodes."""
    if node.op != "call_function" or isinstance(node.target, _torch.OpOverload):
        return []
    module = node.graph.owning_module
    references = (a for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr")
    found = (getattr(module, str(reference.target), None) for reference in references)
    return [graph for graph in found if isinstance(graph, fx.GraphModule)]
