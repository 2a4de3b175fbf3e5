"""A budget over the many calls of one function: its bytes, and its plans, outlive a size.

    step 1   4 x 40 tokens    "60%" is fixed: 3.2 MiB; a plan is made
    step 2   4 x 36           the same plan, since its peak is lower here
    step 3   2 x 20           no plan: plain autograd keeps within 3.2 MiB
    step 4   4 x 56           larger than all before: another plan, if none fits, with room to grow

A plan is numbers of operators. It is transferred to other sizes, where only bytes differ, and to
another trace of the function that has the same operators.
"""

import functools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from torchremat.autodiff.joint import Joint
from torchremat.autodiff.tiles.tile_joint import Tiling, tile_joint
from torchremat.core.formatting import human_bytes, human_seconds
from torchremat.core.source import warn_user
from torchremat.errors import BudgetWarning
from torchremat.graph.schedule import GraphSchedule
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.planning.budget import Budget, BudgetLike, bytes_of_limit
from torchremat.planning.planner import Planner, Search
from torchremat.planning.problem.backward_order import floor_of, reorder_backward
from torchremat.planning.problem.problem import Problem, Schedule
from torchremat.planning.problem.replay import Decisions
from torchremat.planning.problem.trial import Evaluator
from torchremat.planning.step.known_sizes import KnownSizes
from torchremat.planning.step.planned_step import PlannedStep
from torchremat.planning.step.problem_builder import NumericStep
from torchremat.planning.step.traced_step import differentiates, forward_only
from torchremat.planning.step.updated_step import UpdatedStep
from torchremat.planning.tile_choice import choose_tiles, may_cut

_logger = logging.getLogger("torchremat")

# Graphs whose numbers stay here: a function has one or two, and one more for each mode.
_MOST_GRAPHS = 8
# Times the largest sizes seen: the sizes that a later plan is made for, so that it serves those
# still to come. The first that can be planned for is taken. Chosen by hand: with 2, a range of
# lengths and batches that is four times as wide as what was seen needs one plan.
_GROWTH = (2.0, 1.5, 1.2, 1.0)

_declaring: ContextVar[bool] = ContextVar("_declaring", default=False)


@contextmanager
def declare_largest_step() -> Iterator[None]:
    """Let what jobs decide inside be for the largest step, which their user declares."""
    token = _declaring.set(True)
    try:
        yield
    finally:
        _declaring.reset(token)


@dataclass(frozen=True, eq=False)
class MadePlan:
    """A plan with the step that it was made for."""

    step: NumericStep
    schedule: Schedule

    def on(self, step: NumericStep) -> Schedule:
        """The schedule in the numbers of another step of the same function."""
        if _is_like(self.step.problem, step.problem):
            return self.schedule
        return _match_by_name(self, step)


def _is_like(a: Problem, b: Problem) -> bool:
    """Whether two problems differ in nothing but bytes and seconds."""
    return (
        len(a.operators) == len(b.operators)
        and (a.outputs, a.gradients, a.written) == (b.outputs, b.gradients, b.written)
        and all(
            (x.reads, x.writes, x.part, x.repeatable, x.draws)
            == (y.reads, y.writes, y.part, y.repeatable, y.draws)
            for x, y in zip(a.operators, b.operators, strict=True)
        )
    )


def _match_by_name(made: MadePlan, step: NumericStep) -> Schedule:
    """Save values with the same names of nodes; all others are recomputed when they are read."""
    names = [None if node is None else node.name for node in made.step.values]
    saved = {names[v] for v in made.schedule.saved}
    away = {names[v] for v in made.schedule.offloaded}
    evaluator = Evaluator(step.problem, 0)
    named = [(v, node.name) for v, node in enumerate(step.values) if node is not None]
    kept = frozenset(v for v, name in named if name in saved) | evaluator.fixed
    moved = frozenset(v for v, name in named if name in away) & step.problem.offloadable
    return evaluator(Decisions(kept - moved, offloaded=moved)).replay.schedule


@dataclass(eq=False)
class _Graph:
    """A joint graph with its numbers, and the schedules that were found for it."""

    joint: Joint
    fuses: bool
    updated: UpdatedStep | None
    planner: Planner
    usual: Planner
    """That without tiles and updates, of whose bytes a budget may be a part."""
    schedules: dict[Schedule, GraphSchedule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forget_sizes()

    @property
    def planners(self) -> tuple[Planner, Planner]:
        """With tiles and updates, and without."""
        return self.planner, self.usual

    def forget_sizes(self) -> None:
        """Forget what was chosen for sizes, since the budget is another."""
        self.known_sizes = KnownSizes(self.joint.module.graph)

    def graph_schedule(self, schedule: Schedule) -> GraphSchedule:
        """The schedule in nodes: the same object whenever it is the same schedule."""
        if schedule not in self.schedules:
            self.schedules[schedule] = self.planner.step.graph_schedule(schedule)
        return self.schedules[schedule]


class BudgetOptions(Protocol):
    """The policy of a job: `MemoryBudget`."""

    @property
    def budget(self) -> BudgetLike | None: ...
    @property
    def saved(self) -> int | str | None: ...
    @property
    def solver(self) -> str: ...
    @property
    def on_infeasible(self) -> str: ...
    @property
    def tile(self) -> bool: ...

    def planner(
        self, joint: Joint, *, fuses: bool, updated: UpdatedStep | None = None
    ) -> Planner: ...


def _count_floor(planner: Planner) -> int:
    """The bytes that the forward pass needs in its order; to ask other orders takes long."""
    least = floor_of(reorder_backward(planner.step.problem))
    return least + planner.resident + planner.step.copied_nbytes


class BudgetJob:
    """The bytes of a budget and the plans for it, over the calls of one function.

    Attributes:
        limit: the bytes, once they are known; `None` before, or if only saved bytes are limited.
        largest: the peak without rematerialisation of the largest step, which fixed the bytes.
        num_plans: how many searches for a plan there were.
        seconds: the time that they took.
    """

    def __init__(self, policy: BudgetOptions) -> None:
        self.policy = policy
        self.budget = None if policy.budget is None else Budget.of(policy.budget)
        self.saved = None if policy.saved is None else bytes_of_limit(policy.saved)
        self.limit = None if self.budget is None else self.budget.nbytes
        self.num_plans = 0
        self.seconds = 0.0
        self.largest: int | None = None
        self._resident = 0
        """The bytes that are there beside it, and count."""
        self._is_declared = False
        self._has_begun = False
        self._has_warned = False
        self._made: list[MadePlan] = []
        self._graphs: list[_Graph] = []
        self._tiled: dict[Joint, Joint] = {}
        self._tiling: Tiling | None = None
        self._hopeless: int | None = None
        """The plain peak from which on steps are known not to keep within the budget."""
        self._most: dict[str, int] = {}
        """The largest value of each symbol that was met."""

    def prepare_joint(
        self,
        joint: Joint,
        sizes: Sizes | None,
        updated: UpdatedStep | None = None,
        *,
        fuses: bool = False,
    ) -> Joint:
        """The joint graph with as many tiles, and segments of loops, as the budget needs.

        The number that was chosen for one trace stays for the others of the function.
        """
        if not differentiates(joint) or not may_cut(joint, tile=self.policy.tile):
            return joint
        if joint not in self._tiled:
            while len(self._tiled) >= _MOST_GRAPHS:
                self._tiled.pop(next(iter(self._tiled)))
            if self._tiling is None and not self._is_declared:
                self._tiling = self._choose_tiling(joint, sizes, updated, fuses)
            tiled = None if self._tiling is None else tile_joint(joint, self._tiling)
            self._tiled[joint] = tiled or joint
        return self._tiled[joint]

    def _choose_tiling(
        self, joint: Joint, sizes: Sizes | None, updated: UpdatedStep | None, fuses: bool
    ) -> Tiling | None:
        """How many tiles there are: enough for steps that are larger, if sizes vary."""
        chosen = None
        for growth in (1.0,) if sizes is None else _GROWTH:
            at = functools.partial(self._planner_at, sizes=sizes, growth=growth, fuses=fuses)
            make = functools.partial(at, updated=updated)
            budget = self.budget if self.limit is None else Budget(nbytes=self.limit)
            if updated is not None and budget is not None and budget.fraction is not None:
                usual = at(joint)
                budget = Budget(nbytes=usual.bytes_of(budget))
            chosen = choose_tiles(
                make(joint),
                budget,
                self.saved,
                make,
                tile=self.policy.tile,
                is_prompt=self._is_prompt,
            )
            if chosen.found.error is None:
                break
        return None if chosen is None else chosen.tiling

    def _planner_at(
        self,
        joint: Joint,
        sizes: Sizes | None,
        growth: float,
        fuses: bool,
        updated: UpdatedStep | None = None,
    ) -> Planner:
        planner = self.policy.planner(joint, fuses=fuses, updated=updated)
        if sizes is None:
            return planner
        return planner.at({name: int(size * growth) for name, size in sizes.items()})

    def schedule(
        self,
        joint: Joint,
        *,
        fuses: bool,
        sizes: Sizes | None,
        updated: UpdatedStep | None = None,
    ) -> GraphSchedule:
        """The schedule for a step: of a plan that was made, if one keeps within the budget."""
        if not differentiates(joint):
            return forward_only(joint)
        graph = self._graph_of(joint, fuses, updated)
        known = None if sizes is None else graph.known_sizes.find(sizes)
        if known is not None:
            return graph.graph_schedule(known)
        planner, usual = (p if sizes is None else p.at(sizes) for p in graph.planners)
        for name, size in (sizes or {}).items():
            self._most[name] = max(size, self._most.get(name, 0))
        limit = self.limit
        schedule = (
            self._fix_limit(planner, usual) or self._choose(planner) or self._make(graph, planner)
        )
        if self.limit != limit:
            for each in self._graphs:
                each.forget_sizes()
        if sizes is not None and self._hopeless is None:
            is_plain = schedule is planner.plain.schedule
            graph.known_sizes.note(sizes, schedule, is_plain=is_plain)
        self._has_begun = True
        self._is_declared |= _declaring.get()
        return graph.graph_schedule(schedule)

    def _graph_of(self, joint: Joint, fuses: bool, updated: UpdatedStep | None) -> _Graph:
        for graph in self._graphs:
            if (graph.joint, graph.fuses, graph.updated) == (joint, fuses, updated):
                return graph
        planner = usual = self.policy.planner(joint, fuses=fuses, updated=updated)
        if joint.untiled is not None or updated is not None:
            usual = planner.usual = self.policy.planner(joint.untiled or joint, fuses=fuses)
        self._graphs.insert(0, _Graph(joint, fuses, updated, planner, usual))
        del self._graphs[_MOST_GRAPHS:]
        return self._graphs[0]

    # --- bytes ---

    def _fix_limit(self, planner: Planner, usual: Planner) -> Schedule | None:
        """Fix the bytes of a relative budget, if this step is the largest so far.

        Gives the schedule where a search for the bytes finds one.
        """
        budget = self.budget
        plain = usual.plain.peak_bytes
        if budget is None or not budget.is_relative or self._is_declared:
            return None
        if self.largest is not None and plain <= self.largest:
            return None
        self.largest = plain
        self._resident = planner.resident
        if budget.fraction is not None:
            self.limit = usual.bytes_of(budget)
            return None
        known = min(self._fitting(planner, 1 << 62), key=planner.peak_of, default=None)
        if known is not None and self._adds_little(planner, known):
            self.limit = planner.peak_of(known)
            return known.schedule
        start = time.monotonic()
        found = planner.search(budget, is_prompt=self._is_prompt)
        self.seconds += time.monotonic() - start
        self.limit = found.planned.budget
        return self._keep(planner, found) if found.was_needed else found.planned.schedule

    def _adds_little(self, planner: Planner, planned: PlannedStep) -> bool:
        assert self.budget is not None
        if self.budget.added is None:
            return True
        return planned.costs.added_seconds <= self.budget.added * planner.plain_seconds

    # --- plans ---

    def _choose(self, planner: Planner) -> Schedule | None:
        """Plain autograd, else the plan that adds the least time, of those within the budget."""
        plain = planner.plain
        within = self.saved is None or plain.saved_bytes <= self.saved
        if within and (self.limit is None or planner.peak_of(plain) <= self.limit):
            return plain.schedule
        limit = 1 << 62 if self.limit is None else self.limit
        fitting = self._fitting(planner, limit)
        best = min(fitting, key=lambda p: p.costs.added_seconds, default=None)
        return None if best is None else best.schedule

    def _fitting(self, planner: Planner, limit: int) -> Iterator[PlannedStep]:
        for made in self._made:
            planned = planner.evaluate(made.on(planner.step))
            within = self.saved is None or planned.saved_bytes <= self.saved
            if within and planner.peak_of(planned) <= limit:
                yield planned

    def _make(self, graph: _Graph, planner: Planner) -> Schedule:
        """Search for a plan; all but the first are for larger steps than were met, if they can."""
        plain = planner.plain.peak_bytes
        if self._hopeless is not None and plain >= self._hopeless:
            return min(self._fitting(planner, 1 << 62), key=planner.peak_of).schedule
        if self._made and self._most:
            for growth in _GROWTH:
                sizes = {name: int(size * growth) for name, size in self._most.items()}
                larger = graph.planner.at(sizes)
                if self.limit is None or _count_floor(larger) <= self.limit:
                    found = self._search(larger, is_prompt=True)
                    if found.error is None:
                        return self._keep(larger, found)
        found = self._search(planner, is_prompt=self._is_prompt)
        if found.error is not None and self._is_prompt:
            found = self._search(planner, is_prompt=False)
        if found.error is not None:
            self._refuse(planner, found)
            self._hopeless = plain
        return self._keep(planner, found)

    @property
    def _is_prompt(self) -> bool:
        """Whether the first good plan is taken: the time of a long search is that of many steps."""
        return self.policy.solver == "auto"

    def _search(self, planner: Planner, *, is_prompt: bool) -> Search:
        near = self._made[-1].on(planner.step) if self._made else None
        budget = None if self.limit is None else Budget(nbytes=self.limit)
        start = time.monotonic()
        found = planner.search(budget, self.saved, near, is_prompt=is_prompt)
        self.seconds += time.monotonic() - start
        return found

    def _keep(self, planner: Planner, found: Search) -> Schedule:
        self._made.append(MadePlan(planner.step, found.planned.schedule))
        self.num_plans += 1
        _logger.info("%s: %s", self.policy, self.describe())
        return found.planned.schedule

    def _refuse(self, planner: Planner, found: Search) -> None:
        """Raise, or warn once, of a step that no plan keeps within the budget."""
        assert found.error is not None
        error = found.error(repr(self.policy))
        if self.policy.on_infeasible == "error" or not self._has_begun or self.limit is None:
            raise error
        if not self._has_warned:
            self._has_warned = True
            least = planner.peak_of(found.planned)
            warn_user(
                f"{self.policy!r}: a step that is larger than those before cannot keep within "
                f"{human_bytes(self.limit)} ({self.limit} bytes). It runs with the least peak that "
                f"was found, {human_bytes(least)} ({least} bytes), and so do others like it. Make "
                "batches smaller, or give a larger budget; on_infeasible='error' raises here",
                BudgetWarning,
            )

    def describe(self) -> str:
        """The bytes, where they come from, and the plans, as a line of a report."""
        parts = []
        if self.limit is not None and self.budget is not None and self.budget.is_relative:
            largest = human_bytes((self.largest or 0) + self._resident)
            step = "the step that was declared" if self._is_declared else "the largest step so far"
            parts.append(
                f"{human_bytes(self.limit)} ({self.limit} bytes), fixed by {step}, which takes "
                f"{largest} without rematerialisation"
            )
        count = f"{self.num_plans} plan{'s' * (self.num_plans != 1)}"
        parts.append(f"{count} in {human_seconds(self.seconds)}" if self.num_plans else "no plan")
        return "; ".join(parts)
