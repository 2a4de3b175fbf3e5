"""When a graph can hand out its results, one group after another, while it still runs.

    g = mul(ct, c);  dw = mm(t(x), g);  dx = mm(g, t(w));  dv = mm(t(u), dx)
    groups (dw,), (dv,): the first is handed out after the second operator

Who is given a tensor may write to it. So one is handed out when no operator will read its memory.
An optimizer that is given the gradient `dw` may also write to `w`: whoever asks for stages says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchremat.graph.nodes import call_of, is_view, results_of
from torchremat.graph.reuse import Reuse
from torchremat.graph.write_forms import gives_new_memory

Groups = tuple[tuple[int, ...], ...]
"""Positions among the results of a graph: of those handed out first, and so on."""

Targets = tuple[tuple[int, int], ...]
"""Positions of a result and of an input: who is given the result may write to the input."""


@dataclass(frozen=True)
class Consumption:
    """Gradients that updates consume as soon as a backward graph hands them out.

    Attributes:
        groups: how the graph hands out its results.
        targets: the inputs that an update writes to.
        nbytes: for the position of each consumed result, the bytes that its update needs.
    """

    groups: Groups
    targets: Targets
    nbytes: Mapping[int, int]


def find_hand_outs(
    module: fx.GraphModule, groups: Groups, targets: Targets, reuse: Reuse
) -> Mapping[fx.Node, Sequence[int]]:
    """The groups, by number, that can be handed out after each node; none before an earlier one.

    The last group is handed out at the end.
    """
    nodes = list(module.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    results, inputs = results_of(module), module.graph.find_nodes(op="placeholder")
    released: dict[int, list[Any]] = {i: [result] for i, result in enumerate(results)}
    for result, target in targets:
        released[result].append(inputs[target])
    found: dict[fx.Node, list[int]] = {}
    latest = 0
    for number, group in enumerate(groups):
        values = [value for i in group for value in released[i]]
        ready = [_last_read(value, place, reuse) for value in values]
        is_last = number == len(groups) - 1
        latest = len(nodes) - 1 if is_last else max([latest, *ready])
        found.setdefault(nodes[latest], []).append(number)
    return found


def find_consumed(
    module: fx.GraphModule, consumption: Consumption | None, reuse: Reuse
) -> dict[fx.Node, list[tuple[fx.Node, int]]]:
    """The gradients that are consumed after each node, with the bytes of their updates.

    A gradient that is also a later result is not consumed.
    """
    if consumption is None:
        return {}
    groups, results = consumption.groups, results_of(module)
    hand_outs = find_hand_outs(module, groups, consumption.targets, reuse)
    last = {results[i]: i for group in groups for i in group}
    return {
        node: [
            (results[i], consumption.nbytes[i])
            for number in numbers
            for i in groups[number]
            if i in consumption.nbytes and isinstance(results[i], fx.Node) and last[results[i]] == i
        ]
        for node, numbers in hand_outs.items()
    }


def _last_read(value: Any, place: Mapping[fx.Node, int], reuse: Reuse) -> int:
    """The place of the last operator that reads the memory of `value`, or makes it."""
    if not isinstance(value, fx.Node):
        return 0
    root = reuse.root_of(value)
    members = {root, value, *(node for node, other in reuse.roots.items() if other is root)}
    stack, last = list(members), place[call_of(value)]
    while stack:
        member = stack.pop()
        last = max(last, place[member])
        for user in member.users:
            if user.op == "output":
                continue
            last = max(last, place[user])
            if user not in members and (is_view(user) or not gives_new_memory(user)):
                members.add(user)
                stack.append(user)
    return last


def move_results_up(module: fx.GraphModule) -> None:
    """Put the views at the ends of the results right after the last of what they read."""
    nodes = list(module.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    inputs = [node for node in nodes if node.op == "placeholder"]
    for result in results_of(module):
        views: list[fx.Node] = []
        node = result
        while isinstance(node, fx.Node) and is_view(node):
            views.append(node)
            node = node.args[0]
        for view in reversed(views):
            last = max(view.all_input_nodes, key=place.__getitem__)
            last = inputs[-1] if last.op == "placeholder" else last
            last.append(view)
            place[view] = place[last]
