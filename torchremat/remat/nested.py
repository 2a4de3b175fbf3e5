"""Checkpoints within a checkpoint: the outer policy decides what the forward pass keeps.

In the joint graph of the outer function a checkpoint inside it is two calls of `remat_p`:

    y, r  = remat_p(forward, x)             outputs y, and r, which its own policy keeps
    dx    = remat_p(backward, x, r, dy)

Let the outer policy keep s, a value inside. Then the call is opened into one that the forward pass
runs, one that its replay in the backward pass runs, and a backward that reads s as well:

    y, s  = remat_p(known, x)
    y, r  = remat_p(staged, x, s)
    dx    = remat_p(backward', x, r, dy, s)

What neither keeps is computed once more for y and once more for dx, as in JAX.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch import fx

from torchremat.autodiff.joint import Joint, is_forward
from torchremat.graph.aliases import is_item
from torchremat.graph.slicing import slice_graph

if TYPE_CHECKING:
    from torchremat.remat.program import FunctionProgram

KeptInside = Callable[["FunctionProgram", str], tuple[fx.Node, ...]]
"""What the outer policy keeps of a checkpoint inside, which a module of that name ran."""


def expose_inner(joint: Joint, kept_inside: KeptInside) -> Joint:
    """`joint` with the checkpoints inside it opened, where `kept_inside` keeps something."""
    calls = _calls(joint)
    kept = {
        number: values
        for number, (forward, backwards) in calls.items()
        if backwards and (values := kept_inside(_program(forward), forward.meta["module"] or ""))
    }
    if not kept:
        return joint
    joint = _copied(joint)
    calls = _calls(joint)
    for number, values in kept.items():
        forward, backwards = calls[number]
        items = _open_forward(forward, values)
        for backward in backwards:
            _extend_backward(backward, values, items)
    joint.module.recompile()
    return joint


def is_staged_residual(node: fx.Node) -> bool:
    """Whether `node` is what a checkpoint inside keeps by its own policy, when it is replayed."""
    if not is_item(node):
        return False
    call = node.args[0]
    assert isinstance(call, fx.Node)
    return "twin_of" in call.meta and node.args[1] >= call.meta["num_outputs"]


def prune_bodies(module: fx.GraphModule) -> None:
    """Let each checkpoint inside compute only those of its outputs that somebody reads."""
    graph = module.graph
    for node in list(graph.nodes):
        if not hasattr(node.target, "runner_of"):
            continue
        body = _body(node)
        (output,) = body.graph.find_nodes(op="output")
        results = output.args[0]
        used = {item.args[1] for item in node.users}
        if all(i in used or not isinstance(r, fx.Node) for i, r in enumerate(results)):
            continue
        wanted = [r if i in used else None for i, r in enumerate(results)]
        inputs = body.graph.find_nodes(op="placeholder")
        pruned = slice_graph(body, inputs, wanted)
        pruned.meta.update(program=body.meta.get("program"))
        with graph.inserting_before(node):
            node.args = (_reference(graph, pruned, node), *node.args[1:])
    graph.eliminate_dead_code()


def join_exposed(forward: fx.GraphModule) -> None:
    """In a forward graph, let the call that keeps values also give the outputs."""
    graph = forward.graph
    known = {n.meta["twin"]: n for n in graph.nodes if "twin" in n.meta and not is_item(n)}
    for node in list(graph.nodes):
        twin = known.get(node.meta.get("twin_of"))
        if twin is None or is_item(node):
            continue
        for item in list(node.users):
            if item.args[1] < node.meta["num_outputs"]:
                item.args = (twin, item.args[1])
    graph.eliminate_dead_code()


def _calls(joint: Joint) -> dict[int, tuple[fx.Node, list[fx.Node]]]:
    """The calls of checkpoints inside: what runs forward, and what runs backward."""
    found: dict[int, tuple[fx.Node, list[fx.Node]]] = {}
    for node in joint.module.graph.nodes:
        number = node.kwargs.get("call")
        if number is None or not hasattr(node.target, "runner_of"):
            continue
        if is_forward(node) and _program(node).known == ():
            found[number] = (node, [])
        elif not is_forward(node) and number in found:
            found[number][1].append(node)
    return {n: call for n, call in found.items() if hasattr(_program(call[0]), "choices")}


def _body(node: fx.Node) -> fx.GraphModule:
    module = node.graph.owning_module
    assert module is not None
    reference = node.args[0]
    assert isinstance(reference, fx.Node)
    body = getattr(module, str(reference.target))
    assert isinstance(body, fx.GraphModule)
    return body


def _program(node: fx.Node) -> Any:
    return _body(node).meta["program"]


def _copied(joint: Joint) -> Joint:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(joint.module.graph, copies)
    graph.output(result)
    module = fx.GraphModule(joint.module, graph)

    def copied(value: Any) -> Any:
        return copies[value] if isinstance(value, fx.Node) else value

    return replace(
        joint,
        opened=True,
        module=module,
        inputs=tuple(map(copied, joint.inputs)),
        outputs=tuple(map(copied, joint.outputs)),
        mutations=tuple((i, copied(value)) for i, value in joint.mutations),
        cotangents=tuple(map(copied, joint.cotangents)),
        gradients=tuple(map(copied, joint.gradients)),
    )


def _open_forward(forward: fx.Node, values: Sequence[fx.Node]) -> list[fx.Node]:
    """Put the known call before `forward`, make that the staged one; return the kept values."""
    program: FunctionProgram = _program(forward)
    joint = program.region.joint
    outputs = [o for o in joint.outputs if isinstance(o, fx.Node)]
    operands = forward.args[1:]
    known = slice_graph(joint.module, joint.inputs, [*outputs, *values])
    staged = slice_graph(joint.module, [*joint.inputs, *values], [*outputs, *program.residuals])
    graph = forward.graph
    with graph.inserting_before(forward):
        call = graph.call_function(
            cast(Any, forward.target), (_reference(graph, known, forward), *operands)
        )
        call.meta = dict(forward.meta, twin=forward.name)
        call.meta["val"] = (
            *forward.meta["val"][: len(outputs)],
            *(value.meta["val"] for value in values),
        )
        items = []
        for i, value in enumerate(values):
            item = graph.call_function(operator.getitem, (call, len(outputs) + i))
            item.meta = dict(value.meta, phase="forward")
            items.append(item)
        forward.args = (_reference(graph, staged, forward), *operands, *items)
    forward.meta.update(twin_of=forward.name, num_outputs=len(outputs))
    return items


def _extend_backward(
    backward: fx.Node, values: Sequence[fx.Node], items: Sequence[fx.Node]
) -> None:
    """Let `backward` read the kept values too."""
    body = _body(backward)
    program: FunctionProgram = body.meta["program"]
    joint, inputs, wanted = body.meta["slice"]
    if joint is not program.region.joint:
        return  # some outputs have no cotangent: the graph of another trace
    extended = slice_graph(joint.module, [*inputs, *values], wanted, late=is_forward)
    operands = _drop_unread(extended, [*backward.args[1:], *items])
    graph = backward.graph
    with graph.inserting_before(backward):
        reference = _reference(graph, extended, backward)
    backward.args = (reference, *operands)


def _drop_unread(body: fx.GraphModule, operands: Sequence[Any]) -> list[Any]:
    """Take the inputs that nothing in `body` reads out of it; the operands that are left."""
    left = []
    inputs = body.graph.find_nodes(op="placeholder")
    for placeholder, operand in zip(list(inputs), operands, strict=True):
        if placeholder.users:
            left.append(operand)
        else:
            body.graph.erase_node(placeholder)
    body.recompile()
    return left


def _reference(graph: fx.Graph, body: fx.GraphModule, like: fx.Node) -> fx.Node:
    module = graph.owning_module
    assert module is not None
    number = 0
    while hasattr(module, name := f"opened_{number}"):
        number += 1
    module.add_module(name, body)
    node = graph.get_attr(name)
    node.meta = {key: like.meta.get(key) for key in ("phase", "module", "source")}
    return node
