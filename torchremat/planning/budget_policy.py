"""Policies that decide on a whole graph: a budget of peak memory, and the replay of a plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchremat.autodiff.joint import Joint
from torchremat.core.formatting import human_bytes
from torchremat.core.source import warn_user
from torchremat.errors import BudgetWarning, PolicyError, PolicyValueError
from torchremat.graph.schedule import GraphSchedule
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.optim.step_in_backward import Stepping, find_stepping
from torchremat.planning.budget import Budget, BudgetLike, bytes_of_limit, plain_number
from torchremat.planning.budget_job import BudgetJob
from torchremat.planning.cost_model import CostModel
from torchremat.planning.memory.update_bytes import find_updates_now
from torchremat.planning.planner import Planner, check_solver, host_rate_of
from torchremat.planning.step.out_of_memory import describe_plan
from torchremat.planning.step.traced_step import NO_UPDATES, Updates, WholeGraphPolicy
from torchremat.planning.step.updated_step import UpdatedStep
from torchremat.planning.tapes.tape_budget import TapeBudgetJob, TapeOptions
from torchremat.planning.whole_step import WholeStepPlanner
from torchremat.policies.failed_operator import FailedOperator
from torchremat.policies.policy import Policy
from torchremat.policies.spelling import register_spelling
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.program.region import Region
from torchremat.remat.tape.limited_calls import LimitingPolicy, TapeJob


class PlannedPolicy(WholeGraphPolicy):
    """A policy that decides by a plan."""

    @property
    def resident_bytes(self) -> int:
        """The bytes beside the step that count in the budget."""
        return 0

    def out_of_memory(self, program: Any, failed: FailedOperator) -> str | None:
        if not isinstance(program, FunctionProgram):  # a derivative of higher order has no plan
            return None
        return describe_plan(program, failed, repr(self), self.resident_bytes)


@dataclass(frozen=True, repr=False)
class MemoryBudget(PlannedPolicy):
    budget: BudgetLike | None
    solver: str = "auto"
    cost_model: CostModel | None = None
    offload: bool = False
    saved: int | str | None = None
    on_infeasible: str = "best"
    resident: int | str = 0
    tile: bool = False

    @property
    def _limits(self) -> tuple[Any, ...]:
        """The limits however they are written: `"1GiB"` is as many bytes as `2**30`."""
        budget = None if self.budget is None else Budget.of(self.budget)
        saved = None if self.saved is None else bytes_of_limit(self.saved)
        options = (self.solver, self.cost_model, self.offload, self.on_infeasible, self.tile)
        return (budget, saved, self.resident_bytes, *options)

    @property
    def resident_bytes(self) -> int:
        return bytes_of_limit(self.resident)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryBudget) and self._limits == other._limits

    def __hash__(self) -> int:
        return hash(self._limits)

    def on_tape(self) -> Policy:
        return BudgetOnTape(self)

    def planner(self, joint: Joint, *, fuses: bool, updated: UpdatedStep | None = None) -> Planner:
        model = self.cost_model or CostModel.of(None)
        make = Planner if updated is None else WholeStepPlanner
        return make(
            joint,
            cost_model=model.fused() if fuses else model,
            solver=self.solver,
            offload=self.offload,
            resident=self.resident_bytes,
            updated=updated,
        )

    @property
    def wants_tiles(self) -> bool:  # type: ignore[override]
        return self.tile

    def prepare_joint(self, joint: Joint, sizes: Sizes | None, *, fuses: bool = False) -> Joint:
        """The joint graph with as many tiles as let the budget cost least; without `tile` as is."""
        return self.begin_job().prepare_joint(joint, sizes, fuses=fuses)

    def schedule(
        self, joint: Joint, *, fuses: bool = False, sizes: Sizes | None = None
    ) -> GraphSchedule:
        """The schedule that a plan finds. Raises `BudgetError` if the budget cannot be met."""
        return self.begin_job().schedule(joint, fuses=fuses, sizes=sizes)

    def begin_job(self) -> "BudgetInJob":
        return BudgetInJob(self, BudgetJob(self))

    @property
    def spelling(self) -> str | None:
        """The policy as text; `None` for two limits, or if an option is another than usual."""
        unspelt = (self.solver, self.cost_model, self.on_infeasible, self.resident)
        if unspelt != ("auto", None, "best", 0):
            return None
        options = (_TILE if self.tile else "") + (_OFFLOAD if self.offload else "")
        if self.budget is None:
            return f"saved:{_with_unit(self.saved)}{options}"
        return None if self.saved is not None else f"budget:{_with_unit(self.budget)}{options}"

    def __repr__(self) -> str:
        options = [repr(self.budget)] if self.budget is not None else []
        if self.saved is not None:
            options.append(f"saved={self.saved!r}")
        if self.solver != "auto":
            options.append(f"solver={self.solver!r}")
        if self.cost_model is not None:
            options.append(f"cost_model={self.cost_model!r}")
        if self.offload:
            options.append("offload=True")
        if self.tile:
            options.append("tile=True")
        if self.on_infeasible != "best":
            options.append(f"on_infeasible={self.on_infeasible!r}")
        if self.resident:
            options.append(f"resident={self.resident!r}")
        return f"memory_budget({', '.join(options)})"


@dataclass(frozen=True, eq=False, repr=False)
class BudgetInJob(PlannedPolicy):
    """A `MemoryBudget` with what the calls of one function have in common."""

    policy: MemoryBudget
    job: BudgetJob
    stepping: Stepping = ()
    """The optimizers that step in the backward pass, as it assumes."""
    updated: UpdatedStep | None = None
    """The step with their updates, if they consume a gradient of it."""

    def with_updates(self, region: Region) -> "BudgetInJob":
        stepping = find_stepping()
        updates = find_updates_now(region)
        updated = UpdatedStep(region, updates) if updates else None
        return replace(self, stepping=stepping, updated=updated)

    def is_current(self, region: Region) -> bool:
        return region.argument_has_gradient or self.stepping == find_stepping()

    @property
    def updates(self) -> Updates:  # type: ignore[override]
        return NO_UPDATES if self.updated is None else self.updated.updates

    @property
    def wants_tiles(self) -> bool:  # type: ignore[override]
        return self.policy.tile

    def prepare_joint(self, joint: Joint, sizes: Sizes | None, *, fuses: bool = False) -> Joint:
        return self.job.prepare_joint(joint, sizes, self.updated, fuses=fuses)

    def schedule(
        self, joint: Joint, *, fuses: bool = False, sizes: Sizes | None = None
    ) -> GraphSchedule:
        return self.job.schedule(joint, fuses=fuses, sizes=sizes, updated=self.updated)

    @property
    def resident_bytes(self) -> int:
        return self.policy.resident_bytes

    def on_tape(self) -> Policy:
        return BudgetOnTape(self.policy, self.job.limit, self.job.largest)

    def without_job(self) -> Policy:
        return self.policy

    def __deepcopy__(self, memo: object) -> "BudgetInJob":
        return self  # a model that is copied for a report keeps its own

    @property
    def spelling(self) -> str | None:
        return self.policy.spelling

    def __repr__(self) -> str:
        return repr(self.policy)


@dataclass(frozen=True, repr=False)
class BudgetOnTape(LimitingPolicy):
    """A `MemoryBudget` where a function cannot be one graph: it plans for what its tapes record."""

    policy: MemoryBudget
    limit: int | None = None
    """The bytes of the budget, if graphs have fixed them before."""
    largest: int | None = None
    """The peak without rematerialisation of the step that fixed them."""

    def begin_tapes(self, has_begun: bool) -> TapeJob:
        policy = self.policy
        if policy.tile:
            warn_user(
                f"{policy!r}: a function that cannot be one graph runs without tiles, so that more "
                "has to be recomputed, or the budget cannot be met. A checkpoint around the loss "
                "alone has tiles, where nothing around it is one",
                BudgetWarning,
            )
        model = policy.cost_model or CostModel.of(None)
        return TapeBudgetJob(
            TapeOptions(
                repr(policy),
                None if policy.budget is None else Budget.of(policy.budget),
                None if policy.saved is None else bytes_of_limit(policy.saved),
                policy.on_infeasible == "error",
                model.seconds_of_call,
                policy.resident_bytes,
                self.limit,
                self.largest,
            ),
            has_begun=has_begun,
        )

    @property
    def spelling(self) -> str | None:
        return self.policy.spelling

    def __repr__(self) -> str:
        return repr(self.policy)


def _with_unit(budget: object) -> str:
    return f"{budget}{'B' if isinstance(budget, int) else ''}"


def memory_budget(
    budget: BudgetLike | None = None,
    *,
    saved: int | str | None = None,
    solver: str = "auto",
    cost_model: CostModel | None = None,
    offload: bool = False,
    on_infeasible: str = "best",
    resident: int | str = 0,
    tile: bool = False,
) -> Policy:
    """Keep the peak memory of the forward and the backward pass within `budget`.

    A plan chooses which values are saved and which recomputed, so that little time is added. It is
    made at the first call that exceeds the budget without one, and serves all steps that are no
    larger. The peak counts values, gradients and outputs that the passes make. Parameters and
    inputs, which outlive the step, do not count. The first call raises `BudgetError` (a
    `RuntimeError`) with the least budget that can be met if this one cannot.

    A budget that depends on a step, such as `"50%"`, becomes bytes by the largest step that was
    declared (`nn.wrap(..., example=...)`). If none was, it is the largest so far. Smaller steps
    keep to those bytes.

    Under inductor (`torch.compile`, `jit`, `nn.wrap(..., compile="inductor")`) pointwise work runs
    in the kernels that read it. It is cheaper there, so that more of it is recomputed than without
    a compiler.

    Checkpoints inside the function are opened: the plan decides on their values, too.

    Where an optimizer steps in the backward pass (`optim.step_in_backward`), each gradient counts
    until an update consumes it, and the bytes of the update do. All gradients count if an argument
    gets one, on tapes and under compilers.

    `saved` limits the bytes that the forward pass saves for the backward pass, which is what
    matters for one layer among many. `nn.split_budget` finds the limits of all layers for a budget
    of the whole.

    Args:
        budget: bytes (an `int`, or text such as `"2GiB"`), or a fraction in (0, 1] of the peak
            without rematerialisation (a `float`, or `"50%"`). `"least"` is the least peak, and
            `"time:+10%"` the least with which a step takes at most so much more time. `None`, with
            `saved`, for no limit.
        saved: bytes (an `int`, or text such as `"200MiB"`; 0 for nothing but inputs and outputs).
        solver: `"auto"` takes the first good plan; `"milp"` (integer programs) and `"local"`
            (without them) search as long as `tr.plan` does, for up to a minute.
        cost_model: what operators cost in seconds; by default that of this machine. Where inductor
            runs them, `cost_model.fused()`.
        offload: whether values may be copied to the host, over the link of the cost model.
            Compilers save them on the device, with an `OffloadWarning`: the peak is then higher.
        on_infeasible: what a later step does that no plan keeps within the budget: `"best"` runs
            it with the least peak, and gives one `BudgetWarning`; `"error"` raises `BudgetError`.
        resident: bytes (an `int`, or text such as `"12GiB"`) that are there beside the step and
            count: the budget is of a whole device then. `measure.resident_bytes` counts those of
            models, optimizers and accumulated gradients.
        tile: whether operators that are independent along rows may run for some rows at a time, as
            in `tr.plan`, compiled or not. Tapes run them whole.

    Raises:
        TypeError: if `budget` is neither a number nor text, or `cost_model` is none; if neither
            `budget` nor `saved` is given. Also if `saved` or `resident` is a fraction, for `saved`
            beside `"least"` or a time, and for `resident` without a budget.
        ValueError: if `budget` cannot be read, is not positive, or is a fraction above 1; or if
            there is no such solver. `PlanError` is one: for `offload=True` with a `cost_model` that
            has no link to a host (without a `cost_model`, the call raises it).

    >>> import torch, torchremat as tr
    >>> def f(x):
    ...     return torch.sin(torch.sin(torch.sin(torch.sin(x)))).sum()
    >>> x = torch.ones(1024, requires_grad=True)          # 4 KiB
    >>> tr.explain(f, x, policy=memory_budget("14KB")).total <= 8192
    True
    >>> tr.explain(f, x, policy=memory_budget("18KiB", resident=4096)).total <= 8192
    True
    >>> tr.explain(f, x, policy=memory_budget(saved="4KiB")).total
    4096
    """
    budget, saved, resident = map(plain_number, (budget, saved, resident))
    if budget is not None:
        Budget.of(budget)
    elif saved is None:
        raise PolicyError(
            "memory_budget() limits nothing: give a budget of peak memory, memory_budget('8GiB'), "
            "or of what is saved for the backward pass, memory_budget(saved='200MiB')"
        )
    if saved is not None:
        _check_saved(saved, budget)
    _check_resident(resident, budget)
    check_solver(solver)
    if cost_model is not None and not isinstance(cost_model, CostModel):
        raise PolicyError(
            f"memory_budget(cost_model={cost_model!r}): a cost model is a CostModel, such as "
            "CostModel.of('h100') or cost_model.measure('cuda')"
        )
    if offload and cost_model is not None:
        host_rate_of(cost_model)
    if on_infeasible not in ("best", "error"):
        raise PolicyValueError(
            f"memory_budget(on_infeasible={on_infeasible!r}): it is 'best' (a later step that "
            "cannot be met runs with the least peak, with a warning) or 'error'"
        )
    return MemoryBudget(budget, solver, cost_model, offload, saved, on_infeasible, resident, tile)


def _check_saved(saved: Any, budget: Any) -> None:
    bytes_of_limit(saved, "saved")
    if budget is not None and Budget.of(budget).is_searched:
        raise PolicyError(
            f"memory_budget({budget!r}, saved={saved!r}): a search for the least memory takes "
            "no limit on what is saved: leave out saved, or give the budget as bytes"
        )


def _check_resident(resident: Any, budget: Any) -> None:
    nbytes = bytes_of_limit(resident, "resident")
    if not nbytes:
        return
    if budget is None:
        raise PolicyError(
            f"memory_budget(resident={resident!r}): what is there beside the step counts in a "
            "budget of peak memory alone: memory_budget('20GiB', resident=...)"
        )
    limit = Budget.of(budget).nbytes
    if limit is not None and limit <= nbytes:
        raise PolicyValueError(
            f"memory_budget({budget!r}, resident={resident!r}): nothing is left for the step, "
            f"since {human_bytes(nbytes)} ({nbytes} bytes) are there before it. Give a larger "
            "budget"
        )


_TILE, _OFFLOAD = "+tile", "+offload"


def _read_options(items: Sequence[str]) -> tuple[str, set[str]]:
    """A limit without the options that may follow it, and these."""
    limit, found = ",".join(items).rstrip(), set()
    while option := next(filter(limit.endswith, (_TILE, _OFFLOAD)), None):
        limit = limit.removesuffix(option).rstrip()
        found.add(option)
    return limit, found


def read_budget(*items: str) -> Policy:
    """The policy that is spelled `"budget:8GiB"`, or `"budget:8GiB+tile+offload"`."""
    budget, options = _read_options(items)
    return memory_budget(budget, tile=_TILE in options, offload=_OFFLOAD in options)


def read_saved(*items: str) -> Policy:
    """The policy that is spelled `"saved:200MiB"`, or `"saved:200MiB+tile+offload"`."""
    saved, options = _read_options(items)
    return memory_budget(saved=saved, tile=_TILE in options, offload=_OFFLOAD in options)


register_spelling("budget", read_budget, "8GiB", function="memory_budget")
register_spelling("saved", read_saved, "200MiB")
