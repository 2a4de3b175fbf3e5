"""How many tiles and segments a plan has: of several joint graphs, that of the least added time.

More tiles need less memory. They take more time, since each reads the weights again. So plans for a
few numbers of tiles are compared, with all that they add to the step without tiles. Segments of
loops take no time of their own, and change no bit: they come first, without `tile` too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from torchremat.autodiff.joint import Joint
from torchremat.autodiff.tiles.loop_segments import count_steps
from torchremat.autodiff.tiles.scale_op import scale_gradient
from torchremat.autodiff.tiles.tile_joint import Tiling, tile_joint
from torchremat.autodiff.tiles.tiled_op import tiled_p
from torchremat.graph.nodes import body_of, is_forward, is_view
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
# Numbers of segments to try, each four times the one before it. Chosen by hand.
_SEGMENTS = (4, 16, 64)
# A first plan with segments that is so near its bound is the last. Chosen by hand.
_PROVED_GAP = 0.05
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


def make_tiled_joints(joint: Joint, *, tile: bool) -> Iterator[tuple[Tiling, Joint]]:
    """Joint graphs with more and more segments, and tiles if wanted, as far as there are some."""
    steps, num_segments = count_steps(joint), 0
    for count in _SEGMENTS:
        if count < steps:
            num_segments = count
            tiling = Tiling(0, num_segments=count)
            segmented = tile_joint(joint, tiling)
            assert segmented is not None
            yield tiling, segmented
    if tile:
        yield from _make_with_tiles(joint, num_segments)


def _make_with_tiles(joint: Joint, num_segments: int) -> Iterator[tuple[Tiling, Joint]]:
    most = 0
    for kind in _TILINGS:
        tiling = replace(kind, num_segments=num_segments)
        tiled = tile_joint(joint, tiling)
        count = 0 if tiled is None else count_regions(tiled)
        if tiled is None or (tiling.again and count <= most):
            continue
        if not tiling.again:
            most = count
        yield tiling, tiled


def may_cut(joint: Joint, *, tile: bool) -> bool:
    """Whether there may be a choice: tiles are wanted, or there is a loop to be cut."""
    return tile or count_steps(joint) > _SEGMENTS[0]


def choose_tiles(
    plain: Planner,
    budget: Budget | None,
    saved: int | None,
    make: MakePlanner,
    *,
    tile: bool,
    is_prompt: bool,
) -> TiledPlan:
    """The plan of least time within the budget, with no cuts or with more and more.

    If none keeps within it, that of the least peak. A budget that is searched for takes the least
    peak of all that add no more than it allows. `plain` is the planner without cuts. Without
    `tile` only loops are cut.
    """
    limit = _Limit(plain, budget)
    best = TiledPlan(plain, _search(plain, limit, saved, is_prompt=is_prompt), None, 0.0)
    finest: TiledPlan | None = None
    for tiling, joint in make_tiled_joints(plain.joint, tile=tile):
        is_met = best.found.error is None and not limit.wants_least
        if is_met and limit.is_little(best):
            break
        planner = make(joint)
        planner.usual = plain
        is_first = is_prompt or not (tiling.num_tiles or limit.wants_least)
        found = _search(planner, limit, saved, is_prompt=is_first)
        seconds = max(planner.plain_seconds - plain.plain_seconds, 0.0) + _scale_seconds(planner)
        made = TiledPlan(planner, found, tiling, seconds)
        finest = finest if tiling.num_tiles else made
        if is_met and not tile and limit.rank(best) <= limit.rank(made):
            break  # finer segments spare nothing more
        best = min(best, made, key=limit.rank)
    is_good = best.found.error is None and is_prompt
    if is_good or finest is None or limit.wants_least:
        return best
    return _search_on(best, finest, limit, saved)


def _search_on(best: TiledPlan, finest: TiledPlan, limit: "_Limit", saved: int | None) -> TiledPlan:
    """Look longer where loops alone are cut, of which each plan was the first good one."""
    first = best if best.found.error is None else finest
    if first.tiling is None or first.tiling.num_tiles or _is_proved(best.found):
        return best
    found = first.planner.search(limit.budget, saved, first.found.planned.schedule)
    return min(best, replace(first, found=found), key=limit.rank)


def _is_proved(found: Search) -> bool:
    """Whether a plan is known to add little more than any other."""
    added, bound = found.planned.costs.added_seconds, found.planned.lower_bound_seconds
    return found.error is None and added <= bound * (1 + _PROVED_GAP)


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


def find_tiled_values(joint: Joint) -> dict[str, str]:
    """`tiled` for each value of the forward pass that only tiles make."""
    calls = joint.module.graph.find_nodes(op="call_function", target=tiled_p)
    inside = [n for call in calls if is_forward(call) for n in body_of(call).graph.nodes]
    made = [
        n for n in inside if is_forward(n) and not is_view(n) and isinstance(n.meta["val"], Tensor)
    ]
    return {n.name: "tiled" for n in made}
