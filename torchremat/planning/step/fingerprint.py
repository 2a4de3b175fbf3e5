"""The fingerprint of a joint graph, so that a plan is not replayed on another."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from torchremat import _torch
from torchremat.autodiff.joint import Joint
from torchremat.core.avals import Aval
from torchremat.graph.ops import op_name


def lines_of(graph: fx.Graph) -> tuple[str, ...]:
    """One line for each node: what it is, what it reads, and what comes out; last, the outputs.

    Devices are left out: a plan that was made on the meta device holds for any other on which the
    graph is the same. Names of process groups are left out, so that a plan holds in all processes:
    each column of a mesh has a group of its own.

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


def find_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Where two graphs first differ, for people.

    >>> find_difference(["mm(%0, %1) -> f32[2,3]"], ["mm(%0, %1) -> f32[4,3]"])
    'node 0 is mm(%0, %1) -> f32[4,3], and was mm(%0, %1) -> f32[2,3]'
    """
    pairs = list(zip(ours, theirs, strict=False))
    others = [i for i, pair in enumerate(pairs) if pair[0] != pair[1]]
    # of the differences, sizes matter least
    others.sort(key=lambda i: _differ_in_sizes(*pairs[i]))
    if others:
        our, their = pairs[others[0]]
        return f"node {others[0]} is {their}, and was {our}"
    return f"it has {len(theirs)} nodes, and had {len(ours)}"


def have_one_structure(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether two graphs are of the same operators, reading the same values, at any sizes.

    >>> have_one_structure(["mm(%0, %1) -> f32[2,3]"], ["mm(%0, %1) -> f32[4,3]"])
    True
    >>> have_one_structure(["mm(%0, %1) -> f32[2,3]"], ["mm(%1, %0) -> f32[2,3]"])
    False
    """
    return len(ours) == len(theirs) and all(map(_differ_in_sizes, ours, theirs))


def find_growth(lines: Sequence[str], later: Sequence[str]) -> float:
    """How many times as large a result is in another graph of the same structure, at most.

    >>> find_growth(["sin(%0) -> f32[8]"], ["sin(%0) -> f32[20]"])
    2.5
    """
    pairs = zip(lines, later, strict=True)
    return max((_numel(now) / max(_numel(was), 1) for was, now in pairs), default=1.0)


_NUMBER = re.compile(r"(?<![%\w.])-?\d+(\.\d+)?(e-?\d+)?")
_SHAPE = re.compile(r"\w\[([\d,]*)\]")


def _differ_in_sizes(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    item, other = _ITEM.match(ours), _ITEM.match(theirs)
    if item and other and item[2] != other[2]:  # which output it is, no size
        return False
    return _NUMBER.sub("#", ours) == _NUMBER.sub("#", theirs)


def _numel(line: str) -> int:
    """The most elements that one result of an operator has."""
    shapes = _SHAPE.findall(line.rpartition(" -> ")[2])
    return max((prod(map(int, filter(None, shape.split(",")))) for shape in shapes), default=0)


def _line(node: fx.Node, numbers: dict[fx.Node, int]) -> str:
    if node.op == "get_attr":
        return f"constant -> {_result(node)}"
    if node.op == "output":
        return f"outputs {_text(node.args[0], numbers)}"
    if node.op == "placeholder":
        return f"input -> {_result(node)}"
    of_group = _find_group_arguments(node)
    arguments = [_text(a, numbers) for i, a in enumerate(node.args) if i not in of_group]
    named = sorted(item for item in node.kwargs.items() if item[0] not in _OF_A_PROCESS)
    arguments += [f"{name}={_text(value, numbers)}" for name, value in named]
    return f"{op_name(node.target)}({', '.join(arguments)}) -> {_result(node)}"


_OF_A_PROCESS = ("device", "group", "group_name")


def _find_group_arguments(node: fx.Node) -> list[int]:
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


def match_saved_values(
    lines: Sequence[str], saved: Sequence[int], joint: Joint
) -> list[fx.Node] | None:
    """The nodes of `joint` at the positions `saved` of `lines`; `None` for another function."""
    nodes = list(joint.module.graph.nodes)
    ours = list(_number_lines(lines_of(joint.module.graph)))
    theirs = list(_number_lines(lines))
    wanted = {theirs[i] for i in saved}
    kinds = {kind for kind, _ in wanted}
    count = Counter(kind for kind, _ in ours if kind in kinds)
    if count != Counter(kind for kind, _ in theirs if kind in kinds):
        return None
    return [node for node, numbered in zip(nodes, ours, strict=False) if numbered in wanted]


def _number_lines(lines: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Of each line the kind of value that it computes, and how many of that kind came before."""
    seen: Counter[str] = Counter()
    for line in lines:
        kind = _kind(line, lines)
        yield kind, seen[kind]
        seen[kind] += 1


_ITEM = re.compile(r"getitem\(%(\d+), (\d+)\)")


def _kind(line: str, lines: Sequence[str]) -> str:
    """The operator and what comes out of it; of one of several outputs also which.

    >>> _kind("aten.mm.default(%0, %1) -> f32[2,3]", [])
    'aten.mm.default -> f32[2,3]'
    >>> _kind("getitem(%0, 1) -> i64[2]", ["aten.topk.default(%7, 2) -> f32[2], i64[2]"])
    'aten.topk.default -> f32[2], i64[2] / 1'
    """
    item = _ITEM.match(line)
    if item is not None:
        return f"{_kind(lines[int(item[1])], lines)} / {item[2]}"
    operator, _, rest = line.partition("(")
    return f"{operator} -> {rest.rpartition(' -> ')[2]}"
