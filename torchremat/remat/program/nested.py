"""Checkpoints within a checkpoint: the outer policy decides what the forward pass saves.

In the joint graph of the outer function a checkpoint inside it is two calls of `remat_p`:

    y, r  = remat_p(forward, x)             outputs y, and r, which its own policy saves
    dx    = remat_p(backward, x, r, dy)

Let the outer policy save s, a value inside. Then the call becomes three: one that the forward pass
runs, one that its replay in the backward pass runs, and a backward that also reads s.

    y, s  = remat_p(known, x)
    y, r  = remat_p(staged, x, s)
    dx    = remat_p(backward', x, r, dy, s)

What neither saves is recomputed once for y and once for dx, as in JAX. A checkpoint within the one
inside is opened first, for the policies of both.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from torch import fx

from torchremat.autodiff.joint import Joint
from torchremat.autodiff.replay_rules import draws_in_forward
from torchremat.autodiff.rewrites.encodings import decode_in
from torchremat.autodiff.rewrites.matched_values import find_codes, match_values
from torchremat.graph.nodes import body_of, is_checkpoint, is_forward, is_item, item_index
from torchremat.graph.notes import graph_notes_of, note, notes_of
from torchremat.graph.slicing import add_body_like, erase_unread, slice_graph
from torchremat.remat.program.decisions import PolicyDecisions
from torchremat.remat.program.region import Region


class NestedProgram(Protocol):
    """The parts of a program that the checkpoint around it reads, to open it."""

    region: Region
    root_joint: Joint
    known_values: tuple[fx.Node, ...]
    decisions: PolicyDecisions


@dataclass(frozen=True)
class NestedSplit:
    """How to open a checkpoint inside.

    In its `joint` graph the checkpoints within it are open already. Of its values the outer policy
    saves `residuals`, and its own policy saves `own_residuals` while it is replayed.
    """

    joint: Joint
    residuals: tuple[fx.Node, ...]
    own_residuals: tuple[fx.Node, ...]


FindSplit = Callable[[NestedProgram, str], NestedSplit | None]
"""Says how to open a checkpoint inside, which a module of that name ran; `None`: not at all."""


def open_nested(joint: Joint, find_split: FindSplit) -> Joint:
    """`joint` with those checkpoints inside it opened of which the outer policy saves a value."""
    openings = {
        number: find_split(_program_of(forward), notes_of(forward).module or "")
        for number, (forward, _) in _calls(joint).items()
    }
    if not any(openings.values()):
        return joint
    joint = _copy(joint)
    for number, (forward, backwards) in _calls(joint).items():
        split = openings.get(number)
        if split is not None:
            kept, own = _open_forward(forward, split)
            for backward in backwards:
                _open_backward(backward, forward, split, [*own, *kept])
    written = {value for _, value in joint.mutations}
    erase_unread(joint.module.graph, lambda node: node in written or draws_in_forward(node))
    joint.module.recompile()
    return joint


def rejoin_opened(forward: fx.GraphModule) -> None:
    """In a forward graph, let the known half of a checkpoint also return the outputs."""
    graph = forward.graph
    known = {notes_of(n).known_half_of: n for n in graph.nodes if not is_item(n)}
    known.pop(None, None)
    for node in list(graph.nodes):
        notes = notes_of(node)
        known_half = known.get(notes.staged_half_of)
        if known_half is None or is_item(node):
            continue
        for item in list(node.users):
            if item_index(item) < (notes.num_outputs or 0):
                item.args = (known_half, item_index(item))
    erase_unread(
        graph, lambda node: draws_in_forward(node) and notes_of(node).staged_half_of is None
    )


def _calls(joint: Joint) -> dict[int, tuple[fx.Node, list[fx.Node]]]:
    found: dict[int, tuple[fx.Node, list[fx.Node]]] = {}
    for node in joint.module.graph.nodes:
        number = node.kwargs.get("call")
        if number is None or not is_checkpoint(node):
            continue
        program = _program_of(node)
        if program is None:  # mapped over an axis: as it is, under its own policy
            continue
        if is_forward(node) and program.known_values == ():
            found[number] = (node, [])
        elif not is_forward(node) and number in found:
            found[number][1].append(node)
    return {n: call for n, call in found.items() if hasattr(_program_of(call[0]), "decisions")}


def _program_of(node: fx.Node) -> Any:
    return graph_notes_of(body_of(node)).program


def _copy(joint: Joint) -> Joint:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(joint.module.graph, copies)
    graph.output(result)
    module = fx.GraphModule(joint.module, graph)

    def copy_of(value: Any) -> Any:
        return copies[value] if isinstance(value, fx.Node) else value

    return replace(
        joint,
        opened=True,
        module=module,
        inputs=tuple(map(copy_of, joint.inputs)),
        outputs=tuple(map(copy_of, joint.outputs)),
        mutations=tuple((i, copy_of(value)) for i, value in joint.mutations),
        cotangents=tuple(map(copy_of, joint.cotangents)),
        gradients=tuple(map(copy_of, joint.gradients)),
        parts=tuple((i, copy_of(value)) for i, value in joint.parts),
    )


def _open_forward(forward: fx.Node, split: NestedSplit) -> tuple[list[fx.Node], list[fx.Node]]:
    """Put the known call before `forward`, make that the staged one; what either keeps."""
    joint = split.joint
    outputs = [o for o in joint.outputs if isinstance(o, fx.Node)]
    outputs += [value for _, value in joint.mutations]
    values = forward.meta["val"][: len(outputs)]
    operands = forward.args[1:]
    results = [*outputs, *split.residuals]
    known = slice_graph(joint.module, joint.inputs, results, always_run=draws_in_forward)
    staged = slice_graph(
        joint.module, [*joint.inputs, *split.residuals], [*outputs, *split.own_residuals]
    )
    graph = forward.graph
    with graph.inserting_before(forward):
        call = graph.call_function(
            cast(Any, forward.target), (add_body_like(forward, known), *operands)
        )
        call.meta = dict(forward.meta)
        note(call, known_half_of=forward.name, num_outputs=len(outputs))
        call.meta["val"] = (*values, *(node.meta["val"] for node in split.residuals))
        kept = _items(call, len(outputs), split.residuals)
        forward.args = (add_body_like(forward, staged), *operands, *kept)
    note(forward, staged_half_of=forward.name, num_outputs=len(outputs))
    forward.meta["val"] = (*values, *(node.meta["val"] for node in split.own_residuals))
    with graph.inserting_after(forward):
        return kept, _items(forward, len(outputs), split.own_residuals)


def _items(call: fx.Node, start: int, values: Sequence[fx.Node]) -> list[fx.Node]:
    items = []
    for i, value in enumerate(values):
        item = call.graph.call_function(operator.getitem, (call, start + i))
        item.meta = dict(value.meta)
        note(item, phase="forward")
        items.append(item)
    return items


def _open_backward(
    backward: fx.Node, forward: fx.Node, split: NestedSplit, items: Sequence[fx.Node]
) -> None:
    """Let `backward` read the residuals of both forward calls, `items`, in place of its own."""
    body = body_of(backward)
    notes = graph_notes_of(body)
    program: NestedProgram = notes.program
    assert notes.cut is not None
    joint, _, wanted = notes.cut
    values = [*split.own_residuals, *split.residuals]
    if joint is program.root_joint:
        gradients = dict(zip(joint.gradients, split.joint.gradients, strict=True))
        pairs = zip(joint.parts, split.joint.parts, strict=True)
        gradients |= {ours: theirs for (_, ours), (_, theirs) in pairs}
        wanted = [gradients[node] if isinstance(node, fx.Node) else node for node in wanted]
        joint = split.joint
        nodes: list[fx.Node | None] = list(values)
    else:  # some outputs have no cotangent: the graph of another trace
        nodes = match_values(split.joint, joint, values, strict=False)
    known = {n: item for n, item in zip(nodes, items, strict=True) if n is not None}
    codes = {nodes[i]: value for i, value in find_codes(values, nodes).items()}
    cotangents = [ct for ct in joint.cotangents if ct is not None]
    given = backward.args[len(backward.args) - len(cotangents) :]
    opened = slice_graph(
        joint.module, [*joint.inputs, *known, *cotangents], wanted, lazy=is_forward
    )
    num_inputs = len(joint.inputs)
    inputs = opened.graph.find_nodes(op="placeholder")[num_inputs:]
    for node, placeholder in zip(known, inputs, strict=False):
        if node in codes:
            decode_in(opened.graph, placeholder, codes[node])
    operands = _drop_unread(opened, [*forward.args[1 : 1 + num_inputs], *known.values(), *given])
    graph = backward.graph
    with graph.inserting_before(backward):
        reference = add_body_like(backward, opened)
    backward.args = (reference, *operands)


def _drop_unread(body: fx.GraphModule, operands: Sequence[Any]) -> list[Any]:
    left = []
    inputs = body.graph.find_nodes(op="placeholder")
    for placeholder, operand in zip(list(inputs), operands, strict=True):
        if placeholder.users:
            left.append(operand)
        else:
            body.graph.erase_node(placeholder)
    body.recompile()
    return left
