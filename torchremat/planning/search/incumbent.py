"""The best schedule of a search so far, and the bound that was proved."""

from torchremat.planning.problem.trial import Evaluated
from torchremat.planning.search.clock import TimeSlice

# The widest gap of an answer that is good since few seconds are left in it.
_NEAR = 0.02


class Incumbent:
    """The best of the trials of a search, and the proved bound.

    Attributes:
        best: the trial that fits and adds the least time.
        lowest: the trial with the least peak.
        bound: no schedule that fits adds less.
        little: seconds that are not worth a search, of a gap of 2 % at most.
        enough: the seconds that an answer may add, if any that adds no more will do.
    """

    def __init__(
        self, clock: TimeSlice, gap: float, little: float = 0.0, enough: float | None = None
    ) -> None:
        self.clock = clock
        self.gap = gap
        self.little = little
        self.enough = enough
        self.best: Evaluated | None = None
        self.lowest: Evaluated | None = None
        self.trials: list[Evaluated] = []
        self.bound = 0.0

    def note(self, trial: Evaluated) -> Evaluated:
        if trial.is_allowed:
            if self.lowest is None or trial.costs.peak < self.lowest.costs.peak:
                self.lowest = trial
            if trial.fits and (self.best is None or trial.rank < self.best.rank):
                self.best = trial
        self.trials.append(trial)
        self.clock.report()
        return trial

    def note_lowest(self, trial: Evaluated) -> None:
        """Remember `trial`, of another budget, if its peak is the least."""
        if self.lowest is None or trial.costs.peak < self.lowest.costs.peak:
            self.lowest = trial

    def prove(self, bound: float) -> None:
        if bound < float("inf"):
            self.bound = max(self.bound, bound)

    @property
    def is_good(self) -> bool:
        if self.is_near(self.gap):
            return True
        if self.best is None or not self.is_near(_NEAR):
            return False
        return self.best.costs.added_seconds - self.bound <= self.little

    @property
    def is_decided(self) -> bool:
        """Whether it is known that some answer adds no more than `enough`, or that none does."""
        if self.enough is None:
            return False
        return self.bound > self.enough or (
            self.best is not None and self.best.costs.added_seconds <= self.enough
        )

    def is_near(self, gap: float) -> bool:
        """Whether no more search is worth it, for answers that are so near to the bound."""
        if self.is_decided:
            return True
        if self.best is None:
            return False
        return self.best.costs.added_seconds <= self.bound * (1 + gap) + 1e-12
