"""Offloading in graphs: what may go to the host, and the nodes that take it there and back.

`copies.py` defines these nodes and shows them in graphs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchremat.autodiff.joint import Joint
from torchremat.core.accelerators import has_streams
from torchremat.graph.nodes import (
    base_of,
    call_of,
    inner_graphs_of,
    is_checkpoint,
    is_item,
    is_view,
    results_of,
)
from torchremat.graph.notes import note
from torchremat.policies.verdicts import Offloadable
from torchremat.remat.offload.copies import (
    bring_next,
    finish_copy,
    finish_fetch,
    start_copy,
    start_fetch,
    to_host,
)


class OffloadRules:
    """Values of a graph that may be offloaded: no inputs or outputs."""

    def __init__(self, joint: Joint) -> None:
        self._inputs = {memory_of(node) for node in joint.inputs}
        self._outputs = {memory_of(o) for o in joint.outputs if isinstance(o, fx.Node)}

    def why_impossible(self, node: fx.Node, verdict: Offloadable) -> str | None:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return "only dense tensors are offloaded"
        return _why_not_there(value.device, verdict)

    def why_kept(self, node: fx.Node) -> str | None:
        memory = memory_of(node)
        if memory in self._outputs:
            return "it is an output, which the caller holds"
        return "it lies in the memory of an input" if memory in self._inputs else None


def _why_not_there(device: torch.device, verdict: Offloadable) -> str | None:
    if device.type not in ("cpu", "cuda") and not has_streams(device):
        return f"values on {device.type!r} are not offloaded: it has no streams, or is not here"
    src, dst = verdict.src, verdict.dst
    if dst != "pinned_host" and dst != torch.device("cpu"):
        return f"values are offloaded to 'pinned_host' or the CPU, not to {str(dst)!r}"
    if src != "device" and (isinstance(src, str) or not _is_at(device, src)):
        return f"it is on {str(device)!r}, and the policy moves values from {str(src)!r}"
    return None


def _is_at(device: torch.device, place: torch.device) -> bool:
    return device.type == place.type and place.index in (None, device.index)


Memory = tuple[Any, ...]


def memory_of(node: fx.Node) -> Memory:
    """Where the value of `node` lies: equal for what shares memory.

    An output of a checkpoint inside lies where the graph of that makes it, or in an operand.
    """
    path: list[fx.Node] = []
    while True:
        node = base_of(node)
        bodies = inner_graphs_of(call_of(node)) if is_item(node) else ()
        if len(bodies) != 1 or not is_checkpoint(call_of(node)):
            return (*path, node)
        call, index = node.args
        assert isinstance(call, fx.Node) and isinstance(index, int)
        made = base_of_output(bodies[0], index)
        if made is None:
            return (*path, node)
        if made.op == "placeholder":
            operands = call.args[1:]
            number = bodies[0].graph.find_nodes(op="placeholder").index(made)
            operand = operands[number]
            if not isinstance(operand, fx.Node):
                return (*path, node)
            node = operand
        else:
            return (*path, call, made)


def base_of_output(body: fx.GraphModule, index: int) -> fx.Node | None:
    made = results_of(body)[index]
    return base_of(made) if isinstance(made, fx.Node) else None


def put_out_copies(
    graph: fx.Graph, positions: Sequence[int], memories: Sequence[Memory], *, is_planned: bool
) -> None:
    """Let the outputs at `positions` be copies in the host's memory, made as soon as they can be.

    Those of equal `memories` share a copy. In a plan each copy is done by the end of the operator
    after the one that makes the value. So the plan knows when the memory is free.
    """
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    copies: dict[Memory, fx.Node] = {}
    nodes = list(graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    pairs = sorted(zip(positions, memories, strict=True), key=lambda p: order[results[p[0]]])
    for position, memory in pairs:
        value, first = results[position], copies.get(memory)
        if first is not None:
            after = max(first, value, key=order.__getitem__)
            copy = _insert(graph, after, to_host, value, first)
        elif is_planned:
            sending = _insert(graph, value, start_copy, value)
            order[sending] = order[value]
            later = nodes[order[value] + 1 : -1]
            after = next(filter(_is_operator, later), later[-1] if later else sending)
            copy = _insert(graph, after, finish_copy, sending)
        else:
            after = value
            copy = _insert(graph, after, to_host, value)
        order[copy] = order[after]
        copies.setdefault(memory, copy)
        results[position] = copy
    output.args = (tuple(results),)


def _insert(graph: fx.Graph, after: fx.Node, target: Callable[..., Any], *args: fx.Node) -> fx.Node:
    with graph.inserting_after(after):
        node = graph.call_function(target, args)
    node.meta = dict(args[0].meta)
    return node


def _is_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_item(node) and not is_view(node)


def fetch_copies(
    graph: fx.Graph,
    placeholders: Sequence[fx.Node],
    memories: Sequence[Memory],
    cotangents: Collection[fx.Node],
    lead: int,
    *,
    is_planned: bool = False,
) -> tuple[int, ...]:
    """Let `placeholders` be copies in the host's memory, fetched before they are read.

    Each fetch starts `lead` operators that need `cotangents` before the first reader; at the start
    of the graph if there are fewer. The positions of the latter are returned: the graph that runs
    before this one can start to fetch them.
    """
    nodes = list(graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    steps = [order[node] for node in _operators_that_need(cotangents, nodes)]
    groups: dict[Memory, list[fx.Node]] = {}
    for placeholder, memory in zip(placeholders, memories, strict=True):
        if placeholder.users:
            groups.setdefault(memory, []).append(placeholder)
    early: list[int] = []
    by_first = sorted(
        groups.values(), key=lambda g: min(order[user] for node in g for user in node.users)
    )
    for group in by_first:
        first = min(order[user] for node in group for user in node.users)
        before = [step for step in steps if step < first]
        is_late = len(before) >= lead
        where = nodes[before[-lead]] if is_late else _start(nodes)
        if not is_late:
            early.append(placeholders.index(group[0]))
        with graph.inserting_before(where):
            fetch = graph.call_function(start_fetch, (group[0], group[0].meta["val"].device))
        fetch.meta = dict(group[0].meta)
        note(fetch, phase="backward")
        _finish_fetches(graph, fetch, group, order)
    if not is_planned:  # it comes after the copies that begin there for this graph
        with graph.inserting_before(nodes[steps[-lead]] if len(steps) >= lead else _start(nodes)):
            start = graph.call_function(bring_next)
            start.meta["val"] = None
            note(start, phase="backward")
    return tuple(early)


def _finish_fetches(
    graph: fx.Graph, fetch: fx.Node, group: Sequence[fx.Node], order: Mapping[fx.Node, int]
) -> None:
    for i, placeholder in enumerate(group):
        users = [user for user in placeholder.users if user in order]
        with graph.inserting_before(min(users, key=order.__getitem__)):
            value = graph.call_function(finish_fetch, (fetch, placeholder) if i else (fetch,))
        value.meta = dict(placeholder.meta)
        note(value, phase="backward")
        for user in users:
            user.replace_input_with(placeholder, value)


def _start(nodes: Sequence[fx.Node]) -> fx.Node:
    return next(node for node in nodes if node.op != "placeholder")


def _operators_that_need(given: Collection[fx.Node], nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The operators that read one of `given`, or what was computed of it, in order; no views."""
    found = set(given)
    operators = []
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
            if _is_operator(node):
                operators.append(node)
    return operators
