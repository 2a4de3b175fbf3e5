"""How a policy decides on a whole graph at once, such as a budget does; other policies do not."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from torchremat.autodiff.joint import Joint
from torchremat.graph.schedule import GraphSchedule
from torchremat.graph.symbolic_sizes import Sizes


class WholeGraphDecisions:
    """The decisions of a policy on a whole graph and on a step, here of one that takes none."""

    @property
    def is_whole_graph(self) -> bool:
        """Whether the policy decides on all values of a graph at once, through `schedule`."""
        return False

    def schedule(
        self, joint: Joint, *, fuses: bool = False, sizes: Sizes | None = None
    ) -> GraphSchedule:
        """The values of `joint` that are saved, and the order of operators, at these `sizes`.

        `fuses`: a compiler runs it, which fuses pointwise work with its readers into one kernel.
        """
        raise AssertionError(f"{self!r} decides on one value at a time")

    wants_tiles: ClassVar[bool] = False
    """Whether `prepare_joint` may put tiles into a graph."""

    def prepare_joint(self, joint: Joint, sizes: Sizes | None, *, fuses: bool = False) -> Joint:
        """The joint graph that the policy decides on: `joint`, or the same with tiles in it.

        `fuses` is as for `schedule`.
        """
        return joint

    def is_current(self, region: Any) -> bool:
        """Whether it would decide on `region` now as it did, by the optimizers that step there."""
        return True

    updates: Mapping[int, int] = MappingProxyType({})
    """The inputs whose gradients updates consume in the backward pass, and the bytes for each."""

    @property
    def steps_in_backward(self) -> bool:
        """Whether gradients are handed out one by one, since updates consume them."""
        return bool(self.updates)

    def begin_updates(self) -> None:
        """Begin those updates, if nobody waits for a gradient."""
