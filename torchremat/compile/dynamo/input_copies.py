"""Copies in AOTAutograd's joint graph: redundant ones are dropped, missing ones are added.

A joint graph has a write to an input as a new value. The graph, or whoever runs it, copies that to
the input at the end of the forward pass. A recomputed operator would then read the new value, where
the forward pass read the old one: it needs a copy.
"""

from collections.abc import Callable, Iterator

import torch
from torch import fx

from torchremat import _torch
from torchremat.graph.aliasing import lies_alike
from torchremat.graph.nodes import base_of, call_of, is_view
from torchremat.graph.notes import note

aten = torch.ops.aten

# the module and the line of a copy are read from these, as `build_joint` does of any operator
_KEYS_OF_READER = {"nn_module_stack", "stack_trace"}

# a copy by an operator that inductor does not know: see `_is_pointwise`
_library = torch.library.Library("torchremat", "FRAGMENT")
_library.define("copied(Tensor x) -> Tensor")
_library.impl("copied", torch.clone, "CompositeExplicitAutograd")


def find_written_inputs(module: fx.GraphModule) -> list[fx.Node]:
    """The inputs that the function writes to, in the graph or through whoever runs it."""
    inside = [node.args[0] for node in module.graph.nodes if writes_input(node)]
    return list(dict.fromkeys([*_torch.find_written_inputs(module).values(), *inside]))


def writes_input(node: fx.Node) -> bool:
    """Whether `node` writes to an input: such writes end a graph that a compiler runs."""
    return node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder"  # type: ignore[union-attr]


def copy_written_inputs(module: fx.GraphModule) -> tuple[fx.Node, ...]:
    """Let operators read a copy of each input that is written to; a needed copy is saved."""
    copies = []
    hidden = {n.args[0] for n in module.graph.nodes if writes_input(n) and not _is_pointwise(n)}
    for node in find_written_inputs(module):
        if any(user.op != "output" and not writes_input(user) for user in node.users):
            copy = _copy_of(node, torch.ops.torchremat.copied if node in hidden else aten.clone)
            copy.meta["recompute"] = _torch.MUST_SAVE
            copies.append(copy)
    return tuple(copies)


def drop_copies_for(graph: fx.Graph, is_late: Callable[[fx.Node], bool]) -> None:
    """Take out our copies of inputs that neither an output nor a late operator reads."""
    for target in (torch.ops.torchremat.copied.default, aten.clone.default):
        for node in graph.find_nodes(op="call_function", target=target):
            source = node.args[0]
            is_ours = source.op == "placeholder" and node.meta.get("recompute") == _torch.MUST_SAVE
            if is_ours and not any(u.op == "output" or is_late(u) for u in _readers(node)):
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        yield user
        if is_view(user):
            yield from _readers(user)


def _is_pointwise(write: fx.Node) -> bool:
    """Whether the value that is written to an input is computed element by element.

    Inductor 2.13 runs any other operator, one that scatters or a user's own, in place on the input.
    It does so even if the backward pass needs the old value or the result. It does not where the
    operator reads a copy by an operator that inductor does not know.
    """
    value = write.args[1]
    target = call_of(value).target if isinstance(value, fx.Node) else None
    return isinstance(target, _torch.OpOverload) and torch.Tag.pointwise in target.tags


def _copy_of(node: fx.Node, copy_op: _torch.OpOverloadPacket) -> fx.Node:
    """A copy of the input `node`; all operators read the copy from now on."""
    last = node.graph.find_nodes(op="placeholder")[-1]
    with node.graph.inserting_after(last):
        copy = node.graph.call_function(copy_op.default, (node,))
    copy.meta = {"val": node.meta["val"], "partitioner_tag": "is_forward"}
    note(copy, phase="forward")
    users = [u for u in node.users if u is not copy and u.op != "output" and not writes_input(u)]
    copy.meta |= {k: v for k, v in users[0].meta.items() if k in _KEYS_OF_READER}
    for user in users:
        user.replace_input_with(node, copy)
    return copy


def drop_copies(graph: fx.Graph) -> None:
    """Drop copies with the layout of the original: a dropout of 0 makes one.

    Nothing writes to a value that a joint graph computes. Copies of outputs and copies that are
    outputs stay, and so do views of them: a caller that gets both may write to one.
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
