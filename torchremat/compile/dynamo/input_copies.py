"""Copies in AOTAutograd's joint graph: those that are in the way, and those that are missing.

What a function writes to an input is in its joint graph as a new value, which is copied to the
input at the end, or by whoever runs the graph. What is computed again in the backward pass would
find the new value, where the forward pass found the old one.
"""

from collections.abc import Callable, Iterator

import torch
from torch import fx

from torchremat import _torch
from torchremat.graph.aliasing import lies_alike
from torchremat.graph.nodes import base_of, call_of, is_view
from torchremat.graph.notes import note

aten = torch.ops.aten


def find_written_inputs(module: fx.GraphModule) -> list[fx.Node]:
    """The inputs that the function writes to, by itself or by who runs the graph."""
    inside = [node.args[0] for node in module.graph.nodes if writes_input(node)]
    return list(dict.fromkeys([*_torch.written_inputs(module).values(), *inside]))


def writes_input(node: fx.Node) -> bool:
    """Whether `node` writes to an input: what a compiler is left to write is at the end."""
    return node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder"  # type: ignore[union-attr]


def copy_written_inputs(module: fx.GraphModule) -> tuple[fx.Node, ...]:
    """Let all read copies of inputs that are written to, which are kept if one is needed."""
    copies = []
    hidden = {n.args[0] for n in module.graph.nodes if writes_input(n) and not _is_pointwise(n)}
    for node in find_written_inputs(module):
        if any(user.op != "output" and not writes_input(user) for user in node.users):
            copy = _copy_of(node, torch.ops.torchremat.copied if node in hidden else aten.clone)
            copy.meta["recompute"] = _torch.MUST_SAVE
            copies.append(copy)
    return tuple(copies)


def drop_copies_for(graph: fx.Graph, is_late: Callable[[fx.Node], bool]) -> None:
    """Take out copies of inputs that are written to which nothing reads that `is_late`."""
    for target in (torch.ops.torchremat.copied.default, aten.clone.default):
        for node in graph.find_nodes(op="call_function", target=target):
            source = node.args[0]
            is_ours = source.op == "placeholder" and node.meta.get("recompute") == _torch.MUST_SAVE
            if is_ours and not any(u.op == "output" or is_late(u) for u in _readers(node)):
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads `node`, also through views."""
    for user in node.users:
        yield user
        if is_view(user):
            yield from _readers(user)


def _is_pointwise(write: fx.Node) -> bool:
    """Whether what is written to an input is computed element by element.

    Inductor 2.13 else lets an operator that scatters, or that a user wrote, work on the input
    itself, though what it was before, or the result, is kept for the backward pass: unless it is
    given a copy by an operator that inductor does not know.
    """
    value = write.args[1]
    target = call_of(value).target if isinstance(value, fx.Node) else None
    return isinstance(target, _torch.OpOverload) and torch.Tag.pointwise in target.tags


_library = torch.library.Library("torchremat", "FRAGMENT")
_library.define("copied(Tensor x) -> Tensor")
_library.impl("copied", torch.clone, "CompositeExplicitAutograd")


_WHERE_IT_IS_READ = {"nn_module_stack", "stack_trace"}


def _copy_of(node: fx.Node, copy_op: _torch.OpOverloadPacket) -> fx.Node:
    """A copy of an input, which all read in its place."""
    last = node.graph.find_nodes(op="placeholder")[-1]
    with node.graph.inserting_after(last):
        copy = node.graph.call_function(copy_op.default, (node,))
    copy.meta = {"val": node.meta["val"], "partitioner_tag": "is_forward"}
    note(copy, phase="forward")
    users = [u for u in node.users if u is not copy and u.op != "output" and not writes_input(u)]
    for key in _WHERE_IT_IS_READ.intersection(users[0].meta):
        copy.meta[key] = users[0].meta[key]
    for user in users:
        user.replace_input_with(node, copy)
    return copy


def drop_copies(graph: fx.Graph) -> None:
    """Take out copies that lie in memory as what they are copies of: a dropout of 0 makes one.

    Nothing that is computed in a joint graph is written to. Copies of outputs and copies that are
    outputs stay, and so do views of them: whoever is given both may write to one.
    """
    (output,) = graph.find_nodes(op="output")
    given = {base_of(node) for node in output.all_input_nodes}
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if (
            source.op != "placeholder"
            and lies_alike(node, source)
            and given.isdisjoint((node, base_of(source)))
        ):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
