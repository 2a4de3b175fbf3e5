"""From a joint graph and a budget to a schedule of the graph.

A limit on saved bytes becomes an operator of the problem, so that every solver obeys it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from torchremat.autodiff.joint import Joint
from torchremat.core.formatting import human_bytes
from torchremat.core.progress import show_progress
from torchremat.errors import BudgetError, PlanError, PolicyValueError, nearest_names
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.planning.budget import Budget
from torchremat.planning.cost_model import CostModel
from torchremat.planning.problem.backward_order import floor_of
from torchremat.planning.problem.orders import find_lowest_need, orders_of
from torchremat.planning.problem.problem import Operator, Part, Problem, Schedule
from torchremat.planning.problem.replay import replay_of
from torchremat.planning.problem.schedule_costs import costs_of
from torchremat.planning.search.shared_solve import solve_once, text_of
from torchremat.planning.search.solver_options import Solution, SolverOptions
from torchremat.planning.solver import solve_orders
from torchremat.planning.step.discounted_writes import discount_writes
from torchremat.planning.step.fingerprint import lines_of
from torchremat.planning.step.planned_step import PlannedStep
from torchremat.planning.step.problem_builder import NumericStep
from torchremat.planning.step.refused_budget import (
    build_saved_error,
    describe_gradients,
    describe_peak,
)
from torchremat.planning.step.traced_step import NO_UPDATES
from torchremat.planning.step.updated_step import UpdatedStep

SOLVERS = ("auto", "milp", "local")


def check_solver(solver: str) -> str:
    """`solver`, if there is such a one; else `PolicyValueError` (a `ValueError`)."""
    if solver not in SOLVERS:
        raise PolicyValueError(
            f"solver={solver!r} is none, {nearest_names(str(solver), SOLVERS)}. 'auto' takes the "
            "integer program (HiGHS, through SciPy) and improves on it; 'local' does without it"
        )
    return solver


def host_rate_of(model: CostModel) -> float:
    """The bytes a second to the host and back; raises `PlanError` without such a link."""
    seconds = model.transfer_seconds(1)
    if seconds is None:
        raise PlanError(
            f"offload=True: {model!r} has no link to a host over which to copy. Name a device that "
            "has one (device='h100'), give Rates with host_bytes_per_second, or plan with "
            "offload=False"
        )
    return 1 / seconds


# Times the peak without rematerialisation, where only saved bytes are limited: with so much room
# everything may be recomputed.
_ENOUGH = 4
# Of the time for one plan, a step of the search for the least memory within some time: six of them
# halve the room. Chosen by hand.
_TIME_SHARE = 0.2
# The part of the room to which that search finds the least; chosen by hand.
_TIME_ACCURACY = 0.01
# What is counted twice differs from plan to plan. So a search looks farther down too, at these
# parts of the way to what the problem needs at least. Chosen by hand.
_FARTHER_DOWN = (0.1, 0.25, 0.5, 0.75)
# Up to this part of the added time a gap needs no reason.
_SMALL_GAP = 0.05
# What a bound says of the problem is not so of what runs.
_COUNTED_TWICE = "writes in place are counted as new memory where schedules are compared"
# The search for these sizes found no plan within the budget, and the one of other sizes is.
_TAKEN_OVER = "the plan was made for other sizes, and the search for these found none"


@dataclass(frozen=True, eq=False)
class Search:
    """The result of a search: a step within the budget, or the one of least peak and the error.

    `was_needed`: whether a solver ran, as it does where plain autograd exceeds the budget.
    """

    planned: PlannedStep
    error: Callable[[str], BudgetError] | None = None
    was_needed: bool = True


class Planner:
    def __init__(
        self,
        joint: Joint,
        *,
        cost_model: CostModel | None = None,
        solver: str = "auto",
        seconds: float | None = None,
        resident: int = 0,
        offload: bool = False,
        step: NumericStep | None = None,
        updated: UpdatedStep | None = None,
    ) -> None:
        self.joint = joint
        self.cost_model = cost_model or CostModel.of(None)
        self.solver = check_solver(solver)
        self.seconds = seconds
        self.resident = resident
        """Bytes that are there before the step, and count."""
        self.updated = updated
        self.host_bytes_per_second = host_rate_of(self.cost_model) if offload else None
        if step is not None:
            self.step = step
        self.usual = self
        """The planner without tiles, segments and updates, whose peak errors name."""
        self._relative: dict[Budget, Search] = {}
        self._bounds: dict[int, float] = {}

    @cached_property
    def step(self) -> NumericStep:
        return NumericStep.of(
            self.joint,
            self.cost_model.seconds,
            host_bytes_per_second=self.host_bytes_per_second,
            updates=NO_UPDATES if self.updated is None else self.updated.updates,
        )

    def at(self, sizes: Sizes, resident: int | None = None) -> Self:
        """The planner of the same graph with these values of its symbols.

        `resident` is for these sizes; without it, as many bytes are there before the step as here.
        """
        made = type(self)(
            self.joint,
            cost_model=self.cost_model,
            solver=self.solver,
            seconds=self.seconds,
            resident=self.resident if resident is None else resident,
            offload=self.host_bytes_per_second is not None,
            step=self.step.at(sizes, self.cost_model.seconds),
            updated=self.updated,
        )
        if self.usual is not self:
            made.usual = self.usual.at(sizes, resident)
        return made

    @cached_property
    def plain(self) -> PlannedStep:
        return self.evaluate(replay_of(self.step.problem, self.step.plain).schedule)

    def evaluate(self, schedule: Schedule, bound: float = 0.0, budget: int = 0) -> PlannedStep:
        costs = costs_of(self.step.problem, schedule)
        return PlannedStep(self.step, schedule, costs, bound, budget or costs.peak)

    def peak_of(self, planned: PlannedStep) -> int:
        """The bytes that a budget must have for `planned`."""
        is_whole = planned.exact_peak is not None or planned.schedule is self.plain.schedule
        copied = 0 if is_whole else self.step.copied_nbytes
        return planned.peak_bytes + copied + self.resident

    def bytes_of(self, budget: Budget) -> int:
        if budget.is_searched:
            return self._find_relative(budget, is_prompt=False).planned.budget
        return budget.bytes_of(self.resident + self.plain.peak_bytes)

    def plan(
        self,
        budget: Budget | None,
        asked: str,
        saved: int | None = None,
        near: Schedule | None = None,
    ) -> PlannedStep:
        """The schedule of least added time within `budget`, which the user wrote as `asked`.

        The forward pass saves no more than `saved` bytes, if that is given; then there may be no
        budget. The search begins from `near`, if that is given. Raises `BudgetError` with the least
        budget that can be met if none was found.
        """
        found = self.search(budget, saved, near)
        if found.error is not None:
            raise found.error(asked)
        return found.planned

    def search(
        self,
        budget: Budget | None,
        saved: int | None = None,
        near: Schedule | None = None,
        *,
        seconds: float | None = None,
        is_prompt: bool = False,
    ) -> Search:
        """Look for the schedule that `plan` returns, beginning from `near`, if that is given.

        `seconds` and `is_prompt`: as `SolverOptions` has them.
        """
        if budget is not None and budget.is_searched:
            return self._find_relative(budget, is_prompt=is_prompt)
        within = saved is None or self.plain.saved_bytes <= saved
        nbytes = _ENOUGH * self.plain.peak_bytes if budget is None else self.bytes_of(budget)
        room = nbytes - self.resident
        if room >= self.plain.peak_bytes and within:
            return Search(replace(self.plain, budget=nbytes), was_needed=False)
        room -= self.step.copied_nbytes
        problems = self._orders
        if saved is not None:
            limit = saved - self.step.copied_nbytes
            problems = tuple(add_saved_limit(problem, room, limit) for problem in problems)
        solve = functools.partial(
            self._solve_problems, problems=problems, near=near, seconds=seconds, is_prompt=is_prompt
        )
        solution, proves = solve(room), saved is None and not is_prompt
        if solution.schedule is not None:
            schedule = drop_limit_operator(self.step.problem, solution.schedule)
            planned = self.evaluate(schedule, budget=nbytes)
            return Search(_add_bound(self, planned, solution, is_proved=proves))
        above = None if saved is not None else _search_above(self, solve, nbytes, solution.lowest)
        if above is not None and self.peak_of(above) <= nbytes:
            return Search(_add_bound(self, above, solution, is_proved=proves))
        if near is not None:
            known = self.evaluate(near, solution.lower_bound_seconds, nbytes)
            if self.peak_of(known) <= nbytes and (saved is None or known.saved_bytes <= saved):
                return Search(replace(known, gap_reason=_TAKEN_OVER))
        excess = None if problems[0] is self._orders[0] else solution.least_peak - room
        return _give_up(self, solution, above, nbytes, saved, excess)

    def _find_relative(self, budget: Budget, *, is_prompt: bool) -> Search:
        """The schedule of least peak, or of the least that adds so much time at most."""
        if budget not in self._relative:
            if budget.added is None:
                found = self._find_least(is_prompt=is_prompt)
            else:
                allowed = budget.added * self.plain_seconds
                found = self._find_within_seconds(allowed, is_prompt=is_prompt)
            planned = replace(found, budget=self.peak_of(found))
            self._relative[budget] = Search(planned, was_needed=found is not self.plain)
        return self._relative[budget]

    @cached_property
    def plain_seconds(self) -> float:
        """The time of the step without rematerialisation."""
        problem = self.step.problem
        return problem.step_seconds

    def find_lowest(self, seconds: float | None = None) -> PlannedStep:
        """The schedule of least peak that is found within `seconds`, whatever time it adds."""
        return self.evaluate(self._solve_problems(1, self._orders, seconds=seconds).lowest)

    def _find_least(self, *, is_prompt: bool) -> PlannedStep:
        least = self.find_lowest()
        if self.peak_of(least) >= self.peak_of(self.plain):
            return self.plain
        near = least.schedule if is_prompt else None
        return self._find_in_room(least.costs.peak, near=near, is_prompt=is_prompt) or least

    def _find_in_room(
        self,
        room: int,
        near: Schedule | None = None,
        *,
        is_prompt: bool = False,
    ) -> PlannedStep | None:
        solution = self._solve_problems(room, self._orders, near=near, is_prompt=is_prompt)
        if solution.schedule is None:
            return None
        planned = self.evaluate(solution.schedule, solution.lower_bound_seconds)
        return replace(planned, gap_reason=solution.gap_reason)

    def _find_within_seconds(self, allowed: float, *, is_prompt: bool) -> PlannedStep:
        """The schedule of least peak that adds at most `allowed` seconds, by halving the room."""
        best, low = self.plain, min(find_lowest_need(problem) for problem in self._orders)
        least: PlannedStep | None = None
        while best.costs.peak - low > best.costs.peak * _TIME_ACCURACY:
            room = (low + best.costs.peak) // 2
            found = self._solve_problems(room, self._orders, enough=allowed, share=_TIME_SHARE)
            if found.schedule is not None and found.added_seconds <= allowed:
                best = self.evaluate(found.schedule, found.lower_bound_seconds)
                continue
            low = room
            is_open = found.lower_bound_seconds <= allowed
            if least is None and is_open:  # perhaps nothing runs in so little room
                least = self._find_least(is_prompt=is_prompt)
                if least.costs.added_seconds <= allowed:
                    return least
                low = max(low, least.costs.peak)
        if best.costs.added_seconds == 0:
            return best
        again = self._find_in_room(best.costs.peak, near=best.schedule, is_prompt=is_prompt)
        return again if again and again.costs.added_seconds <= allowed else best

    @cached_property
    def _orders(self) -> tuple[Problem, ...]:
        # code that fuses is put in order by its compiler, which keeps none of ours
        return orders_of(self.step.problem, may_move_forward=not self.cost_model.fuses)

    def find_bound(self, room: int) -> float:
        """The time that every schedule adds which runs in `room` bytes, writes in place counted."""
        if room not in self._bounds:
            self._bounds[room] = 0.0
            problem = discount_writes(self.step, self.plain.schedule, self.plain.peak_bytes)
            if problem is not None:
                orders = orders_of(problem, may_move_forward=not self.cost_model.fuses)
                found = self._solve_problems(room, orders, is_prompt=True)
                self._bounds[room] = found.lower_bound_seconds
        return self._bounds[room]

    def _solve_problems(
        self,
        room: int,
        problems: tuple[Problem, ...],
        seconds: float | None = None,
        **how: Any,
    ) -> Solution:
        """The schedule for `room` bytes, which one process looks for where there are several."""
        options = SolverOptions(seconds or self.seconds, solver=self.solver, **how)

        def describe() -> str:
            asked = f"{room} {options} {self.cost_model!r}"
            return "\n".join([asked, *map(text_of, problems), *lines_of(self.joint.module.graph)])

        return solve_once(describe, lambda: _solve(problems, room, options))

    @cached_property
    def floor(self) -> int:
        """The bytes that every schedule needs, since one operator does."""
        least = min(floor_of(problem) for problem in self._orders)
        return least + self.resident + self.step.copied_nbytes

    def _build_budget_error(
        self, asked: str, *, nbytes: int, solution: Solution, above: PlannedStep | None
    ) -> BudgetError:
        least = solution.least_peak + self.step.copied_nbytes + self.resident
        plain = self.usual.plain.peak_bytes + self.resident
        least = min(least, plain, *([] if above is None else [self.peak_of(above)]))
        besides = f", {human_bytes(self.resident)} of it there anyway" if self.resident else ""
        gradients = describe_gradients(self.step.problem, least)
        return BudgetError(
            f"{asked}: a peak of {human_bytes(nbytes)} cannot be met. The least that was found is "
            f"{human_bytes(least)} ({least} bytes{besides}), of {human_bytes(plain)} without "
            f"rematerialisation. {describe_peak(self.step, solution.lowest)}{gradients}Give a "
            f"budget of at least {least}, a smaller batch, or smaller parts (nn.wrap with "
            "select=...)",
            least,
        )


def _give_up(
    planner: Planner,
    solution: Solution,
    above: PlannedStep | None,
    nbytes: int,
    saved: int | None,
    excess: int | None,
) -> Search:
    """The step of least peak with an error; `excess`: how many bytes more must be saved, if so."""
    lowest = drop_limit_operator(planner.step.problem, solution.lowest)
    error = functools.partial(
        planner._build_budget_error, nbytes=nbytes, solution=solution, above=above
    )
    if excess is not None:
        error = functools.partial(build_saved_error, saved, nbytes=nbytes, excess=excess)
    return Search(above or planner.evaluate(lowest, budget=nbytes), error)


def _search_above(
    planner: Planner, solve: Callable[[int], Solution], nbytes: int, lowest: Schedule | None
) -> PlannedStep | None:
    """A schedule that keeps to `nbytes` as it runs, though the problem counts more.

    Else that of the least peak that was found; `None` where nothing is counted twice. `lowest`: the
    schedule of least peak that the search below `nbytes` found.
    """
    if not planner.step.exact_peaks.are_needed:
        return None
    excess = max(planner.plain.costs.peak - planner.plain.peak_bytes, 0)
    first = nbytes - planner.resident - planner.step.copied_nbytes + excess
    floor = planner.floor - planner.resident - planner.step.copied_nbytes
    top = first if first > floor else planner.plain.costs.peak
    best: PlannedStep | None = None
    for room in (first, *(top - int(share * (top - floor)) for share in _FARTHER_DOWN)):
        above = solve(room)
        for schedule in filter(None, (above.schedule, above.lowest, lowest)):
            planned = planner.evaluate(schedule, budget=nbytes)
            if planner.peak_of(planned) <= nbytes:
                return planned
            if best is None or planner.peak_of(planned) < planner.peak_of(best):
                best = planned
    return best


def _add_bound(
    planner: Planner, planned: PlannedStep, solution: Solution, *, is_proved: bool
) -> PlannedStep:
    """Note the bound of a search, which holds only for what the problem counts.

    Where that is more than what runs, another is proved if `is_proved`, which takes a search.
    """
    if planned.step.exact_peaks.are_needed:
        bound = planner.find_bound(planned.budget - planner.resident) if is_proved else 0.0
        added = planned.costs.added_seconds
        is_near = bound >= (1 - _SMALL_GAP) * added
        reason = "" if is_near else _COUNTED_TWICE
        return replace(planned, lower_bound_seconds=min(bound, added), gap_reason=reason)
    bound, reason = solution.lower_bound_seconds, solution.gap_reason
    return replace(planned, lower_bound_seconds=bound, gap_reason=reason)


@functools.lru_cache(maxsize=64)  # layers of a model that are wrapped one by one are alike
def _solve(problems: tuple[Problem, ...], room: int, options: SolverOptions) -> Solution:
    with show_progress(f"planning {len(problems[0].operators)} operators") as progress:
        options = replace(options, progress=progress)
        return solve_orders(problems, room, options)


def add_saved_limit(problem: Problem, room: int, limit: int) -> Problem:
    """`problem` so that what keeps within `room` saves no more than `limit` bytes, outputs apart.

    A new operator begins the backward pass. It writes a value of all other bytes of `room`, so that
    only `limit` bytes fit beside it. The numbers of operators and values stay;
    `drop_limit_operator` takes the new one out of a schedule.

    >>> sine = Operator((), (0,), 1.0, Part.FORWARD)
    >>> cosine = Operator((0,), (1,), 1.0, Part.BACKWARD)
    >>> limited = add_saved_limit(Problem((sine, cosine), (4, 4)), 100, 6)
    >>> limited.nbytes, limited.backward
    ((4, 4, 94), (2, 1))
    """
    always = problem.constant + problem.backward_constant
    always += sum(problem.nbytes[v] for v in problem.outputs)
    taken = room - always - limit
    if taken <= 0:  # the budget is the narrower
        return problem
    wait = Operator((), (len(problem.nbytes),), 0.0, Part.BACKWARD, repeatable=False)
    return replace(
        problem,
        operators=(*problem.operators, wait),
        nbytes=(*problem.nbytes, taken),
        backward_order=(len(problem.operators), *problem.backward),
    )


def drop_limit_operator(problem: Problem, schedule: Schedule) -> Schedule:
    end = len(problem.operators)
    return replace(schedule, backward=tuple(o for o in schedule.backward if o < end))
