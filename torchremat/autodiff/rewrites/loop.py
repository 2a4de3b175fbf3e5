"""A loop of a graph: a call of PyTorch's `scan`, by its parts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torchremat.graph.nodes import call_of, inner_graphs_of, is_item, item_index
from torchremat.graph.ops import op_name

aten = torch.ops.aten

# Of shorter loops a segment is a step or two, and little is spared. Chosen by hand.
_LEAST_STEPS = 4


@dataclass(frozen=True, eq=False)
class Loop:
    """A call of PyTorch's `scan` in a graph: `scan(step, initial, stacks, others)`."""

    node: fx.Node

    @property
    def initial(self) -> list[fx.Node]:
        return list(self.node.args[1])  # type: ignore[arg-type]

    @property
    def stacks(self) -> list[fx.Node]:
        """The values of which each step reads one entry along the first dim."""
        return list(self.node.args[2])  # type: ignore[arg-type]

    @property
    def others(self) -> list[Any]:
        """The values that every step reads as a whole."""
        return list(self.node.args[3])  # type: ignore[arg-type]

    @property
    def body(self) -> fx.GraphModule:
        """The graph of a step: from state, slices and others to state and results."""
        return inner_graphs_of(self.node)[0]

    @property
    def num_steps(self) -> Any:
        return self.stacks[0].meta["val"].shape[0]

    @property
    def has_known_steps(self) -> bool:
        """Whether the number of steps is known, and a result is what its segments give in turn."""
        stacked = self.results[len(self.initial) :]
        is_known = isinstance(self.num_steps, int) and self.num_steps >= _LEAST_STEPS
        return is_known and all(value.is_contiguous() for value in stacked)

    @property
    def results(self) -> list[Tensor]:
        return list(self.node.meta["val"])

    @property
    def items(self) -> dict[int, fx.Node]:
        """The nodes that take its results, by position."""
        return {item_index(user): user for user in self.node.users}

    @property
    def reversed_results(self) -> dict[int, fx.Node]:
        """The nodes that take results of other loops, which it reads with the last step first.

        They are given by position among `stacks`.
        """
        found = {}
        for i, x in enumerate(self.stacks):
            if x.target is aten.flip.default and x.args[1] == [0]:
                item = x.args[0]
                if isinstance(item, fx.Node) and is_item(item) and is_loop(call_of(item)):
                    found[i] = item
        return found


def is_loop(node: fx.Node) -> bool:
    """Whether `node` calls `scan`, and its results are taken one by one."""
    if node.op != "call_function" or op_name(node.target) != "higher_order.scan":
        return False
    return bool(node.args[2]) and all(is_item(user) for user in node.users)
