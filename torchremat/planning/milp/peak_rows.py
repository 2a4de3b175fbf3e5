"""The rows that a program has so far: peaks of simulated answers that were above the budget.

answer simulated      bytes 9, 12, 8, 11      budget 10      rows for steps 1 and 3
"""

from dataclasses import dataclass, field

from torchremat.planning.milp.intervals import PeakPoint
from torchremat.planning.milp.problem_index import ProblemIndex
from torchremat.planning.milp.saving_program import SavingProgram
from torchremat.planning.problem.problem import Part
from torchremat.planning.problem.trial import Evaluated
from torchremat.planning.search.clock import WorkTimer

# Between two peaks of one answer, at the least: neighbours are near the peak for the same values.
_LEAST_DISTANCE = 3
# Operators of a schedule for one more of that distance, so that long schedules give few rows.
_DISTANCE_SHARE = 80


@dataclass(frozen=True)
class PeakRows:
    """Moments of the backward pass, and positions of the forward pass, that are above the budget.

    Attributes:
        moments: in the order in which they were found.
        conflicts: sets of values that must not all be saved.
    """

    index: ProblemIndex
    budget: int
    moments: dict[PeakPoint, None] = field(default_factory=dict)
    positions: set[int] = field(default_factory=set)
    conflicts: set[frozenset[int]] = field(default_factory=set)

    def build_program(self, window: int | None, timer: WorkTimer | None = None) -> SavingProgram:
        return SavingProgram(
            self.index,
            self.budget,
            list(self.moments),
            sorted(self.positions),
            window,
            conflicts=sorted(map(sorted, self.conflicts)),
            timer=timer,
        )

    @property
    def are_for_all(self) -> bool:
        """Whether every schedule within the budget obeys them, in a program without a window."""
        return not any(m.is_recompute for m in self.moments) and not self.conflicts

    def add_peaks(self, trial: Evaluated, *, narrow: bool, most: int) -> bool:
        """Add rows for `most` peaks that are above the budget; whether any is new."""
        before = len(self.moments) + len(self.positions) + len(self.conflicts)
        schedule = trial.replay.schedule
        num_forward = len(schedule.forward)
        distance = max(_LEAST_DISTANCE, len(trial.costs.live) // _DISTANCE_SHARE)
        for number, i in enumerate(trial.find_peaks_above(self.budget, distance)):
            if number == most:
                break
            if i < num_forward:
                self._add_position(trial, i, narrow)
            else:
                place = i - num_forward
                step, o = trial.replay.steps[place], schedule.backward[place]
                self.moments[PeakPoint(step)] = None
                if narrow and o in self.index.rank:
                    self.moments[PeakPoint(step, o)] = None
                    if step:
                        self.moments.setdefault(PeakPoint(step - 1))
        return len(self.moments) + len(self.positions) + len(self.conflicts) > before

    def _add_position(self, trial: Evaluated, position: int, narrow: bool) -> None:
        order = trial.replay.schedule.forward
        operators = self.index.problem.operators
        op = operators[order[position]]
        made = self.index.forward_bytes.made
        if op.part is not Part.EITHER_PASS:
            self.positions.update(made[v] for v in op.writes[:1])
        elif narrow:  # all that is saved by then is too much
            values = {v for o in order[: position + 1] for v in operators[o].writes}
            saved = values.intersection(trial.decisions.saved, self.index.values)
            self.conflicts.add(frozenset(saved))
