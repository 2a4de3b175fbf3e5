"""A step of which updates consume the gradients, and the peak of a schedule as that runs."""

from dataclasses import dataclass

from torchremat import _torch
from torchremat.planning.step.planned_step import PlannedStep
from torchremat.planning.step.traced_step import FixedSchedule, Updates, timeline_of
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.program.region import Region


@dataclass(frozen=True, eq=False)
class UpdatedStep:
    """A traced step, with the updates that consume gradients while its backward pass runs.

    Attributes:
        state_on_host: the bytes of the optimizer's state that are in the host's memory meanwhile.
    """

    region: Region
    updates: Updates
    state_on_host: int = 0

    def program_of(self, planned: PlannedStep) -> FunctionProgram:
        """The program that runs a schedule."""
        policy = FixedSchedule(planned.graph_schedule, planned.step.joint, updates=self.updates)
        return FunctionProgram(self.region, policy)

    def find_peak(self, planned: PlannedStep) -> int:
        """The simulated peak of a schedule, at the sizes of its step."""
        with _torch.assume_sizes(planned.step.sizes):
            peak = timeline_of(self.program_of(planned)).peak
        if planned.offloaded:  # a simulation counts a copy as done by the next operator
            peak = max(peak, planned.costs.peak + planned.step.copied_nbytes)
        return peak
