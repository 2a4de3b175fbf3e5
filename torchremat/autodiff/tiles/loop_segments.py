"""Cut the loops of a joint graph in segments, so that a plan may save some of their steps' values.

    h, ys, saved = scan(step, h0, xs)          h1, ys1, saved1 = scan(step, h0, xs[:32])
    ...                                   ->   h2, ys2, saved2 = scan(step, h1, xs[32:])
    dh0, dw, dxs = scan(back, 0,               dh1, dw1, dxs2 = scan(back, 0, flip(saved2))
                        flip(saved))           dh0, dw, dxs1 = scan(back, dh1, flip(saved1))

A loop is one operator with one result for what all its steps save: a plan keeps it whole, or makes
it whole again. Each segment has such a result of its own, and runs again from the state before it.
The steps are the same and in the same order, and gradients add up along the loop: no bit differs.
"""

import operator
from dataclasses import replace

import torch
from torch import Tensor, fx

from torchremat.autodiff.joint import Joint
from torchremat.autodiff.rewrites.added_calls import add_like
from torchremat.autodiff.rewrites.loop import Loop, is_loop
from torchremat.graph.nodes import call_of, is_forward
from torchremat.graph.slicing import erase_dead

aten = torch.ops.aten


def segment_loops(joint: Joint, num_segments: int) -> Joint | None:
    """The joint graph with its loops in so many segments; `None` if there are none to be cut.

    They are those with values that only the backward pass reads, of a known number of steps.
    """
    if not _find_loops(joint):
        return None
    copy, _ = joint.copy()
    cutter = _Cutter(num_segments)
    for loop in _find_loops(copy):
        cutter.cut(loop)
    cutter.erase_unread()
    erase_dead(copy.module.graph)
    return replace(copy.translate(cutter.whole), untiled=joint)


def count_steps(joint: Joint) -> int:
    """The steps of the longest loop that can be cut; 0 if there is none."""
    return max((loop.num_steps for loop in _find_loops(joint)), default=0)


def _find_loops(joint: Joint) -> list[Loop]:
    """The loops of the forward pass that save values, and those that read these, in order."""
    loops = [Loop(n) for n in joint.module.graph.nodes if is_loop(n)]
    loops = [loop for loop in loops if loop.has_known_steps]
    forward = {loop.node for loop in loops if is_forward(loop.node)}
    found: set[fx.Node] = set()
    for loop in loops:
        if loop.node not in forward:
            sources = set(map(call_of, loop.reversed_results.values())) & forward
            found |= {loop.node, *sources} if sources else set()
    return [loop for loop in loops if loop.node in found]


class _Cutter:
    """Cuts loops in the order of the graph, and knows the parts of what was whole."""

    def __init__(self, num_segments: int) -> None:
        self._num_segments = num_segments
        self._parts: dict[fx.Node, dict[tuple[int, int], fx.Node]] = {}
        """The parts of a value along its first dim, by the steps from and to."""
        self.whole: dict[fx.Node, fx.Node] = {}
        """The values that take the places of results of loops."""

    def cut(self, loop: Loop) -> None:
        node, state = loop.node, loop.initial
        count = len(state)
        parts: dict[int, dict[tuple[int, int], fx.Node]] = {}
        with node.graph.inserting_before(node):
            for start, stop in self._find_bounds(loop):
                results = self._run_segment(loop, state, start, stop)
                state = results[:count]
                for i, result in enumerate(results[count:], count):
                    parts.setdefault(i, {})[start, stop] = result
            made = {
                item: state[i] if i < count else self._join(item, parts[i])
                for i, item in loop.items.items()
            }
        for item, new in made.items():
            item.replace_all_uses_with(new)
            item.graph.erase_node(item)
        node.graph.erase_node(node)
        self.whole |= made

    def erase_unread(self) -> None:
        """Erase the values that nobody reads as a whole."""
        for joined in self._parts:
            for reader in list(joined.users):
                if reader.target is aten.flip.default and not reader.users:
                    reader.graph.erase_node(reader)
            if not joined.users:
                joined.graph.erase_node(joined)

    def _find_bounds(self, loop: Loop) -> list[tuple[int, int]]:
        """Of each segment the first step and the one after its last."""
        steps = loop.num_steps
        size = -(-steps // self._num_segments)
        bounds = [(start, min(start + size, steps)) for start in range(0, steps, size)]
        if is_forward(loop.node):
            return bounds
        return [(steps - stop, steps - start) for start, stop in reversed(bounds)]

    def _run_segment(
        self, loop: Loop, state: list[fx.Node], start: int, stop: int
    ) -> list[fx.Node]:
        entries = [self._slice(x, start, stop, loop.node) for x in loop.stacks]
        count = len(state)
        values = tuple(
            _copy_of(value if i < count else value[start:stop])
            for i, value in enumerate(loop.results)
        )
        args = (loop.node.args[0], state, entries, *loop.node.args[3:])
        call = add_like(loop.node, loop.node.target, args, values)
        return [
            add_like(loop.node, operator.getitem, (call, i), value)
            for i, value in enumerate(values)
        ]

    def _slice(self, x: fx.Node, start: int, stop: int, reader: fx.Node) -> fx.Node:
        """The entries `start` to `stop` of `x` along its first dim, for a node that reads them."""
        known = self._parts.get(x, {}).get((start, stop))
        if known is not None:
            return known
        value = x.meta["val"]
        if x.target is aten.flip.default and x.args[1] == [0]:
            (turned, _), length = x.args, value.shape[0]
            assert isinstance(turned, fx.Node)
            part = self._slice(turned, length - stop, length - start, reader)
            return add_like(x, x.target, (part, [0]), _copy_of(value[start:stop]))
        return add_like(reader, aten.slice.Tensor, (x, 0, start, stop), value[start:stop])

    def _join(self, item: fx.Node, parts: dict[tuple[int, int], fx.Node]) -> fx.Node:
        """The value whole again, for readers that do not take it in these parts."""
        joined = add_like(item, aten.cat.default, (list(parts.values()),), item.meta["val"])
        self._parts[joined] = parts
        return joined


def _copy_of(value: Tensor) -> Tensor:
    """A fake tensor like `value`, with memory of its own."""
    return value.clone()
