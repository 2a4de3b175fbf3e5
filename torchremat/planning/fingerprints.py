"""What a joint graph looks like, so that a plan is not replayed on another."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchremat import _torch
from torchremat.avals import Aval
from torchremat.graph.ops import op_name


def lines_of(graph: fx.Graph) -> tuple[str, ...]:
    """One line for each node: what it is, what it reads, and what comes out; last, the outputs.

    Devices are left out.

    A plan that was made on the meta device holds for any other on which the graph is the same, and
    one that was made in one process for the others: what a group of processes is called is left out
    too, as those in one column of a mesh have another group than those in the next.

    >>> import torchremat as tr
    >>> g = tr.make_graph(lambda x, n: x * n, static_argnums=1)(torch.ones(3), 2.0)
    >>> lines_of(g.graph_module.graph)[1]
    'aten.mul.Tensor(%0, 2.0) -> f32[3]'
    """
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    return tuple(_line(node, numbers) for node in graph.nodes)


def fingerprint_of(lines: Sequence[str]) -> str:
    """A short text that differs where `lines` do.

    >>> fingerprint_of(["a"]) == fingerprint_of(["a"]) != fingerprint_of(["b"])
    True
    """
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Where two graphs first differ, for people.

    >>> difference(["mm(%0, %1) -> f32[2,3]"], ["mm(%0, %1) -> f32[4,3]"])
    'node 0 is mm(%0, %1) -> f32[4,3], and was mm(%0, %1) -> f32[2,3]'
    """
    for i, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            return f"node {i} is {their}, and was {our}"
    return f"it has {len(theirs)} nodes, and had {len(ours)}"


def _line(node: fx.Node, numbers: dict[fx.Node, int]) -> str:
    if node.op == "get_attr":
        return f"constant -> {_result(node)}"
    if node.op == "output":
        return f"outputs {_text(node.args[0], numbers)}"
    if node.op == "placeholder":
        return f"input -> {_result(node)}"
    of_group = _places_of_group(node)
    arguments = [_text(a, numbers) for i, a in enumerate(node.args) if i not in of_group]
    named = sorted(item for item in node.kwargs.items() if item[0] not in _OF_A_PROCESS)
    arguments += [f"{name}={_text(value, numbers)}" for name, value in named]
    return f"{op_name(node.target)}({', '.join(arguments)}) -> {_result(node)}"


_OF_A_PROCESS = ("device", "group", "group_name")


def _places_of_group(node: fx.Node) -> list[int]:
    """The positions of arguments that name a group of processes."""
    if not isinstance(node.target, _torch.OpOverload):
        return []
    arguments = enumerate(_torch.schema_arguments(node.target))
    return [i for i, argument in arguments if argument.name == "group_name"]


def _text(value: Any, numbers: dict[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(v, numbers) for v in value)}]"
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, torch.Generator):
        return "generator"
    return str(value)


def _result(node: fx.Node) -> str:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return ", ".join(str(Aval.of(v)) for v in values if isinstance(v, torch.Tensor))
