"""A step with the schedule that was chosen for it, and what that costs."""

from dataclasses import dataclass
from functools import cached_property

from torch import fx

from torchremat.graph.schedule import GraphSchedule
from torchremat.planning.problem.problem import Schedule
from torchremat.planning.problem.schedule_costs import Costs
from torchremat.planning.step.problem_builder import NumericStep


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step with its schedule: none within the budget adds less than `lower_bound_seconds`."""

    step: NumericStep
    schedule: Schedule
    costs: Costs
    lower_bound_seconds: float
    budget: int
    gap_reason: str = ""

    @cached_property
    def graph_schedule(self) -> GraphSchedule:
        return self.step.graph_schedule(self.schedule)

    @cached_property
    def offloaded(self) -> frozenset[fx.Node]:
        nodes = (self.step.values[v] for v in self.schedule.offloaded)
        return frozenset(node for node in nodes if node is not None)

    @cached_property
    def exact_peak(self) -> int | None:
        """The peak as it runs; `None` where the costs have it, or more than they know decides."""
        return self.step.exact_peaks.of(self.schedule, lambda: self.graph_schedule)

    @property
    def peak_bytes(self) -> int:
        return self.costs.peak if self.exact_peak is None else self.exact_peak

    @property
    def saved_bytes(self) -> int:
        nbytes = self.step.problem.nbytes
        saved = set(self.schedule.saved) - self.step.problem.outputs
        return sum(nbytes[v] for v in saved) + self.step.count_copied(self.schedule)

    @property
    def offloaded_bytes(self) -> int:
        return sum(self.step.problem.nbytes[v] for v in self.schedule.offloaded)
