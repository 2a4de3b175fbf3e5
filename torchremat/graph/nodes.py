"""Questions about single nodes of an fx graph, and the walk from nodes back to what they read.

    y = mm(x, w);  v = t(y);  parts = split(v, 2);  p = getitem(parts, 0)

`p` is an item, its call is `parts`, and its base is `y`: `t` and `split` are views. A *body* is a
graph that a node of another graph runs, as `torch.cond`, `scan` and checkpoints do.
"""

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn

from torchremat import _torch
from torchremat.graph.notes import notes_of

aten = torch.ops.aten

# --- operators that run a body -------------------------------------------------------------------


class BodyOperator(_torch.HigherOrderOperator):
    """An operator that runs its body, `op(body, *inputs)`, and does nothing else: a checkpoint."""

    @abstractmethod
    def runner_of(self, body: fx.GraphModule) -> Callable[[list[Any]], tuple[Any, ...]]:
        """Compile `body` to a function from a list of inputs, which it empties, to its outputs."""


def is_checkpoint(node: fx.Node) -> bool:
    """Whether `node` calls an operator that runs its body and does nothing else."""
    return isinstance(node.target, BodyOperator)


def inner_graphs_of(node: fx.Node) -> list[fx.GraphModule]:
    """The bodies that a call of a higher-order operator is given; none for other nodes."""
    if node.op != "call_function" or isinstance(node.target, _torch.OpOverload):
        return []
    module = node.graph.owning_module
    references = (a for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr")
    found = (getattr(module, str(reference.target), None) for reference in references)
    return [graph for graph in found if isinstance(graph, fx.GraphModule)]


def body_of(call: fx.Node) -> fx.GraphModule:
    (body,) = inner_graphs_of(call)
    return body


# --- what a node is ------------------------------------------------------------------------------

# They share memory with their input, though their schemas do not say so.
_UNDECLARED_VIEWS = {
    aten._unsafe_view.default,
    aten.lift_fresh.default,
    aten._reshape_alias.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}

VIEWS_BY_SHAPE = frozenset({aten.view.default, aten._unsafe_view.default})
"""Refused for a tensor that lies otherwise in memory than when it was traced; `reshape` is not."""

_IDENTITIES = {aten.detach.default, aten.alias.default}


def is_forward(node: fx.Node) -> bool:
    if node.op not in ("call_function", "get_attr"):
        return False
    notes = notes_of(node)
    return notes.phase == "forward" or (notes.phase is None and not notes.is_for_output)


def is_identity(node: fx.Node) -> bool:
    """Whether `node` returns its input: it has a meaning for transformations, none at run time."""
    return getattr(node.target, "is_identity", False) or node.target in _IDENTITIES


def is_view(node: fx.Node) -> bool:
    """Whether `node` computes nothing: its outputs lie in the memory of its first argument."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    if is_identity(node) or node.target in _UNDECLARED_VIEWS:
        return True
    if not isinstance(node.target, _torch.OpOverload):
        return False
    schema = _torch.schema_of(node.target)
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def is_item(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def is_size(node: fx.Node) -> bool:
    """Whether `node` computes a number from shapes alone, in a graph that has sizes as nodes."""
    if not isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
        return False
    target = node.target
    reads_shape = isinstance(target, _torch.OpOverload) and target.name().startswith("aten::sym_")
    return node.op == "call_function" and (reads_shape or not isinstance(target, _torch.OpOverload))


def is_inexact(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    # `value.is_floating_point()` is a call that a trace in progress would record
    return value.dtype.is_floating_point or value.dtype.is_complex


def is_staged_residual(node: fx.Node) -> bool:
    """Whether `node` is a residual that a nested checkpoint saves by its own policy on replay."""
    if not is_item(node):
        return False
    notes = notes_of(call_of(node))
    return notes.staged_half_of is not None and item_index(node) >= (notes.num_outputs or 0)


# --- from one node to others ---------------------------------------------------------------------


def all_items(node: fx.Node) -> dict[int, fx.Node]:
    """The items by position, if all that is done with the outputs of `node` is to take them."""
    items: dict[int, fx.Node] = {}
    if not isinstance(node.meta.get("val"), tuple | list):
        return items
    for user in node.users:
        if user.target is not operator.getitem or user.args[1] in items:
            return {}
        items[user.args[1]] = user  # type: ignore[index]
    return items


def base_of(node: fx.Node) -> fx.Node:
    """The value in whose memory `node` lies: itself, unless it is a view.

    With `t = transpose(w)` and `s = select(t, 0)`, the base of `s` is `w`. A view of a number, as
    in `conj(2j)`, is its own.
    """
    while is_view(node):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def call_of(node: fx.Node) -> fx.Node:
    if is_item(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source
    return node


def item_index(node: fx.Node) -> int:
    index = node.args[1]
    assert isinstance(index, int)
    return index


def nodes_read_by(node: fx.Node) -> list[fx.Node]:
    """The nodes that `node` reads, without operands of a checkpoint that its body does not read."""
    if not is_checkpoint(node):
        return node.all_input_nodes
    reference, *operands = node.args
    assert isinstance(reference, fx.Node)
    inputs = body_of(node).graph.find_nodes(op="placeholder")
    read = [o for o, i in zip(operands, inputs, strict=True) if i.users]
    return [reference, *(o for o in read if isinstance(o, fx.Node))]


def ancestors(
    roots: Iterable[Any],
    *,
    stop: Callable[[fx.Node], bool] = lambda node: False,
    reads: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes,
) -> set[fx.Node]:
    """The nodes that `roots` are computed from, themselves included; literals are skipped.

    The walk neither enters nor passes nodes for which `stop` is true. With `y = sin(x)`,
    `z = mul(y, w)`, the ancestors of `z` are `z, y, x, w`, and with `stop` at `y` they are `z, w`.
    """
    found: set[fx.Node] = set()
    stack = [root for root in roots if isinstance(root, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in found and not stop(node):
            found.add(node)
            stack.extend(reads(node))
    return found


def results_of(module: fx.GraphModule) -> list[Any]:
    (output,) = module.graph.find_nodes(op="output")
    results = output.args[0]
    return list(results) if isinstance(results, tuple | list) else [results]


def attribute(module: nn.Module, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module
