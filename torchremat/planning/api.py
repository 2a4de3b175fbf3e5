"""`plan` and `pareto`: plans of a function at given arguments."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import fx

from torchremat.autodiff.joint import Joint
from torchremat.errors import ArgumentTypeError, BudgetError, PlanError
from torchremat.planning.budget import Budget, BudgetLike
from torchremat.planning.cost_model import CostModel, StepDevice
from torchremat.planning.costs.workspace_bytes import allow_workspace
from torchremat.planning.memory.resident_bytes import OptimizerLike, Resident
from torchremat.planning.memory.timeline import Timeline
from torchremat.planning.memory.update_bytes import find_updates, steps_already
from torchremat.planning.plan import Figures, Pareto, ParetoPoint, Plan
from torchremat.planning.planner import Planner
from torchremat.planning.problem.problem import Part, Schedule
from torchremat.planning.step.fingerprint import lines_of
from torchremat.planning.step.order import order_of
from torchremat.planning.step.planned_step import PlannedStep
from torchremat.planning.step.traced_step import (
    Updates,
    WholeGraphPolicy,
    graphs_of,
    region_of,
    timeline_of,
)
from torchremat.planning.step.updated_step import UpdatedStep
from torchremat.planning.tile_choice import choose_tiles, find_tiled_values, may_cut
from torchremat.planning.whole_step import WholeStepPlanner
from torchremat.policies.builtin import plain_autograd
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.program.region import Region
from torchremat.remat.tracing.input_labels import refuse_misspelt


def plan(
    fun_or_module: Callable[..., Any],
    *args: Any,
    budget: BudgetLike,
    optimizer: OptimizerLike = None,
    solver: str = "auto",
    cost_model: CostModel | None = None,
    device: str | torch.device | None = None,
    offload: bool = False,
    tile: bool = False,
    **kwargs: Any,
) -> Plan:
    """Choose which values are saved and which recomputed, so that the peak keeps within `budget`.

    The forward and the backward pass of `fun_or_module` at these arguments are traced, on fake
    tensors: nothing the size of the model is allocated, and the model may be on the meta device.
    Checkpoints inside (`nn.wrap`) are opened: the plan decides on what is in them, too. Chosen is
    the schedule that adds the least time. The peak is of what the passes make: values,
    outputs and gradients, each storage once. With an `optimizer` it is of the whole step, and what
    is there anyway counts too: parameters, buffers, inputs and the optimizer's state.

    Args:
        fun_or_module: a function of trees of tensors, or an `nn.Module`.
        *args: its arguments; only their shapes, dtypes and devices matter.
        budget: bytes (an `int`, or text such as `"2GiB"`), or a fraction in (0, 1] of the peak
            without rematerialisation (a `float`, or `"50%"`). `"least"` is the least peak, and
            `"time:+10%"` the least with which a step takes at most so much more time.
        optimizer: an optimizer or its class (`torch.optim.AdamW`). If no plan keeps to the budget
            otherwise, and for the least memory, it counts on updates in the backward pass, which
            `from_plan` begins: `Plan.updates_in_backward` says of how many parameters.
        solver: `"auto"`, `"milp"` (integer programs) or `"local"` (without them).
        cost_model: what operators cost in seconds; by default a roofline of `device`. For a step
            that inductor is to run, `CostModel.of(device).fused()`.
        device: where the step is to run (`"cuda"`, `"h100"`); by default where the tensors are, or
            this machine if they are on the meta device. Those take the kernels of that device.
        offload: whether values may be copied to the host and back, where the device has a link to
            one. `from_plan` runs such a plan in eager mode; a compiler saves what it offloads. With
            updates in the backward pass, the optimizer's state may be on the host as well.
        tile: whether operators that are independent along rows may run for some rows at a time, so
            that logits, say, are never whole. Sums over tiles round otherwise than one sum.
        **kwargs: keyword arguments of `fun_or_module`.

    Returns:
        The `Plan`. `checkpoint(fun, policy=checkpoint_policies.from_plan(plan))` runs it.

    Raises:
        BudgetError: (a `RuntimeError`) with the least budget that can be met, if this cannot.
        TypeError, ValueError: for a budget, solver, cost model or device that is none, and where
            `checkpoint` raises them; `ValueError` also for `offload=True` without a link.

    >>> import torch
    >>> def f(x, w):
    ...     for _ in range(4):
    ...         x = torch.tanh(x @ w)
    ...     return x.sum()
    >>> x, w = torch.ones(64, 64, device="meta"), torch.ones(64, 64, device="meta")
    >>> found = plan(f, x, w, budget="80KB")
    >>> found.peak_bytes <= 80_000 < found.baseline.peak_bytes
    True
    """
    refuse_misspelt(plan, fun_or_module, kwargs)
    asked = Budget.of(budget)
    planning = _prepare(fun_or_module, args, kwargs, optimizer, solver, cost_model, device, offload)
    request = f"plan(budget={budget!r}{', tile=True' if tile else ''})"
    found: list[Plan | BudgetError] = []
    for way in planning.list_ways(optimizer, may_wait=asked.added is None):
        try:
            made = way.plan(asked if way is planning else planning.fix(asked), request, tile=tile)
        except BudgetError as error:
            found.append(error)
            continue
        if not asked.is_searched:
            return made
        found.append(made)
    plans = [made for made in found if isinstance(made, Plan)]
    if not plans:
        raise found[-1]  # type: ignore[misc]  # the last way takes the least memory
    return min(plans, key=lambda made: made.peak_bytes)


def pareto(
    fun_or_module: Callable[..., Any],
    *args: Any,
    points: int | Sequence[BudgetLike] = 8,
    optimizer: OptimizerLike = None,
    solver: str = "auto",
    cost_model: CostModel | None = None,
    device: str | torch.device | None = None,
    offload: bool = False,
    **kwargs: Any,
) -> Pareto:
    """The curve of least added time against peak memory. Arguments are those of `plan`.

    Args:
        fun_or_module: a function of trees of tensors, or an `nn.Module`.
        *args: its arguments.
        points: the budgets, or how many of them, evenly from the peak without rematerialisation
            down to the least that can be met. Budgets that cannot be met are left out.
        optimizer: see `plan`.
        solver: see `plan`.
        cost_model: see `plan`.
        device: see `plan`.
        offload: see `plan`.
        **kwargs: keyword arguments of `fun_or_module`.

    Returns:
        The `Pareto` curve; `print` shows it as a table.

    >>> import torch
    >>> def f(x, w):
    ...     for _ in range(4):
    ...         x = torch.tanh(x @ w)
    ...     return x.sum()
    >>> x, w = torch.ones(64, 64, device="meta"), torch.ones(64, 64, device="meta")
    >>> curve = pareto(f, x, w, points=["100%", "80KB", "1KB"])
    >>> [point.peak_bytes <= point.budget for point in curve], curve.least_bytes > 1000
    ([True, True], True)
    """
    refuse_misspelt(pareto, fun_or_module, kwargs)
    planning = _prepare(fun_or_module, args, kwargs, optimizer, solver, cost_model, device, offload)
    if isinstance(points, int) and not isinstance(points, bool):
        if points < 1:
            raise PlanError(f"pareto(points={points}): there must be at least one")
        budgets = planning.even_budgets(points)
    elif isinstance(points, Sequence) and not isinstance(points, str):
        budgets = [Budget.of(point) for point in points]
    else:
        raise ArgumentTypeError(
            f"pareto(points={points!r}): points is how many budgets, or a list of them"
        )
    found = []
    least = None
    for budget in sorted(budgets, key=planning.planner.bytes_of, reverse=True):
        try:
            made = planning.plan(budget, f"pareto(points={points!r})")
        except BudgetError as error:
            least = error.least_bytes if least is None else min(least, error.least_bytes)
        else:
            found.append(ParetoPoint(made.budget, made))
    return Pareto(_drop_detours(found), least)


def _drop_detours(points: Sequence[ParetoPoint]) -> tuple[ParetoPoint, ...]:
    """A plan for a smaller budget keeps within a larger one: where it adds less, it is taken."""
    better: list[ParetoPoint] = []
    for point in reversed(points):
        plan = point.plan
        if better and better[-1].recompute_seconds < point.recompute_seconds:
            bound = min(plan.lower_bound_seconds, better[-1].recompute_seconds)
            plan = replace(
                better[-1].plan,
                budget=point.budget,
                lower_bound_seconds=bound,
                gap_reason=plan.gap_reason,
            )
        better.append(ParetoPoint(point.budget, plan))
    return tuple(reversed(better))


def _prepare(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    optimizer: OptimizerLike,
    solver: str,
    cost_model: CostModel | None,
    device: str | torch.device | None,
    offload: bool,
) -> "PlannedFunction":
    place = StepDevice.of(fun, args, kwargs, cost_model, device)
    region = region_of(fun, args, kwargs, WholeGraphPolicy(), gpu=place.gpu)
    model = place.model_of(region)
    return PlannedFunction(region, model, solver, Resident.of(region, optimizer), offload)


class PlannedFunction:
    """A traced step with its planner: it makes a `Plan` for each budget."""

    def __init__(
        self,
        region: Region,
        model: CostModel,
        solver: str,
        resident: Resident,
        offload: bool,
        updates: Updates | None = None,
        optimizer: OptimizerLike = None,
    ) -> None:
        self.region = region
        self.updates = updates or {}
        self._optimizer = optimizer
        self.model = model
        self.joint = region.joint_for(region.usual_outputs)
        self.resident = sum(resident.tensors)
        self._resident = resident
        self._solver = solver
        self._offload = offload
        self._updated = UpdatedStep(region, self.updates, resident.on_host)
        self.planner = self._make_planner(self.joint)

    def _make_planner(self, joint: Joint) -> Planner:
        make = WholeStepPlanner if self.updates else Planner
        return make(
            joint,
            cost_model=self.model,
            solver=self._solver,
            resident=self.resident,
            offload=self._offload,
            updated=self._updated if self.updates else None,
        )

    def list_ways(self, optimizer: OptimizerLike, *, may_wait: bool) -> Iterator["PlannedFunction"]:
        """The step as it is, with updates in its backward pass, and with state on the host.

        The time of its copies is part of no plan's added time: `may_wait` allows them.
        """
        is_fixed = steps_already(optimizer)
        if not is_fixed:
            yield self
        updates = find_updates(self.region, optimizer)
        if updates or is_fixed:
            yield self.with_updates(optimizer)
        if updates and not is_fixed and self._offload and may_wait:
            yield self.with_updates(optimizer, Resident.of(self.region, optimizer, on_host=True))

    def with_updates(
        self, optimizer: OptimizerLike, resident: Resident | None = None
    ) -> "PlannedFunction":
        """Count on updates in the backward pass. Compared is with the step as it is here."""
        updates, there = find_updates(self.region, optimizer), resident or self._resident
        made = PlannedFunction(
            self.region, self.model, self._solver, there, self._offload, updates, optimizer
        )
        made.baseline = self.baseline
        return made

    def fix(self, budget: Budget) -> Budget:
        """The budget in bytes: a fraction is one of this step's peak."""
        return budget if budget.is_searched else Budget(nbytes=self.planner.bytes_of(budget))

    def even_budgets(self, count: int) -> list[Budget]:
        most = self.planner.bytes_of(Budget(fraction=1.0))
        try:
            self.plan(Budget(nbytes=self.resident + 1), "pareto")
        except BudgetError as error:
            least = error.least_bytes
        else:
            least = self.resident + 1
        if count == 1:
            return [Budget(nbytes=most)]
        steps = ((most - least) * i // (count - 1) for i in range(count))
        return [Budget(nbytes=most - step) for step in steps]

    def plan(
        self, budget: Budget, asked: str, near: Schedule | None = None, *, tile: bool = False
    ) -> Plan:
        if may_cut(self.joint, tile=tile):
            return self.plan_in_tiles(budget, asked, tile=tile)
        return self._describe(self.planner.plan(budget, asked, near=near))

    def plan_in_tiles(self, budget: Budget, asked: str, *, tile: bool) -> Plan:
        """The plan of the step with as many tiles and segments as make it take the least time."""
        chosen = choose_tiles(
            self.planner, budget, None, self._make_planner, tile=tile, is_prompt=False
        )
        if chosen.found.error is not None:
            raise chosen.found.error(asked)
        made = self._describe(chosen.found.planned)
        if chosen.tiling is None:
            return made
        added = chosen.added_seconds
        bound = min(made.lower_bound_seconds + chosen.tile_seconds, added)
        return replace(
            made,
            recompute_seconds=added,
            lower_bound_seconds=bound,
            tiling=chosen.tiling,
            decisions={**made.decisions, **find_tiled_values(chosen.planner.joint)},
        )

    def _describe(self, planned: PlannedStep) -> Plan:
        joint = planned.step.joint
        program = self._updated.program_of(planned)
        timeline = timeline_of(program)
        peak = timeline.peak
        if planned.offloaded:  # which counts a copy as done by the next operator of some weight
            peak = max(peak, planned.costs.peak + planned.step.copied_nbytes)
        forward, backward = graphs_of(program)
        return Plan(
            budget=planned.budget,
            peak_bytes=peak + self.resident,
            saved_bytes=timeline.saved_bytes,
            recompute_seconds=planned.costs.added_seconds,
            recompute_flops=self._count_added_flops(planned),
            baseline=self.baseline,
            lower_bound_seconds=min(planned.lower_bound_seconds, planned.costs.added_seconds),
            decisions=_decisions(planned),
            device=repr(self.model),
            order=order_of(planned.graph_schedule, joint),
            graph=lines_of(joint.module.graph),
            offloaded_bytes=timeline.offloaded_bytes,
            link_seconds=planned.costs.link_seconds,
            graphs=(forward.module, backward.module),
            cost_model=self.model,
            rates=self.model.rates,
            reserved_bytes=max(peak + self.resident, self._count_reserved(timeline)),
            workspace_bytes=allow_workspace((forward, backward), self.model.rates),
            gap_reason=planned.gap_reason,
            updates_in_backward=len(self.updates),
            state_on_host_bytes=self._resident.on_host,
            optimizer=self._find_live_optimizer(),
        )

    def _find_live_optimizer(self) -> Callable[[], torch.optim.Optimizer | None] | None:
        if self.updates and isinstance(self._optimizer, torch.optim.Optimizer):
            return ref(self._optimizer)
        return None

    def _count_reserved(self, timeline: Timeline) -> int:
        return timeline.count_reserved_bytes(self._resident.tensors)

    @functools.cached_property
    def baseline(self) -> Figures:
        timeline = timeline_of(FunctionProgram(self.region, plain_autograd))
        step = self.planner.step
        calls = [call for call in step.calls if call is not None]
        return Figures(
            timeline.peak + self.resident,
            timeline.saved_bytes,
            step.problem.step_seconds,
            sum(map(self.model.flops, calls)),
            self._count_reserved(timeline),
        )

    def _count_added_flops(self, planned: PlannedStep) -> int:
        runs: dict[int, int] = {}
        for o in (*planned.schedule.forward, *planned.schedule.backward):
            runs[o] = runs.get(o, 0) + 1
        calls = planned.step.calls
        return sum(
            (count - 1) * self.model.flops(call)
            for o, count in runs.items()
            if count > 1 and (call := calls[o]) is not None
        )


def _decisions(planned: PlannedStep) -> dict[str, str]:
    """`saved`, `offloaded` or `recomputed` for each forward value that the backward pass needs."""
    step, offloaded = planned.step, planned.offloaded
    kept = planned.graph_schedule.saved | offloaded
    read = {
        v for o in planned.schedule.backward for v in step.problem.operators[o].reads
    } & step.problem.known
    forward = {v for op in step.problem.operators if op.part is Part.FORWARD for v in op.writes}

    def name_fate(node: fx.Node) -> str:
        return "offloaded" if node in offloaded else "saved" if node in kept else "recomputed"

    return {
        node.name: name_fate(node)
        for v, node in enumerate(step.values)
        if node is not None and (node in kept or (v in read and v in forward))
    }
