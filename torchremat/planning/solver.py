"""The solver: the schedule of least added time that keeps within a budget, with a proof of how near.

    program     what is saved, by the integer program, with rows for the moments that matter
    simulate    what of it is above the budget, and when: further rows
    repair      small changes, until the simulator finds nothing above the budget
    improve     small changes that take time away and keep within it

At any time the best that the simulator accepted is at hand, with the bound that the relaxation
proves.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchremat.planning.local_search import LocalSearch, Trial
from torchremat.planning.ordering import Decisions, replay_of
from torchremat.planning.peak_rows import Moments
from torchremat.planning.problem import (
    Part,
    Problem,
    Schedule,
    costs_of,
)
from torchremat.planning.program import SavingProgram


@dataclass(frozen=True)
class Options:
    """How long and how hard to search.

    Attributes:
        seconds: the time to take at most, by the size of the problem if not given; the best found
            by then is the answer.
        gap: how near to the optimum of the integer program is near enough.
        progress: called with a fraction of the work that is done.
        solver: `"milp"` (integer programs), `"local"` (without them), or `"auto"`.
    """

    seconds: float | None = None
    gap: float = 0.002
    progress: Callable[[float], None] | None = None
    solver: str = "auto"


@dataclass(frozen=True)
class Solution:
    """The answer.

    Attributes:
        schedule: the best schedule found; `None` if none fits.
        added_seconds: the time that it adds.
        peak: the most bytes alive at one time.
        lower_bound_seconds: no schedule that fits, with the operators of both passes in their
            order, adds less.
        least_peak: the least peak that was found.
        lowest: the schedule that has it.
    """

    schedule: Schedule | None
    added_seconds: float
    peak: int
    lower_bound_seconds: float
    least_peak: int
    lowest: Schedule


def solve(problem: Problem, budget: int, options: Options | None = None) -> Solution:
    """The schedule of least added time whose peak is at most `budget` bytes.

    The operators of the backward pass that need cotangents run in the order of `problem`. The
    answer has no schedule if none was found; `least_peak` is then what one can get down to.
    """
    return _Search(problem, budget, options or Options()).run()


class _Search:
    def __init__(self, problem: Problem, budget: int, options: Options) -> None:
        self.problem = problem
        self.budget = budget
        self.options = options
        self.start = time.monotonic()
        self.seconds = options.seconds or min(60.0, 2.0 + len(problem.operators) / 100)
        self.deadline = self.start + self.seconds
        self.local = LocalSearch(problem, budget, self.deadline)
        self.bound = 0.0
        self.best: Trial | None = None
        self.lowest: Trial | None = None

    def run(self) -> Solution:
        everything = self._try(Decisions(self.problem.needed))
        if not everything.fits:
            trials = self._program()
            self._polish([*trials, everything])
        return self._solution()

    def _try(self, decisions: Decisions) -> Trial:
        trial = self.local.trial(decisions)
        self._note(trial)
        return trial

    def _note(self, trial: Trial) -> None:
        if self.lowest is None or trial.costs.peak < self.lowest.costs.peak:
            self.lowest = trial
        if trial.fits and (self.best is None or trial.rank < self.best.rank):
            self.best = trial

    def _program(self) -> list[Trial]:
        """Solve the program, with rows for what is found above the budget, until nothing is."""
        program = SavingProgram(self.problem)
        least = self._try(Decisions(self.local.fixed & self.problem.known))
        rows = Moments(self.problem, least.replay, least.costs)
        rows.row(program, len(least.replay.schedule.forward) - 1, self.budget, once=True)
        trials = [least]
        share = self.start + _PROGRAM_SHARE * self.seconds
        for _ in range(_MOST_ROUNDS):
            left = share - time.monotonic()
            if left <= 0:
                break
            answer = program.solve(
                integral=True, seconds=min(left, _SOLVE_SHARE * self.seconds),
                gap=self.options.gap,
            )
            if answer.saved is None:
                break
            self.bound = max(self.bound, answer.bound)
            trial = self._try(Decisions(answer.saved))
            trials.append(trial)
            if trial.fits:
                break
            moments = Moments(self.problem, trial.replay, trial.costs)
            for position in _hills(trial.costs.live, self.budget):
                moments.row(program, position, self.budget, once=True)
        return trials

    def _polish(self, trials: Sequence[Trial]) -> None:
        """Bring the best of `trials` under the budget, and take time away."""
        if self.best is not None:
            self._note(self.local.improve(self.best))
        tried = 0
        for trial in sorted(trials, key=lambda t: t.costs.peak):
            if tried == _MOST_STARTS or time.monotonic() > self.deadline or trial.fits:
                continue
            tried += 1
            fitting = self.local.repair(trial)
            self._note(fitting)
            if fitting.fits:
                self._note(self.local.improve(fitting))

    def _solution(self) -> Solution:
        assert self.lowest is not None
        least_peak = self.lowest.costs.peak
        lowest = self.lowest.replay.schedule
        if self.best is None:
            return Solution(None, float("inf"), least_peak, self.bound, least_peak, lowest)
        schedule = self.best.replay.schedule
        costs = costs_of(self.problem, schedule)
        return Solution(schedule, costs.added_seconds, costs.peak, self.bound, least_peak, lowest)


_PROGRAM_SHARE = 0.4
_SOLVE_SHARE = 0.1
_MOST_ROUNDS = 12
_MOST_STARTS = 4
_MOST_HILLS = 10


def _hills(live: Sequence[int], budget: int) -> list[int]:
    """The highest moments above the budget, not near one another."""
    above = sorted((i for i, n in enumerate(live) if n > budget), key=lambda i: -live[i])
    distance = max(3, len(live) // 60)
    found: list[int] = []
    for i in above:
        if all(abs(i - j) > distance for j in found):
            found.append(i)
        if len(found) == _MOST_HILLS:
            break
    return found
