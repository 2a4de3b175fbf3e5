"""Find the operators of one trace of a function in another trace of it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchremat import _torch
from torchremat.autodiff.joint import Joint
from torchremat.errors import RetraceError
from torchremat.graph.aliasing import changes_nothing
from torchremat.graph.nodes import attribute, call_of, is_identity, is_item, item_index
from torchremat.graph.notes import notes_of

aten = torch.ops.aten


def match_forward(
    of: Joint, into: Joint, values: Sequence[fx.Node], *, strict: bool = True
) -> dict[fx.Node, fx.Node]:
    """Pair forward `values` of a joint graph with those of another trace of the function.

    Two operators are the same if they are called with the same arguments, as often before. Raises
    `RetraceError`, if `strict`, where the second trace lacks one: the function now computes
    something else.
    """
    numbers: dict[Any, int] = {}
    ours, theirs = _number_nodes(of, numbers), _number_nodes(into, numbers)
    by_number: dict[int, fx.Node] = {}
    for node, number in theirs.items():
        by_number.setdefault(number, node)  # an alias comes after what it stands for
    pairs = {}
    for node in values:
        number = ours[node]
        if number not in by_number:
            if not strict:
                continue
            raise RetraceError(
                f"{node.name} ({node.target}), from {notes_of(node).source}, was computed when "
                "the function was first traced and is not any more. A derivative of higher order "
                "traces the function again, at the time of the backward pass: what it reads "
                "besides its arguments (attributes, globals, train/eval) must be as in the forward "
                "pass."
            )
        pairs[node] = by_number[number]
    return pairs


def _is_of_opened(node: fx.Node) -> bool:
    if not is_item(node):
        return False
    num_outputs = notes_of(call_of(node)).num_outputs
    return num_outputs is not None and item_index(node) >= num_outputs


# where sizes are symbols, PyTorch writes one for the other
_ALIKE: dict[Any, str] = {aten._unsafe_view.default: str(aten.view.default)}


_BODY = "body"


def _what(node: fx.Node) -> Any:
    """Names of constants differ from trace to trace."""
    if node.op != "get_attr":
        return _ALIKE.get(node.target, str(node.target))
    module = node.graph.owning_module
    assert module is not None
    held = attribute(module, str(node.target))
    if isinstance(held, fx.GraphModule):
        return _BODY  # the graph may keep other values, and its line be that of the caller
    if isinstance(held, torch.Tensor):
        with _torch.isolate():  # a trace may be in progress
            return ("constant", str(held.dtype), tuple(held.shape), repr(held.tolist()))
    return str(node.target)


def _number_nodes(joint: Joint, numbers: dict[Any, int]) -> dict[fx.Node, int]:
    found: dict[fx.Node, int] = {}
    repeats: dict[Any, int] = {}
    for i, node in enumerate(joint.inputs):
        found[node] = numbers.setdefault(("input", i), len(numbers))
    for node in joint.forward_nodes:
        if is_identity(node) or changes_nothing(node):
            found[node] = found[node.args[0]]  # type: ignore[index]
            continue
        if _is_of_opened(node):
            found[node] = numbers.setdefault(("opened", node), len(numbers))
            continue
        kwargs = {k: v for k, v in node.kwargs.items() if k != "call"}  # a number of that trace
        arguments = fx.node.map_arg((node.args, kwargs), lambda n: ("node", found.get(n)))
        what = _what(node)
        key = (node.op, what, repr(arguments))
        # calls differ by the values that they read, and constants alike are one: how many zeros
        # forward mode makes for tangents differs from trace to trace
        if what is not _BODY and (node.all_input_nodes or _draws(node)):
            repeats[key] = repeats.get(key, -1) + 1
        found[node] = numbers.setdefault((*key, repeats.get(key, 0)), len(numbers))
    return found


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
