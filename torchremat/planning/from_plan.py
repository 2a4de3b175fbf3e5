"""`from_plan`: the policy that saves and recomputes as a plan says."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from torchremat.autodiff.joint import Joint
from torchremat.autodiff.tiles.tile_joint import tile_joint
from torchremat.core.formatting import human_bytes, human_seconds
from torchremat.core.source import warn_user
from torchremat.errors import BudgetWarning, PlanError, PlanWarning, PolicyError
from torchremat.graph.schedule import GraphSchedule
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.optim.step_in_backward import step_in_backward
from torchremat.planning.budget import Budget
from torchremat.planning.budget_policy import PlannedPolicy
from torchremat.planning.cost_model import CostModel
from torchremat.planning.costs.device_rates import Rates, is_here, rates_of, stands_for_others
from torchremat.planning.costs.measured_rates import label_of
from torchremat.planning.plan import Plan
from torchremat.planning.planner import Planner
from torchremat.planning.step.device_ranking import count_added_seconds, find_spared_share
from torchremat.planning.step.exact_peak import exact_peak_of
from torchremat.planning.step.fingerprint import find_growth, lines_of
from torchremat.planning.step.order import misfit
from torchremat.planning.step.traced_step import differentiates, forward_only
from torchremat.policies.policy import Policy
from torchremat.policies.spelling import register_spelling

# Of the time that a plan spares on the device that it was made for: what it is to spare where it
# runs, or another is sought. Of the time that it adds: what another is to add for a warning. Chosen
# by hand.
_MUCH_LESS = 0.9


@dataclass(frozen=True, repr=False)
class FromPlan(PlannedPolicy):
    text: str
    """The plan as JSON."""
    path: str | None = field(default=None, compare=False)
    _served: set[str] = field(default_factory=set, compare=False, repr=False)
    """The fingerprints of the steps that were served; a job has begun if there is one."""
    _warned: list[bool] = field(default_factory=list, compare=False, repr=False)
    _compared: list[bool] = field(default_factory=list, compare=False, repr=False)
    """Whether the device that runs it was compared with that of the plan."""
    optimizer: Callable[[], torch.optim.Optimizer | None] | None = field(
        default=None, compare=False, repr=False
    )

    serves_many_sizes = False

    @property
    def steps_in_backward(self) -> bool:
        return self._plan.updates_in_backward > 0

    def begin_updates(self) -> None:
        """Let the plan's optimizer step in the backward pass; warn once if none is known."""
        optimizer = None if self.optimizer is None else self.optimizer()
        if optimizer is not None:
            step_in_backward(optimizer, offload=self._plan.state_on_host_bytes > 0)
        elif not self._warned:
            self._warned.append(True)
            warn_user(
                f"{self!r}: the plan counts on updates in the backward pass, and no optimizer "
                "makes any. So gradients take more memory than it says. Call "
                f"torchremat.optim.step_in_backward(optimizer{self._offloads}) before the first "
                "step",
                BudgetWarning,
            )

    @property
    def _offloads(self) -> str:
        return ", offload=True" if self._plan.state_on_host_bytes else ""

    @property
    def wants_tiles(self) -> bool:  # type: ignore[override]
        return self._plan.tiling is not None and self._plan.tiling.num_tiles > 0

    def prepare_joint(self, joint: Joint, sizes: Sizes | None, *, fuses: bool = False) -> Joint:
        """The joint graph with the tiles of the plan, and its segments of loops."""
        tiling = self._plan.tiling
        return joint if tiling is None else tile_joint(joint, tiling) or joint

    def schedule(
        self, joint: Joint, *, fuses: bool = False, sizes: Sizes | None = None
    ) -> GraphSchedule:
        """The schedule of the plan. Raises `PlanError` if the plan is for another graph."""
        if not differentiates(joint):
            return forward_only(joint)
        plan = self._plan
        if plan.tiling is not None and joint.untiled is None:
            raise PlanError(
                f"{self!r}: the plan has tiles, or segments of loops, and this graph has none: it "
                "is of another function, or a compiler runs it, which has no segments. Make a plan "
                "for it"
            )
        schedule = plan.graph_schedule(joint)
        lines = lines_of(joint.module.graph)
        growth = 1.0 if joint.by_compiler else find_growth(plan.graph, lines)
        if growth > 1:
            if not self._served:
                raise misfit(plan.graph, lines)
            warn_user(
                f"{self!r}: this step is larger than the one that was planned, {growth:.3g} times "
                f"in one of its values, and so may be its peak of {human_bytes(plan.peak_bytes)}. "
                "It runs with the same decisions. Make a plan for the largest step",
                BudgetWarning,
            )
        self._served.add(plan.fingerprint)
        if plan.rates is not None and not self._compared:
            self._compared.append(True)
            self._compare_devices(plan.rates, joint, schedule, fuses)
        return schedule

    def _compare_devices(
        self, rates: Rates, joint: Joint, schedule: GraphSchedule, fuses: bool
    ) -> None:
        """Warn if the plan would save other values by the costs of the device that runs it."""
        device = _device_of(joint)
        if not is_here(device):
            return
        here = rates_of(device)
        if here == rates or rates.name.startswith(label_of(device)):  # measured on this device
            return
        if stands_for_others(here) and here.runs_ahead == rates.runs_ahead:
            return
        before, now = (CostModel.of(r).fused() if fuses else CostModel.of(r) for r in (rates, here))
        shares = [find_spared_share(joint, schedule, model.seconds) for model in (before, now)]
        if shares[1] < _MUCH_LESS * shares[0]:
            self._seek_better_plan(joint, schedule, rates.name, now)

    def _seek_better_plan(
        self, joint: Joint, schedule: GraphSchedule, planned_for: str, model: CostModel
    ) -> None:
        """Warn if a plan by the costs of `model` adds much less time at the same peak."""
        peak = exact_peak_of(joint, schedule)
        if peak is None:  # with offloaded values, say, whose time is not that of operators
            return
        added = count_added_seconds(schedule, model.seconds)
        found = Planner(joint, cost_model=model).search(Budget(nbytes=peak), is_prompt=True)
        less = found.planned.costs.added_seconds
        if found.error is None and less < _MUCH_LESS * added:
            warn_user(
                f"{self!r}: the plan was made by the costs of {planned_for}. On "
                f"{model.rates.name}, where it runs, it adds {human_seconds(added)} to a step, and "
                f"a plan for that device {human_seconds(less)} at the same peak. Results and peak "
                "are as planned. Make the plan anew, with device=, or with a cost_model that was "
                "measured here",
                PlanWarning,
            )

    @cached_property
    def _plan(self) -> Plan:
        return Plan.from_json(self.text)

    @property
    def spelling(self) -> str | None:
        return None if self.path is None else f"plan:{self.path}"

    def __repr__(self) -> str:
        if self.path is not None:
            return f"from_plan({self.path!r})"
        return f"from_plan(<plan {self._plan.fingerprint}>)"


def _device_of(joint: Joint) -> torch.device:
    """The device of the inputs: an accelerator, if some are on one."""
    values = [node.meta["val"] for node in joint.inputs]  # a compiler's have sizes among them
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def from_plan(plan: Plan | str) -> Policy:
    """Save and recompute as `plan` says: a `Plan`, or the path of one that was saved.

    It holds for the graph that it was made for, at its sizes and smaller ones, on any device.
    Another graph raises `PlanError` (a `ValueError`) that says where they differ. Larger sizes
    do too, or give a `BudgetWarning` once a job has begun. In eager mode, offloaded values
    are copied to the host and back (on the CPU, to memory that stands for the host's). A compiler
    saves them. A plan with updates in the backward pass lets its optimizer make them, when a
    function first runs under the policy. If there was only the optimizer's class, or the plan was
    loaded, call `optim.step_in_backward`.

    On another device than that of the plan, one for that device may add a tenth less time at the
    same peak: a `PlanWarning` says so.

    >>> import torch, torchremat as tr
    >>> f = lambda x: x.sin().sin().sin().sin().sum()
    >>> plan = tr.plan(f, torch.ones(256, requires_grad=True), budget=0.9)
    >>> g = tr.checkpoint(f, policy=from_plan(plan))
    >>> g(torch.ones(256, requires_grad=True)).item() == f(torch.ones(256)).item()
    True
    """
    if isinstance(plan, Plan):
        return FromPlan(plan.to_json(), optimizer=plan.optimizer)
    if not isinstance(plan, str) and not hasattr(plan, "__fspath__"):
        raise PolicyError(
            f"from_plan takes a Plan, or the path of one that was saved, but it is {plan!r} "
            f"({type(plan).__name__}): from_plan(tr.plan(model, x, budget='2GiB'))"
        )
    loaded = Plan.load(plan)
    return FromPlan(loaded.to_json(), str(plan))


register_spelling("plan", from_plan, "file.json", function="from_plan")
