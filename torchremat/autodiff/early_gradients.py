"""Gradients that go no further are computed first, so that activations are freed sooner.

    dx = mm(dy, w)                 dw = mm(t(dy), x)      frees x
    dw = mm(t(dy), x)     ->       dx = mm(dy, w)         frees dy

Autograd computes the gradient of an operator's first operand first. So `x` and `dx` are alive
together, and where `x` is recomputed, `dx` waits while that runs. In the other order neither is so.
Each operator computes the same numbers.
"""

from collections.abc import Sequence

import torch
from torch import fx

from torchremat import _torch
from torchremat.graph.nodes import base_of, is_forward, is_item, is_view, nodes_read_by
from torchremat.graph.ops import communicates


def order_gradients_early(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a joint graph; those that only one gradient needs come as early as is good.

    Such an operator moves before another that would free nothing by then. So no more than before is
    alive beside either of them, whatever the sizes are. Results are in the order that they had.
    """
    order = _Order(graph)
    for node in order.find_ends():
        order.move_up(node)
    return order.nodes


class _Order:
    """The order of a graph's nodes, and for each value the operators of the backward pass."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.place = {node: float(i) for i, node in enumerate(self.nodes)}
        self.readers: dict[fx.Node, set[fx.Node]] = {}
        self.values = {n: _values_read_by(n) for n in self.nodes if _computes(n)}
        for node, values in self.values.items():
            for value in values:
                self.readers.setdefault(value, set()).add(node)
        self.result = _find_only_results(self.nodes)

    def find_ends(self) -> list[fx.Node]:
        return [n for n in self.values if self.result[n] is not None and _is_movable(n)]

    def move_up(self, node: fx.Node) -> None:
        """Move `node` up, and with it the views that it reads."""
        end = int(self.place[node])
        block = [node]
        passed: list[fx.Node] = []
        for before in map(self.nodes.__getitem__, range(end - 1, -1, -1)):
            is_read = any(before in member.all_input_nodes for member in block)
            if is_read and is_view(before):
                block.insert(0, before)
            elif _is_result(before) and any(map(_is_result, block)):
                break  # hooks run in this order
            elif not is_read and self._may_swap(before, node):
                passed.insert(0, before)
                self.place[node] = self.place[before] - 0.5  # between it and the one before
            else:
                break
        start = end + 1 - len(block) - len(passed)
        self.nodes[start : end + 1] = [*block, *passed]
        for i in range(start, end + 1):
            self.place[self.nodes[i]] = i

    def _may_swap(self, before: fx.Node, node: fx.Node) -> bool:
        if not _is_movable(before):
            return False
        if before not in self.values:
            return True
        if self._list_freed(before, node):
            return False
        return self.result[before] is None or bool(self._list_freed(node, before))

    def _list_freed(self, node: fx.Node, other: fx.Node) -> list[fx.Node]:
        """The values that `node` is the last to read, of those that `other` does not read."""
        place = self.place.__getitem__
        values = [value for value in self.values[node] if other not in self.readers[value]]
        return [value for value in values if max(self.readers[value], key=place) is node]


def _find_only_results(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node | None]:
    """For each node the result that it is computed for, `None` if there is more than one."""
    found: dict[fx.Node, fx.Node | None] = {}
    for node in reversed(nodes):
        results = {node if user.op == "output" else found[user] for user in node.users}
        found[node] = results.pop() if len(results) == 1 else None
    return found


def _is_movable(node: fx.Node) -> bool:
    """Whether it is an operator of the backward pass that does nothing but return values."""
    if node.op != "call_function" or is_forward(node):
        return False
    if is_item(node):
        return True
    if not isinstance(node.target, _torch.OpOverload) or communicates(node.target, node.kwargs):
        return False
    is_random = torch.Tag.nondeterministic_seeded in node.target.tags
    return not is_random and not _torch.schema_of(node.target).is_mutable


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and not (is_forward(node) or is_item(node) or is_view(node))


def _values_read_by(node: fx.Node) -> list[fx.Node]:
    """The values that are freed after their last reader: no inputs, constants or results."""
    bases = dict.fromkeys(map(base_of, nodes_read_by(node)))
    return [base for base in bases if base.op == "call_function" and not _is_result(base)]


def _is_result(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)
