"""Gradients that go no further are computed first, so that activations are freed sooner.

    dx = mm(dy, w)                 dw = mm(t(dy), x)      frees x
    dw = mm(t(dy), x)     ->       dx = mm(dy, w)         frees dy

Autograd computes the gradient of an operator's first operand first. So `x` and `dx` are alive
together, and where `x` is recomputed, `dx` waits while that runs. In the other order neither is so.
Each operator computes the same numbers.
"""

import math
from collections.abc import Sequence

import torch
from torch import fx

from torchremat import _torch
from torchremat.graph.nodes import base_of, is_forward, is_item, is_view, nodes_read_by
from torchremat.graph.ops import communicates


def run_gradients_early(graph: fx.Graph) -> None:
    """Move operators of a joint graph that only one gradient needs up, where that takes no memory.

    Such an operator moves before another that frees no more bytes than it does, and no more than
    it needs itself. Then no more than before is alive beside either of them.
    """
    order = _Order(graph)
    for node in order.find_ends():
        order.move_up(node)


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
        if passed:
            for member in block:
                passed[0].prepend(member)

    def _may_swap(self, before: fx.Node, node: fx.Node) -> bool:
        if not _is_movable(before):
            return False
        if before not in self.values:
            return True
        delayed = self._count_freed(before, node)
        if delayed > _nbytes(before):
            return False
        gain = self._count_freed(node, before) - delayed
        return gain > 0 or (gain == 0 and self.result[before] is None)

    def _count_freed(self, node: fx.Node, other: fx.Node) -> int:
        """The bytes of what `node` is the last to read, of what `other` does not read."""
        freed = 0
        for value in self.values[node]:
            readers = self.readers[value]
            if other not in readers and max(readers, key=self.place.__getitem__) is node:
                freed += _nbytes(value)
        return freed


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


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    tensors = value if isinstance(value, tuple | list) else [value]
    return sum(
        math.prod(map(_torch.hint_of, tensor.shape)) * tensor.dtype.itemsize
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    )
