"""The parts of a gradient: one for each reader of an input, in autograd's order.

    y = sin(x) + x @ w          gradient of x       add(dy, mm(dy, w'))     folded: two readers
                                its parts           dy, mm(dy, w')

Sums of floating-point numbers depend on their order. If something outside a checkpoint also reads
x, then plain autograd computes `(others + dy) + mm(..)`. A checkpoint that returns one sum makes it
`others + (dy + mm(..))`. So a checkpoint returns the parts, and autograd adds them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.graph.nodes import is_view

Part = tuple[int, fx.Node]
"""The position of an input, and what one of its readers adds to its gradient."""


class PartRecorder:
    """Records, in a backward pass, what arrives at some inputs, in order; if it `is_on`."""

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on
        self._destinations: dict[Any, int] = {}
        self.positions: list[int] = []
        self.values: list[Tensor] = []

    def expect(self, inputs: Mapping[int, Tensor]) -> None:
        """Record what arrives at `inputs`, which are given by position and as yet unwritten."""
        for position, tensor in inputs.items():
            if self._is_on and tensor.requires_grad:
                self._destinations[_find_node(tensor)] = position

    def watch(self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
        """Watch the backward pass that begins at `outputs`, with these cotangents."""
        if not self._destinations:
            return
        for output, cotangent in zip(outputs, cotangents, strict=True):
            self._arrive(_find_node(output), cotangent)
        stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
        seen = set(stack)
        while stack:
            function = stack.pop()
            following = [node for node, _ in function.next_functions]
            if any(node in self._destinations for node in following):
                function.register_hook(self._hook_of(following))
            new = [node for node in following if node is not None and node not in seen]
            seen.update(new)
            stack += new

    def _hook_of(self, following: Sequence[Any]) -> Any:
        def note_results(results: Sequence[Tensor | None], _: Any) -> None:
            for function, value in zip(following, results, strict=True):
                if value is not None:
                    self._arrive(function, value)

        return note_results

    def _arrive(self, function: Any, value: Tensor) -> None:
        position = self._destinations.get(function)
        if position is not None:
            self.positions.append(position)
            self.values.append(value)


def _find_node(tensor: Tensor) -> Any:
    """The node of autograd's graph at which the gradients of `tensor` arrive."""
    with _torch.isolate(), torch.inference_mode(False):  # PyTorch makes a view of a leaf
        return torch.autograd.graph.get_gradient_edge(tensor).node


def choose_parts(
    parts: Sequence[Part], gradients: Sequence[Any], forward: Iterable[fx.Node]
) -> tuple[Part, ...]:
    """The parts to return in place of gradients, of those that were recorded.

    They are parts of which the gradient is the sum, and nothing else. All parts of an input are
    alive at the end of the backward pass. So they must not take more bytes than the values of the
    `forward` pass: a weight that is used at a thousand steps has one gradient, not a thousand.
    """
    by_input: dict[int, list[fx.Node]] = defaultdict(list)
    for position, value in parts:
        by_input[position].append(value)
    with _torch.without_function_modes():  # those of a trace around would capture values
        room = sum(_nbytes(node) for node in forward if not is_view(node))
        excess = {position: sum(map(_nbytes, values[1:])) for position, values in by_input.items()}
    chosen = set()
    for position in sorted(by_input, key=excess.__getitem__):
        room -= excess[position]
        if room >= 0 and _is_sum(gradients[position], by_input[position]):
            chosen.add(position)
    order = [position for position, _ in parts if position in chosen]
    if order == sorted(chosen):  # one part each, in the order in which gradients are returned
        return ()
    return tuple(part for part in parts if part[0] in chosen)


def slots_of(parts: Sequence[Part], others: Sequence[Part], count: int) -> tuple[int, ...]:
    """The input that each gradient that a backward pass returns is for; empty if each has one.

    There are slots for all `parts`, in their order, and for those of `others`, the parts of another
    trace. Then come the inputs that have none, out of `count`.
    """
    slots = [position for position, _ in parts]
    missing = Counter(position for position, _ in others)
    missing.subtract(slots)
    slots += missing.elements()
    if not slots:
        return ()
    return (*slots, *(i for i in range(count) if i not in slots))


def fill_slots(slots: Sequence[int], parts: Sequence[Part], gradients: Sequence[Any]) -> list[Any]:
    """The value for each slot: parts of an input if there are slots for all, else its gradient."""
    by_input: dict[int, list[Any]] = defaultdict(list)
    for position, value in parts:
        by_input[position].append(value)
    room = Counter(slots)
    left = {
        i: list(by_input[i]) if 0 < len(by_input[i]) <= room[i] else [gradients[i]] for i in room
    }
    return [left[i].pop(0) if left[i] else None for i in slots]


def _is_sum(gradient: Any, values: Sequence[fx.Node]) -> bool:
    for value in reversed(values[1:]):
        if not isinstance(gradient, fx.Node) or gradient.target is not torch.ops.aten.add.Tensor:
            return False
        if gradient.kwargs or gradient.args[1] is not value:
            return False
        gradient = gradient.args[0]
    return gradient is values[0]


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor):
        return 0
    return int(_torch.hint_of(value.numel())) * value.dtype.itemsize
