"""Schedules of a joint graph: the saved values, and the order of operators, some recomputed.

joint       y = mm(x, w);  z = sin(y);  c = cos(y);  g = mul(ct, c);  dw = mm(t(x), g)
saved       nothing
forward     mm, sin
backward    mm, cos, mul, mm
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchremat.graph.nodes import base_of, call_of, is_item, is_size, is_view, nodes_read_by
from torchremat.graph.slicing import UnavailableError


@dataclass(frozen=True, eq=False)
class GraphSchedule:
    """A choice of saved values with an order of operators.

    Attributes:
        saved: the values that the forward pass saves for the backward pass.
        forward: the calls of operators in the forward pass, in order.
        backward: the calls in the backward pass, in order. A call that `forward` has too is
            recomputed. Views run where they are read. Both are empty if only values were chosen.
        offloaded: the values that the forward pass copies to the host. A copy back starts before
            an operator that needs cotangents, the last one before the first that reads the value.
    """

    saved: frozenset[fx.Node]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    offloaded: frozenset[fx.Node] = frozenset()

    @property
    def kept(self) -> frozenset[fx.Node]:
        """The values that the backward pass finds on the device or on the host."""
        return self.saved | self.offloaded

    @property
    def choices(self) -> tuple[Any, ...]:
        """Equal for schedules of one graph that are alike."""
        return self.saved, self.forward, self.backward, self.offloaded

    def copy_to(self, nodes: Mapping[fx.Node, fx.Node]) -> "GraphSchedule":
        return GraphSchedule(
            frozenset(nodes[node] for node in self.saved),
            tuple(nodes[call] for call in self.forward),
            tuple(nodes[call] for call in self.backward),
            frozenset(nodes[node] for node in self.offloaded),
        )


def read_from_before(order: Sequence[fx.Node], wanted: Iterable[fx.Node]) -> set[fx.Node]:
    """The values, without views, that `order` needs for `wanted` and does not compute itself."""
    needed = {base_of(node) for node in wanted}
    for call in reversed(order):
        made = {call, *(user for user in call.users if is_item(user))}
        if needed & made:
            needed -= made
            needed.update(base_of(node) for node in nodes_read_by(call))
    return needed


def build_scheduled_graph(
    module: fx.GraphModule,
    inputs: Sequence[fx.Node | None],
    outputs: Sequence[Any],
    order: Sequence[fx.Node],
    *,
    always_run: Callable[[fx.Node], bool] | None = None,
) -> fx.GraphModule:
    """The graph that computes `outputs` from `inputs` by running the calls `order` of `module`.

    Each runs as often as it stands in `order`. A run that nothing reads is left out, unless
    `always_run` is true of it. Raises `UnavailableError` for a value that is read before it exists.
    """
    wanted = [node for node in outputs if isinstance(node, fx.Node)]
    running = _find_needed_runs(wanted, order, always_run or (lambda node: False))
    builder = ReplayBuilder(inputs)
    for call, runs in zip(order, running, strict=True):
        if runs:
            builder.run(call)
    values = [builder.value(o) if isinstance(o, fx.Node) else o for o in outputs]
    builder.graph.output(tuple(values))
    return fx.GraphModule(module, builder.graph)


def _find_needed_runs(
    wanted: Sequence[fx.Node], order: Sequence[fx.Node], always_run: Callable[[fx.Node], bool]
) -> list[bool]:
    needed = {call_of(base_of(node)) for node in wanted}
    running = []
    for call in reversed(order):
        runs = call in needed or always_run(call)
        running.append(runs)
        if runs:
            needed.discard(call)
            needed.update(call_of(base_of(node)) for node in nodes_read_by(call))
    return running[::-1]


class ReplayBuilder:
    """Builds a graph of calls of another one, in any order and any number.

    The copy of a node of the old graph is that of its latest run.
    """

    def __init__(self, inputs: Sequence[fx.Node | None]) -> None:
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.made: set[fx.Node] = set()
        self.views: dict[fx.Node, list[fx.Node]] = {}
        """The views of each value that have been copied."""
        for i, node in enumerate(inputs):
            copy = self.graph.placeholder(node.name if node is not None else f"unused_{i}")
            if node is not None:
                copy.meta = dict(node.meta)
                self.copies[node] = copy

    def run(self, call: fx.Node) -> None:
        """Run an operator. Views of its earlier values are no views of the new ones."""
        made = self._copy(call)
        items = [user for user in call.users if is_item(user)]
        for value in items or [call]:
            for view in self.views.pop(value, ()):
                self.copies.pop(view, None)
            if value is not call:
                self._make(value, {call: made})

    def value(self, node: fx.Node) -> fx.Node:
        """The copy of `node`, which is copied now if it is a view or a size that has none yet."""
        if node not in self.copies and is_size(node):
            return self._copy(node)
        chain = []
        while node not in self.copies and (is_view(node) or node.op == "get_attr"):
            chain.append(node)
            if node.op == "get_attr":
                break
            node = node.args[0]  # type: ignore[assignment]
        if node not in self.copies and not (chain and chain[-1].op == "get_attr"):
            raise UnavailableError(node)
        for view in reversed(chain):
            self._copy(view)
            if view.op != "get_attr":
                self.views.setdefault(base_of(view), []).append(view)
        return self.copies[chain[0] if chain else node]

    def _copy(self, node: fx.Node) -> fx.Node:
        return self._make(node, {n: self.value(n) for n in nodes_read_by(node)})

    def _make(self, node: fx.Node, read: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Copy `node` with the arguments `read`, and `None` for what its body does not read."""
        name = f"{node.name}_again" if node in self.made else node.name
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), read.get)
        copy = self.graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        copy.meta = dict(node.meta)
        self.copies[node] = copy
        self.made.add(node)
        return copy
