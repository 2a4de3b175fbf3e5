"""The rule of loops: what a step computes of weights alone is no value of each step.

    forward     h, ys, (xs, wt) = scan(step, h0, xs, [w])         wt: w.t() of every step, stacked
    backward    dh, dw = scan(back, dh0, [flip(xs), flip(wt)])

    forward     h, ys, (xs,) = scan(step, h0, xs, [w])
    backward    wt = w.t();  dh, dw = scan(back, dh0, [flip(xs)], [wt])

PyTorch saves for each step what its derivative reads, a copy of each weight too: for a hundred
steps a hundred copies. Here the backward pass makes it once, by the same operators of the same
values, and each of its steps reads that: no bit differs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.rewrites.added_calls import add_like
from torchremat.autodiff.rewrites.loop import Loop, is_loop
from torchremat.graph.nodes import ancestors, call_of, is_forward, item_index, results_of

aten = torch.ops.aten


def hoist_invariants(graph: fx.Graph) -> None:
    """Let the loops of the backward pass of `graph` read what does not vary by step as a whole."""
    for node in list(graph.nodes):
        if is_loop(node) and not is_forward(node):
            _hoist(Loop(node))
    for node in list(graph.find_nodes(op="get_attr")):
        if not node.users:
            graph.erase_node(node)  # a body that was written anew


def _hoist(loop: Loop) -> None:
    found: dict[int, fx.Node] = {}
    for i, item in loop.reversed_results.items():
        made = _compute_once(item, loop.node)
        if made is not None:
            found[i] = made
    if not found:
        return
    flips = [loop.stacks[i] for i in found]
    items = dict.fromkeys(loop.reversed_results[i] for i in found)
    _read_whole(loop, found)
    for flip in dict.fromkeys(flips):
        if not flip.users:
            flip.graph.erase_node(flip)
    for item in items:
        if not item.users:
            _drop_result(item)


def _compute_once(item: fx.Node, reader: fx.Node) -> fx.Node | None:
    """Compute before `reader` the value of `item` that all steps gave; `None` if they differ."""
    source, index = Loop(call_of(item)), item_index(item)
    if not is_forward(source.node):
        return None
    first = len(source.initial) + len(source.stacks)
    value = results_of(source.body)[index]
    if index < len(source.initial) or not isinstance(value, fx.Node):
        return None
    above = ancestors([value])
    needed = [node for node in source.body.graph.nodes if node in above]
    places = list(source.body.graph.find_nodes(op="placeholder"))
    given = dict(zip(places[first:], source.others, strict=True))
    if any(node not in given and not _is_plain(node) for node in needed):
        return None
    with reader.graph.inserting_before(reader):
        for node in needed:
            if node not in given:
                args = fx.node.map_arg(node.args, given.__getitem__)
                kwargs = fx.node.map_arg(node.kwargs, given.__getitem__)
                given[node] = add_like(reader, node.target, args, _compute(node, given), kwargs)
        made = given[value]
        if not isinstance(made, fx.Node) or not isinstance(made.meta["val"], Tensor):
            return None
        if not made.meta["val"].is_contiguous():  # as a slice of what was stacked is
            made = add_like(
                reader, aten.clone.default, (made,), made.meta["val"].contiguous(), _CONTIGUOUS
            )
    return made


def _compute(node: fx.Node, given: dict[fx.Node, Any]) -> Tensor:
    """The fake result of `node`, of the values outside: it has memory of its own, or is a view."""

    def find(read: fx.Node) -> Any:
        there = given[read]
        return there.meta["val"] if isinstance(there, fx.Node) else there

    args, kwargs = fx.node.map_arg(node.args, find), fx.node.map_arg(node.kwargs, find)
    made: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return made


_CONTIGUOUS = {"memory_format": torch.contiguous_format}


def _is_plain(node: fx.Node) -> bool:
    """Whether it computes a tensor of its arguments alone, and does nothing else."""
    op = node.target
    return (
        node.op == "call_function"
        and isinstance(op, _torch.OpOverload)
        and not _torch.schema_of(op).is_mutable
        and torch.Tag.nondeterministic_seeded not in op.tags
        and isinstance(node.meta.get("val"), Tensor)
    )


def _read_whole(loop: Loop, found: dict[int, fx.Node]) -> None:
    """Let `loop` read `found` in place of what it slices at these positions."""
    count = len(loop.initial)

    def reorder(places: list[fx.Node]) -> list[fx.Node]:
        kept = [p for i, p in enumerate(places) if i - count not in found]
        return [*kept, *(places[count + i] for i in found)]

    stacks = [x for i, x in enumerate(loop.stacks) if i not in found]
    others = (*loop.others, *found.values())
    body = _copy_body(loop, reorder, lambda results: results)
    loop.node.args = (body, loop.initial, stacks, others)


def _drop_result(item: fx.Node) -> None:
    """Let a loop not give the result that `item` takes, which nobody reads."""
    call, index = call_of(item), item_index(item)
    loop = Loop(call)
    body = _copy_body(
        loop, lambda places: places, lambda results: results[:index] + results[index + 1 :]
    )
    item.graph.erase_node(item)
    for other in list(call.users):
        if item_index(other) > index:
            other.args = (call, item_index(other) - 1)
    call.args = (body, *call.args[1:])
    results = loop.results
    call.meta["val"] = tuple(results[:index] + results[index + 1 :])


def _copy_body(
    loop: Loop,
    reorder: Callable[[list[fx.Node]], list[fx.Node]],
    choose: Callable[[list[Any]], list[Any]],
) -> fx.Node:
    """A body that takes its arguments in another order, or gives fewer results."""
    old = loop.body
    graph = fx.Graph()
    places = list(old.graph.find_nodes(op="placeholder"))
    copies = {place: graph.node_copy(place) for place in reorder(places)}
    for node in old.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    results = choose(list(results_of(old)))
    graph.output(tuple(fx.node.map_arg(results, copies.__getitem__)))
    graph.eliminate_dead_code()
    before = loop.node.args[0]
    assert isinstance(before, fx.Node)
    module = loop.node.graph.owning_module
    assert module is not None
    name = _find_name(module, str(before.target))
    module.add_submodule(name, fx.GraphModule(old, graph))
    with loop.node.graph.inserting_before(loop.node):
        made = loop.node.graph.get_attr(name)
    made.meta = dict(before.meta)
    return made


def _find_name(module: fx.GraphModule, name: str) -> str:
    number = 1
    while hasattr(module, f"{name}_{number}"):
        number += 1
    return f"{name}_{number}"
