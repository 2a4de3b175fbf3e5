"""Operators with a list of tensors among their results, as operators with one flat list.

PyTorch's derivatives of recurrent layers on a GPU give the gradients of all weights so. In a graph
an item of a call is a tensor, and not a list of some.
"""

import operator
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.graph.inplace import is_mutable
from torchremat.graph.nodes import is_item

_LIBRARY = torch.library.Library("torchremat", "FRAGMENT")


def flatten_nested_results(graph: fx.Graph) -> None:
    """Let each operator of `graph` with a list among several results give one flat list."""
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(node.target, _torch.OpOverload) or not _is_nested(value):
            continue
        if not is_mutable(node) and all(map(is_item, (*node.users, *_readers_of_lists(node)))):
            _flatten(graph, node)


def _is_nested(value: Any) -> bool:
    return isinstance(value, tuple | list) and any(isinstance(v, tuple | list) for v in value)


def _readers_of_lists(node: fx.Node) -> Iterator[fx.Node]:
    for item in node.users:
        if is_item(item) and isinstance(node.meta["val"][item.args[1]], tuple | list):
            yield from item.users


def _flatten(graph: fx.Graph, node: fx.Node) -> None:
    value = node.meta["val"]
    places, num = [], 0
    for result in value:
        places.append(num)
        num += len(result) if isinstance(result, tuple | list) else 1
    with graph.inserting_before(node):
        flat = graph.call_function(_flat_form(node.target), node.args, node.kwargs)
    flat.meta = {**node.meta, "val": _flat(value)}
    for item in list(node.users):
        place, is_list = places[item.args[1]], isinstance(value[item.args[1]], tuple | list)  # type: ignore[index]
        for reader in list(item.users) if is_list else [item]:
            index = place + (reader.args[1] if is_list else 0)  # type: ignore[operator]
            with graph.inserting_before(reader):
                taken = graph.call_function(operator.getitem, (flat, index))
            taken.meta = dict(reader.meta)
            reader.replace_all_uses_with(taken)
            graph.erase_node(reader)
        if is_list:
            graph.erase_node(item)
    graph.erase_node(node)


def _flat(results: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for result in results:
        flat += result if isinstance(result, tuple | list) else [result]
    return flat


@cache
def _flat_form(op: _torch.OpOverload) -> _torch.OpOverload:
    """An operator composed of `op`: a trace meets `op` in its place, with its derivative."""
    namespace, _, name = op.name().partition("::")
    name = f"flat_{namespace}_{name.replace('.', '_')}"
    arguments = str(_torch.schema_of(op)).partition("(")[2].rpartition(" -> ")[0]
    _LIBRARY.define(f"{name}({arguments} -> Tensor[]")

    def run(*args: Any, **kwargs: Any) -> list[Tensor]:
        results = _flat(op(*args, **kwargs))
        known = next(result for result in results if result is not None)
        return [known.new_empty((0,)) if result is None else result for result in results]

    _LIBRARY.impl(name, run, "CompositeImplicitAutograd")
    flat: _torch.OpOverload = getattr(torch.ops.torchremat, name).default
    return flat
