"""How many tiles a plan has: of several joint graphs, the one in which a budget costs least.

More tiles need less memory. They take more time, since each reads the weights again. So plans for a
few numbers of tiles are compared, with all that they add to the step without tiles.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchremat.autodiff.joint import Joint
from torchremat.autodiff.tiles.scale_op import scale_gradient
from torchremat.autodiff.tiles.tile_joint import Tiling, tile_joint
from torchremat.autodiff.tiles.tiled_op import tiled_p
from torchremat.planning.budget import Budget
from torchremat.planning.memory.storage_bytes import storage_nbytes
from torchremat.planning.planner import Planner, Search

# Each has tiles a quarter as large as the one before it. The last two make parts of the forward
# pass again, for regions whose gradients have to wait.
_TILINGS = (
    Tiling(4),
    Tiling(16),
    Tiling(64),
    Tiling(16, again=True),
    Tiling(64, again=True),
)
# A plan with tiles that adds no more, as a part of the step, is taken without a look at the next.
_LITTLE = 0.01

MakePlanner = Callable[[Joint], Planner]


@dataclass(frozen=True, eq=False)
class TiledPlan:
    """A joint graph, perhaps with tiles, and what a search found for it.

    Attributes:
        tiling: its tiles; `None` if it has none.
        tile_seconds: the time that tiles add to the step.
    """

    planner: Planner
    found: Search
    tiling: Tiling | None
    tile_seconds: float

    @property
    def added_seconds(self) -> float:
        return self.tile_seconds + self.found.planned.costs.added_seconds

    @property
    def peak_bytes(self) -> int:
        return self.planner.peak_of(self.found.planned)


def count_regions(joint: Joint) -> int:
    return len(joint.module.graph.find_nodes(op="call_function", target=tiled_p))


def make_tiled_joints(joint: Joint) -> Iterator[tuple[Tiling, Joint]]:
    """Joint graphs with more and more tiles, if there are values to be cut."""
    most = 0
    for tiling in _TILINGS:
        tiled = tile_joint(joint, tiling)
        count = 0 if tiled is None else count_regions(tiled)
        if tiled is None or (tiling.again and count <= most):
            continue
        if not tiling.again:
            most = count
        yield tiling, tiled


def choose_tiles(
    plain: Planner, budget: Budget | None, saved: int | None, make: MakePlanner, *, is_prompt: bool
) -> TiledPlan:
    """The plan of least time within the budget, of those without tiles and with more and more.

    If none keeps within it, that of the least peak. A budget that is searched for takes the least
    peak of all that add no more than it allows. `plain` is the planner without tiles.
    """
    limit = _Limit(plain, budget)
    best = TiledPlan(plain, _search(plain, limit, saved, is_prompt=is_prompt), None, 0.0)
    for tiling, joint in make_tiled_joints(plain.joint):
        if best.found.error is None and not limit.wants_least and limit.is_little(best):
            break
        planner = make(joint)
        found = _search(planner, limit, saved, is_prompt=is_prompt)
        seconds = max(planner.plain_seconds - plain.plain_seconds, 0.0) + _scale_seconds(planner)
        best = min(best, TiledPlan(planner, found, tiling, seconds), key=limit.rank)
    return best


def _scale_seconds(planner: Planner) -> float:
    """The time in which gradients from tiles are multiplied where they are."""
    nodes = planner.joint.module.graph.find_nodes(op="call_function", target=scale_gradient)
    nbytes = sum(2 * storage_nbytes(node.meta["val"]) for node in nodes)  # read and written
    return nbytes / planner.cost_model.rates.memory_rate()


def _search(planner: Planner, limit: "_Limit", saved: int | None, *, is_prompt: bool) -> Search:
    return planner.search(limit.budget, saved, is_prompt=is_prompt)


class _Limit:
    """The budget in bytes, which are those of the step without tiles, and which plan is better."""

    def __init__(self, plain: Planner, budget: Budget | None) -> None:
        self.plain_seconds = plain.plain_seconds
        self.wants_least = budget is not None and budget.is_searched
        self.budget = budget
        if budget is not None and not budget.is_searched:
            self.budget = Budget(nbytes=plain.bytes_of(budget))
        self.most_seconds = None
        if budget is not None and budget.added is not None:
            self.most_seconds = budget.added * self.plain_seconds

    def is_little(self, plan: TiledPlan) -> bool:
        return plan.added_seconds <= _LITTLE * self.plain_seconds

    def rank(self, plan: TiledPlan) -> tuple[bool, float, float]:
        """Smaller for the better plan."""
        seconds, peak = plan.added_seconds, float(plan.peak_bytes)
        if self.wants_least:
            too_slow = self.most_seconds is not None and seconds > self.most_seconds
            return too_slow, peak, seconds
        fails = plan.found.error is not None
        return fails, peak if fails else seconds, peak
