"""Pure edits of graphs: cut a graph out of another, drop unread values, add bodies.

`slice_graph` copies the operators between given values and wanted ones. `simplify`, `prune_bodies`,
`erase_unread` and `erase_dead` change a graph in place; `add_body` gives one of its nodes a body.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from torchremat.graph.nodes import (
    ancestors,
    body_of,
    is_checkpoint,
    is_forward,
    nodes_read_by,
    results_of,
)
from torchremat.graph.notes import Notes, graph_notes_of, note_graph, notes_of, set_notes

aten = torch.ops.aten


def slice_graph(
    module: fx.GraphModule,
    inputs: Sequence[fx.Node | None],
    outputs: Sequence[Any],
    *,
    lazy: Callable[[fx.Node], bool] | None = None,
    always_run: Callable[[fx.Node], bool] | None = None,
    order: Iterable[fx.Node] | None = None,
) -> fx.GraphModule:
    """The graph that computes `outputs` from `inputs`, values of `module`'s graph.

    Nodes, placeholders too, have the names of those that they are copied from. Outputs are nodes
    or literals. Operators keep their order, or have that of the nodes in `order`. But those for
    which `lazy` is true come just before their first use, and so the values that they recompute
    live briefly. Those for which `always_run` is true stay though no output needs them. Raises
    `UnavailableError` if an output needs an input of `module` that is not among `inputs`.
    """
    nodes = list(module.graph.nodes if order is None else order)
    return _Slicer(module, inputs, lazy).run(nodes, outputs, always_run or (lambda node: False))


class UnavailableError(Exception):
    """A value is needed that neither the inputs nor earlier operators provide."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(f"{node.name} is needed but not given")
        self.node = node


class _Slicer:
    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[fx.Node | None],
        lazy: Callable[[fx.Node], bool] | None,
    ) -> None:
        self.module = module
        self.lazy = lazy or (lambda node: False)
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        last = {node: i for i, node in enumerate(inputs)}  # of a value given twice, this is used
        for i, node in enumerate(inputs):
            is_used = node is not None and last[node] == i
            copy = self.graph.placeholder(str(node) if is_used else f"unused_{i}")
            if node is not None:
                copy.meta = dict(node.meta)
                self.copies[node] = copy

    def run(
        self,
        nodes: Sequence[fx.Node],
        outputs: Sequence[Any],
        always_run: Callable[[fx.Node], bool],
    ) -> fx.GraphModule:
        wanted = [node for node in outputs if isinstance(node, fx.Node)]
        roots = [*wanted, *filter(always_run, nodes)]
        needed = ancestors(roots, stop=self.copies.__contains__, reads=nodes_read_by)
        for node in nodes:
            if node in needed and node.op == "placeholder":
                raise UnavailableError(node)
            if node in needed and not self.lazy(node):
                self._copy(node)
        for node in wanted:
            self._copy(node)
        self.graph.output(tuple(self.copies[o] if isinstance(o, fx.Node) else o for o in outputs))
        return fx.GraphModule(self.module, self.graph)

    def _copy(self, node: fx.Node) -> None:
        """Without recursion: chains are thousands long."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self.copies:
                stack.pop()
                continue
            missing = [n for n in nodes_read_by(top) if n not in self.copies]
            if missing:
                stack.extend(reversed(missing))
                continue
            self.copies[top] = self.graph.node_copy(top, self.copies.get)
            stack.pop()


def simplify(graph: fx.Graph) -> None:
    """Remove transposes of transposes: a backward pass has two for each `nn.Linear`.

    u = t(w);  v = t(u)     v is w, strides and all
    """
    for node in graph.find_nodes(op="call_function", target=aten.t.default):
        inner = node.args[0]
        if isinstance(inner, fx.Node) and inner.target is aten.t.default:
            source = inner.args[0]
            assert isinstance(source, fx.Node)
            node.replace_all_uses_with(source)
    for node in reversed(list(graph.nodes)):
        if node.target is aten.t.default and not node.users:
            graph.erase_node(node)


def prune_bodies(
    module: fx.GraphModule, *, always_run: Callable[[fx.Node], bool] | None = None
) -> None:
    """Let each nested checkpoint compute only those of its outputs that somebody reads."""
    graph = module.graph
    for node in list(graph.nodes):
        if not is_checkpoint(node):
            continue
        body = body_of(node)
        results = results_of(body)
        used = {item.args[1] for item in node.users}
        if all(i in used or not isinstance(r, fx.Node) for i, r in enumerate(results)):
            continue
        wanted = [r if i in used else None for i, r in enumerate(results)]
        inputs = body.graph.find_nodes(op="placeholder")
        pruned = slice_graph(body, inputs, wanted, always_run=always_run)
        prune_bodies(pruned, always_run=always_run)
        note_graph(pruned, program=graph_notes_of(body).program)
        with graph.inserting_before(node):
            node.args = (add_body_like(node, pruned), *node.args[1:])
    erase_unread(graph, always_run)


def erase_unread(graph: fx.Graph, always_run: Callable[[fx.Node], bool] | None) -> None:
    keeps = always_run or (lambda node: False)
    # not graph.eliminate_dead_code, which goes into bodies and takes no `always_run` for them
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output") and not keeps(node):
            graph.erase_node(node)


def add_body(module: fx.GraphModule, body: nn.Module, prefix: str = "opened") -> fx.Node:
    number = 0
    while hasattr(module, name := f"{prefix}_{number}"):
        number += 1
    module.add_module(name, body)
    return module.graph.get_attr(name)


def add_body_like(call: fx.Node, body: fx.GraphModule) -> fx.Node:
    """The reference to `body` gets the phase, module and line of `call`."""
    module = call.graph.owning_module
    assert module is not None
    node = add_body(module, body)
    notes = notes_of(call)
    set_notes(node, Notes(notes.phase, notes.module, notes.source))
    return node


def erase_dead(graph: fx.Graph, missing: Collection[fx.Node] = ()) -> None:
    """Erase what no gradient needs, and the `missing` cotangents.

    A trace with fewer cotangents has other values that nobody reads, and plans compare graphs.
    """
    for node in reversed(list(graph.nodes)):
        is_backward = node.op == "call_function" and not is_forward(node) and not node.is_impure()
        if (node in missing or is_backward) and not node.users:
            graph.erase_node(node)
