"""Operators that go before a write: checks, and the views that are written to.

    s = add(cache, x);      f = gt(x, 0);       ok = check(f)
    f = gt(x, 0);           ok = check(f);      s = add(cache, x)

Where the check fails, the function runs again as it is, on the cache as it was.

    m = mm(a, b);           s = select(w, 0);   r = slice_scatter(s, m)
    s = select(w, 0);       m = mm(a, b);       r = slice_scatter(s, m)

Now `mm` can write into a slice of `s`, as in the user's code.
"""

from collections.abc import Iterable

import torch
from torch import fx

from torchremat import _torch
from torchremat.graph.nodes import all_items, inner_graphs_of, is_item, is_view
from torchremat.graph.ops import packet_name
from torchremat.graph.write_forms import (
    form_with_out,
    outs_of,
    parts_with,
    values_after_writes,
    writes_into_first,
)

aten = torch.ops.aten


def has_check(node: fx.Node) -> bool:
    """Whether `node` raises where a condition does not hold, or a body that it runs does."""
    if packet_name(node.target) == "torchremat.check":
        return True
    return any(has_check(inner) for body in inner_graphs_of(node) for inner in body.graph.nodes)


def is_outcome(node: fx.Node) -> bool:
    """Whether `node` is what checks give: whoever runs the graph drops it at once."""
    if packet_name(node.target) == "torchremat.check":
        return True
    sources = node.all_input_nodes
    is_joined = node.target in (aten.stack.default, aten.all.default) and bool(sources)
    return is_joined and all(map(is_outcome, sources))


def move_checks_before_writes(graph: fx.Graph, written: Iterable[fx.Node]) -> None:
    """Move checks before the first write to the inputs `written`, where they depend on none.

    So is what they are computed of, unless it draws random numbers or runs a body.
    """
    if not any(map(has_check, graph.nodes)):
        return
    place = {node: i for i, node in enumerate(graph.nodes)}
    writing = {node for target in written for node in _nodes_that_write(target)}
    if not writing:
        return
    first = min(writing, key=place.__getitem__)
    moved: set[fx.Node] = set()
    for check in [node for node in graph.nodes if has_check(node) and place[node] > place[first]]:
        needed = _sources_after(check, place, place[first]) - moved
        if not needed.isdisjoint(writing) or not all(map(_may_move, needed)):
            return  # nor those after it: checks stay in their order
        for node in sorted(needed, key=place.__getitem__):
            first.prepend(node)
        moved |= needed


def _nodes_that_write(target: fx.Node) -> Iterable[fx.Node]:
    """The operators that may write into the memory of `target`."""
    for node in values_after_writes(target):
        if not writes_into_first(node):
            continue
        yield node
        source = node.args[1] if len(node.args) > 1 else None
        if isinstance(source, fx.Node) and form_with_out(source) is not None:
            yield source


def _sources_after(node: fx.Node, place: dict[fx.Node, int], start: int) -> set[fx.Node]:
    """The nodes from `start` on that `node` is computed of; itself too."""
    needed, stack = {node}, [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if place[source] >= start and source not in needed:
                needed.add(source)
                stack.append(source)
    return needed


def _may_move(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr") or is_item(node):
        return True
    if not isinstance(node.target, _torch.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags


def move_views_before_writes(graph: fx.Graph) -> None:
    """Move the views into a part of which an operator may write, by its `out`, before it."""
    place: dict[fx.Node, float] = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        results = [node] if form_with_out(node) is not None else []
        results += all_items(node).values() if outs_of(node) else []
        for memory, _ in (found for result in results for found in parts_with(result)):
            for view in _views_until(memory, place, place[node]):
                node.prepend(view)
                place[view] = place[node] - 0.5


def _views_until(value: fx.Node, place: dict[fx.Node, float], end: float) -> list[fx.Node]:
    """The views from a value that is there before `end` to `value`; none if there is no such."""
    views: list[fx.Node] = []
    while place[value] > end:
        if not is_view(value) or len(value.all_input_nodes) != 1:
            return []
        views.insert(0, value)
        value = value.all_input_nodes[0]
    return views
