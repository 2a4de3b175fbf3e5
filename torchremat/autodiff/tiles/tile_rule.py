"""Rules of operators: how rows go through one, and what it is in a tile."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from torchremat.autodiff.tiles.cuts import WHOLE, Assignment, Cuts, Rows, shape_of

aten = torch.ops.aten


class ToBody(Protocol):
    """From arguments of the joint graph to those of the body that is written."""

    def __call__(self, arguments: Any, /) -> Any: ...

    def insert(self, op: Any, args: tuple[Any, ...], value: Tensor) -> fx.Node:
        """Add an operator to the body, with its fake result."""


def fit_operand(to_body: ToBody, node: fx.Node, cuts: Cuts, result: fx.Node, rows: Rows) -> fx.Node:
    """An operand in the body that is broadcast to the tile of `result`, whose rows are one dim."""
    made: fx.Node = to_body(node)
    own = rows.shift(len(shape_of(node)) - len(shape_of(result)))
    ones = [d for d in own.dims[1:] if d >= 0]
    if cuts[node] is not WHOLE or not ones:
        return made
    return to_body.insert(aten.squeeze.dims, (made, ones), made.meta["val"].squeeze(ones))


class TileRule(ABC):
    """A rule of an operator.

    Attributes:
        linear_in: the positions of arguments in which it is linear, all of them at once.
        any_of: whether it is so in each of them alone, as a product is.
    """

    linear_in: tuple[int, ...] = ()
    any_of = False

    @abstractmethod
    def infer(self, node: fx.Node, known: Cuts) -> Assignment | None:
        """How the result and the tensors that `node` reads lie in tiles; `None` if it cannot."""

    def write(self, node: fx.Node, cuts: Cuts, to_body: ToBody) -> tuple[Any, Any, Any]:
        """The operator, arguments and keywords in the body that runs a tile."""
        return node.target, to_body(node.args), to_body(node.kwargs)

    def finish(self, node: fx.Node, total: fx.Node) -> tuple[Any, Any] | None:
        """The operator and arguments that make the result of a sum over all tiles, if it is not."""
        return None

    def is_linear(self, node: fx.Node, late: Sequence[fx.Node]) -> bool:
        """Whether the result is linear in the arguments `late`, which depend on a cotangent."""
        positions = [i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a in late]
        if len(positions) != len(late) or not set(positions) <= set(self.linear_in):
            return False
        return len(positions) == 1 if self.any_of else self._is_linear_in_all(node, late)

    def _is_linear_in_all(self, node: fx.Node, late: Sequence[fx.Node]) -> bool:
        return True
