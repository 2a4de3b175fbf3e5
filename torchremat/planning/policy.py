"""Policies that decide on a whole graph: a budget of peak memory, and the replay of a plan."""

from dataclasses import dataclass, field
from functools import cached_property

from torchremat.autodiff.graph_schedule import GraphSchedule
from torchremat.autodiff.joint import Joint
from torchremat.errors import PolicyError
from torchremat.planning.budgets import Budget, BudgetLike
from torchremat.planning.cost_model import CostModel
from torchremat.planning.plan import Plan
from torchremat.planning.planner import Planner, check_solver
from torchremat.planning.steps import WholeGraphPolicy, differentiates, forward_alone
from torchremat.remat.policies import Policy
from torchremat.remat.policy_spelling import register_word


@dataclass(frozen=True, repr=False)
class MemoryBudget(WholeGraphPolicy):
    """Made by `memory_budget`."""

    budget: BudgetLike
    solver: str = "auto"
    cost_model: CostModel | None = None

    def schedule(self, joint: Joint) -> GraphSchedule:
        """See `Policy.schedule`. Raises `BudgetError` if the budget cannot be met."""
        if not differentiates(joint):
            return forward_alone(joint)
        planner = Planner(joint, cost_model=self.cost_model, solver=self.solver)
        return planner.plan(Budget.of(self.budget), repr(self)).graph_schedule

    @property
    def spelling(self) -> str | None:
        """See `Policy.spelling`; there is none for another solver or cost model."""
        if self.solver != "auto" or self.cost_model is not None:
            return None
        return f"budget:{self.budget}{'B' if isinstance(self.budget, int) else ''}"

    def __repr__(self) -> str:
        options = f", solver={self.solver!r}" * (self.solver != "auto")
        if self.cost_model is not None:
            options += f", cost_model={self.cost_model!r}"
        return f"memory_budget({self.budget!r}{options})"


def memory_budget(
    budget: BudgetLike, *, solver: str = "auto", cost_model: CostModel | None = None
) -> Policy:
    """Keep the peak memory of the forward and the backward pass within `budget`.

    What is kept and what is computed again is planned when the function is traced, for the sizes of
    that call, so that the time added is least; see `torchremat.planning.plan`. The peak is what the
    passes make of values, gradients and outputs; parameters and inputs, which are there anyway, do
    not count. The call raises `BudgetError` (a `RuntimeError`) with the least budget that can be
    met if this one cannot. Nothing is offloaded.

    Args:
        budget: bytes (an `int`, or text such as `"2GiB"`), or a fraction in (0, 1] of the peak
            without rematerialisation (a `float`, or `"50%"`).
        solver: `"auto"`, `"milp"` (integer programs) or `"local"` (without them).
        cost_model: what operators cost in seconds; by default that of this machine.

    Raises:
        TypeError: if `budget` is neither a number nor text, or `cost_model` is none.
        ValueError: if `budget` cannot be read, is not positive, or is a fraction above 1; or if
            there is no such solver.

    >>> import torch, torchremat as tr
    >>> def f(x):
    ...     return torch.sin(torch.sin(torch.sin(torch.sin(x)))).sum()
    >>> x = torch.ones(1024, requires_grad=True)          # 4 KiB
    >>> tr.explain(f, x, policy=memory_budget("14KB")).total <= 8192
    True
    """
    Budget.of(budget)
    check_solver(solver)
    if cost_model is not None and not isinstance(cost_model, CostModel):
        raise PolicyError(
            f"memory_budget(cost_model={cost_model!r}): a cost model is a CostModel, such as "
            "CostModel.of('h100') or cost_model.measure('cuda')"
        )
    return MemoryBudget(budget, solver, cost_model)


@dataclass(frozen=True, repr=False)
class FromPlan(WholeGraphPolicy):
    """Made by `from_plan`."""

    text: str
    """The plan as JSON."""
    path: str | None = field(default=None, compare=False)

    def schedule(self, joint: Joint) -> GraphSchedule:
        """See `Policy.schedule`. Raises `PlanError` if the plan is for another graph."""
        if not differentiates(joint):
            return forward_alone(joint)
        return self._plan.graph_schedule(joint)

    @cached_property
    def _plan(self) -> Plan:
        return Plan.from_json(self.text)

    @property
    def spelling(self) -> str | None:
        """See `Policy.spelling`; there is one if the plan was given as a path."""
        return None if self.path is None else f"plan:{self.path}"

    def __repr__(self) -> str:
        if self.path is not None:
            return f"from_plan({self.path!r})"
        return f"from_plan(<plan {self._plan.fingerprint}>)"


def from_plan(plan: Plan | str) -> Policy:
    """Keep and compute again what `plan` says: a `Plan`, or the path of one that was saved.

    It holds for the graph that it was made for, on any device; another raises `PlanError` (a
    `ValueError`) that says where the graphs differ. One that offloads raises `NotAvailableError` (a
    `NotImplementedError`): such plans cannot be run yet.

    >>> import torch, torchremat as tr
    >>> f = lambda x: x.sin().sin().sin().sin().sum()
    >>> plan = tr.plan(f, torch.ones(256, requires_grad=True), budget=0.9)
    >>> g = tr.checkpoint(f, policy=from_plan(plan))
    >>> g(torch.ones(256, requires_grad=True)).item() == f(torch.ones(256)).item()
    True
    """
    if isinstance(plan, Plan):
        plan.check_runs("from_plan")
        return FromPlan(plan.to_json())
    if not isinstance(plan, str) and not hasattr(plan, "__fspath__"):
        raise PolicyError(
            f"from_plan takes a Plan, or the path of one that was saved, but it is {plan!r} "
            f"({type(plan).__name__}): from_plan(tr.plan(model, x, budget='2GiB'))"
        )
    loaded = Plan.load(plan)
    loaded.check_runs(f"from_plan({str(plan)!r})")
    return FromPlan(loaded.to_json(), str(plan))


register_word("budget", memory_budget, "8GiB")
register_word("plan", from_plan, "file.json")
