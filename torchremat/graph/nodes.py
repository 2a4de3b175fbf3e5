"""The graphs inside a graph: what `torch.cond`, `scan` and a checkpoint run."""

import operator
from typing import Any

import torch
from torch import fx, nn

from torchremat import _torch


def inner_graphs_of(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a call of a higher-order operator is given; none for other nodes."""
    if node.op != "call_function" or isinstance(node.target, _torch.OpOverload):
        return []
    module = node.graph.owning_module
    references = (a for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr")
    found = (getattr(module, str(reference.target), None) for reference in references)
    return [graph for graph in found if isinstance(graph, fx.GraphModule)]


def is_forward(node: fx.Node) -> bool:
    """Whether the function itself, and not its derivative, runs the operator `node`."""
    return (
        node.op in ("call_function", "get_attr") and node.meta.get("phase", "forward") == "forward"
    )


aten = torch.ops.aten


# They share memory with their input, though their schemas do not say so.
_UNDECLARED_VIEWS = {
    aten._unsafe_view.default,
    aten.lift_fresh.default,
    aten._reshape_alias.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}


def is_view(node: fx.Node) -> bool:
    """Whether `node` computes nothing: its outputs lie in the memory of its first argument."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    if is_identity(node) or node.target in _UNDECLARED_VIEWS:
        return True
    if not isinstance(node.target, _torch.OpOverload):
        return False
    schema = node.target._schema
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def base_of(node: fx.Node) -> fx.Node:
    """The value in whose memory `node` lies: itself, unless it is a view.

    With `t = transpose(w)` and `s = select(t, 0)`, the base of `s` is `w`.
    """
    while is_view(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def is_item(node: fx.Node) -> bool:
    """Whether `node` takes one output of an operator that has several."""
    return node.op == "call_function" and node.target is operator.getitem


def call_of(node: fx.Node) -> fx.Node:
    """The call of an operator that computes the value `node`."""
    if is_item(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source
    return node


def results_of(module: fx.GraphModule) -> list[Any]:
    """What the graph of `module` gives."""
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0])


def is_identity(node: fx.Node) -> bool:
    """Whether `node` hands its input on: it has a meaning for transformations, none at run time."""
    return getattr(node.target, "is_identity", False) or node.target in _IDENTITIES


_IDENTITIES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


def attribute(module: nn.Module, name: str) -> Any:
    """What a `get_attr` node with target `name` means."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def is_staged_residual(node: fx.Node) -> bool:
    """Whether `node` is what a checkpoint inside keeps by its own policy, when it is replayed."""
    if not is_item(node):
        return False
    call = node.args[0]
    assert isinstance(call, fx.Node)
    return "twin_of" in call.meta and node.args[1] >= call.meta["num_outputs"]


def _body(node: fx.Node) -> fx.GraphModule:
    (body,) = inner_graphs_of(node)
    return body
