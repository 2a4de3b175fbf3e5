"""The solver: the schedule of least added time that keeps within a budget, with a proof of how near.

    relax       a linear program for what is saved and computed again when; its answer, rounded, is
                simulated, and the moments that are above the budget become rows of it
    solve       the same in integers, again with rows for what the simulation finds
    improve     small changes that bring an answer under the budget, or take time away

At any time the best that the simulation accepted is at hand, with the bound that was proved.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from torchremat.planning.cuts import saved_by_cuts
from torchremat.planning.linear import Answer, Fixing, Relaxation
from torchremat.planning.local_search import LocalSearch
from torchremat.planning.ordering import Decisions
from torchremat.planning.problem import Part, Problem, Schedule, costs_of
from torchremat.planning.program import Facts, Moment, SavingProgram
from torchremat.planning.reorder import floor_of
from torchremat.planning.trials import Trial, Trier


@dataclass(frozen=True)
class Options:
    """How long and how hard to search.

    Attributes:
        seconds: the time to take at most, roughly; the best found by then is the answer. Without
            it, 3 seconds and 7 more for each thousand operators, at most 45.
        gap: how near to the optimum, as a fraction, is near enough.
        solver: "milp" or "auto" for integer programs; "local" for minimum cuts and local search.
        progress: called now and then with the fraction of the time that is gone.
    """

    seconds: float | None = None
    gap: float = 0.002
    solver: str = "auto"
    progress: Callable[[float], None] | None = None


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


class _Clock:
    """The time that is left, and telling of it."""

    def __init__(self, options: Options, num_operators: int) -> None:
        seconds = options.seconds
        self.seconds = min(45.0, 3.0 + 0.007 * num_operators) if seconds is None else seconds
        self.progress = options.progress
        self.start = time.monotonic()
        self.told = 0.0

    @property
    def gone(self) -> float:
        """The fraction of the time that is gone."""
        return (time.monotonic() - self.start) / max(self.seconds, 1e-9)

    def until(self, fraction: float) -> float:
        """The seconds until `fraction` of the time is gone."""
        return max(0.0, (fraction - self.gone) * self.seconds)

    def tell(self) -> None:
        """Tell how far the search is."""
        self.told = max(self.told, min(self.gone, 1.0))
        if self.progress is not None:
            self.progress(self.told)


class _Search:
    def __init__(self, problem: Problem, budget: int, options: Options) -> None:
        self.problem = problem
        self.budget = budget
        self.options = options
        self.clock = _Clock(options, len(problem.operators))
        self.trier = Trier(problem, budget)
        self.bound = 0.0
        self.best: Trial | None = None
        self.lowest: Trial | None = None
        self.trials: list[Trial] = []

    def run(self) -> Solution:
        """The answer."""
        if not self.note(self.trier(Decisions(self.problem.needed))).fits:
            self.note(self.trier(Decisions(self.trier.fixed)))
            if self.options.solver == "local":
                self._by_cuts()
            else:
                _Programs(self).run()
            self._polish()
        return self._solution()

    def note(self, trial: Trial) -> Trial:
        """Remember `trial` if it is the best or the lowest."""
        if self.lowest is None or trial.costs.peak < self.lowest.costs.peak:
            if trial.excess < 1 << 60:
                self.lowest = trial
        if trial.fits and (self.best is None or trial.rank < self.best.rank):
            self.best = trial
        self.trials.append(trial)
        self.clock.tell()
        return trial

    def is_good(self) -> bool:
        """Whether the best is near enough to the bound."""
        return (
            self.best is not None
            and self.best.costs.added_seconds <= self.bound * (1 + self.options.gap) + 1e-12
        )

    def _by_cuts(self) -> None:
        for saved in saved_by_cuts(self.problem, self.budget):
            self.note(self.trier(Decisions(saved)))

    def _polish(self) -> None:
        """Bring trials under the budget, and take time away."""
        for trial in sorted(self.trials, key=lambda t: t.costs.peak)[:_MOST_STARTS]:
            if self.best is not None and self.options.solver != "local":
                break
            self.note(self._local(1.0).repair(trial))
        if self.best is not None and not self.is_good():
            self.note(self._local(1.0).improve(self.best))

    def _local(self, fraction: float) -> LocalSearch:
        return LocalSearch(self.trier, time.monotonic() + self.clock.until(fraction))

    def repaired(self, trial: Trial, seconds: float) -> Trial:
        """`trial`, brought under the budget if that is quick."""
        deadline = time.monotonic() + min(seconds, self.clock.until(1.0))
        return self.note(LocalSearch(self.trier, deadline).repair(trial))

    def _solution(self) -> Solution:
        assert self.lowest is not None
        lowest = self.lowest.replay.schedule
        least = self.lowest.costs.peak
        if self.best is None:
            return Solution(None, float("inf"), least, self.bound, least, lowest)
        schedule = self.best.replay.schedule
        costs = costs_of(self.problem, schedule)
        bound = min(self.bound * (1 - 1e-7), costs.added_seconds)
        return Solution(schedule, costs.added_seconds, costs.peak, bound, least, lowest)


class _Programs:
    """The rounds of linear and integer programs."""

    def __init__(self, search: _Search) -> None:
        self.search = search
        self.clock = search.clock
        self.budget = search.budget
        self.problem = search.problem
        self.facts = Facts(search.problem)
        num = len(self.facts.operators)
        self.window: int | None = None if num <= _WHOLE else max(_LEAST_WINDOW, num // 16)
        self.most_hills = 12 if num <= 300 else 6
        self.moments: set[Moment] = set()
        self.positions: set[int] = set()
        self.conflicts: set[frozenset[int]] = set()

    def run(self) -> None:
        """Search until the time is over, or what was found is good."""
        relaxation = self._relax()
        while relaxation is None and self.window is not None and self.clock.gone < 0.5:
            self.window = None if self.window > len(self.facts.operators) // 2 else 2 * self.window
            relaxation = self._relax()
        if relaxation is not None:
            self._integers(relaxation)
        if self.window is not None:
            self._bound()

    def _program(
        self, *, bursts: bool = True, window: int | None = None, outer: bool = False
    ) -> SavingProgram:
        moments = [m for m in self.moments if bursts or not m.is_burst]
        return SavingProgram(
            self.facts,
            self.budget,
            moments,
            sorted(self.positions),
            window,
            conflicts=self.conflicts if bursts else (),
            outer=outer,
        )

    # --- linear programs ---------------------------------------------------------------------------

    def _relax(self) -> Relaxation | None:
        """The relaxation with the moments that matter for it; `None` if nothing fits."""
        trial = self.search.trials[0]
        relaxation = None
        for _ in range(_MOST_ROUNDS):
            if not self._add_moments(trial, bursts=False) and relaxation is not None:
                break
            if relaxation is not None and self.clock.gone > _RELAX_SHARE:
                break
            program = self._program(window=self.window)
            found = program.linear.relaxed(seconds=self.clock.until(_RELAX_SHARE + 0.3))
            self._note_bound(found.answer, whole=self.window is None)
            if found.answer.x is None:
                return relaxation if found.answer.bound == 0.0 else None
            relaxation = found
            trial = self._try(program, found.answer)
            self.program = program
        return relaxation

    def _note_bound(self, answer: Answer, *, whole: bool) -> None:
        if whole and answer.bound < float("inf"):
            self.search.bound = max(self.search.bound, answer.bound)

    def _try(self, program: SavingProgram, answer: Answer) -> Trial:
        assert answer.x is not None
        decisions = program.decisions(answer.x)
        late = self.search.note(self.search.trier(Decisions(decisions.saved, decisions.drops)))
        if late.fits or not decisions.early:
            return late
        early = self.search.note(self.search.trier(decisions))
        return min(early, late, key=lambda t: t.rank)

    def _add_all_moments(self) -> bool:
        """Add what is above the budget in the last trials."""
        tried = self.search.trials[-3:]
        return any([self._add_moments(trial, bursts=True) for trial in tried])

    def _add_moments(self, trial: Trial, *, bursts: bool) -> bool:
        """Add what is above the budget; whether there was something new."""
        before = len(self.moments) + len(self.positions) + len(self.conflicts)
        schedule = trial.replay.schedule
        num_forward = len(schedule.forward)
        distance = max(3, len(trial.costs.live) // 80)
        for number, i in enumerate(trial.hills(self.budget, distance)):
            if number == self.most_hills:
                break
            if i < num_forward:
                self._add_position(schedule.forward[i])
                if bursts:
                    self._add_conflict(trial, i)
            else:
                self._add_moment(
                    trial.replay.steps[i - num_forward], schedule.backward[i - num_forward], bursts
                )
        return len(self.moments) + len(self.positions) + len(self.conflicts) > before

    def _add_position(self, o: int) -> None:
        made = self.facts.forward_bytes.made
        values = self.problem.operators[o].writes
        if values and values[0] in made:
            self.positions.add(made[values[0]])

    def _add_conflict(self, trial: Trial, position: int) -> None:
        """What is saved by then is too much, if an operator runs that need not."""
        schedule, operators = trial.replay.schedule, self.problem.operators
        if operators[schedule.forward[position]].part is Part.KNOWN:
            ran = schedule.forward[: position + 1]
            made = {v for o in ran for v in operators[o].writes}
            there = frozenset(made.intersection(schedule.saved, self.facts.values))
            self.conflicts.add(there)

    def _add_moment(self, step: int, o: int, bursts: bool) -> None:
        self.moments.add(Moment(step))
        if bursts and o in self.facts.rank:
            self.moments.add(Moment(step, o))
            if step:
                self.moments.add(Moment(step - 1))

    # --- integer programs --------------------------------------------------------------------------

    def _integers(self, relaxation: Relaxation) -> None:
        free = _MOST_FREE
        for _ in range(_MOST_ROUNDS):
            program = self.program
            fixed = self._fixing(program, relaxation, free)
            left = self.clock.until(_SOLVE_SHARE)
            if left < 0.2 and self.search.best is not None:
                break
            share = max(left * 0.75, 0.5)
            answer = program.linear.solve(
                seconds=share, gap=self.search.options.gap / 2, fixed=fixed
            )
            if fixed is None and not self._is_narrow(program):
                self._note_bound(answer, whole=self.window is None)
            if answer.x is None:
                if fixed is None or self.clock.gone > _SOLVE_SHARE:
                    break
                free *= 3
                continue
            trial = self._try(program, answer)
            if trial.fits or self.search.is_good():
                if fixed is None or self.search.is_good():
                    break
                if trial.costs.added_seconds < relaxation.answer.value * (1 + 2 * _NEAR):
                    break
                free *= 3
                continue
            if (
                self.search.best is None
                or trial.costs.added_seconds < self.search.best.costs.added_seconds
            ):
                self.search.repaired(trial, 0.05 * self.clock.seconds)
            if not self._add_all_moments() or self.clock.gone > _SOLVE_SHARE:
                break
            self.program = self._program(window=self.window)
            if fixed is not None:
                found = self.program.linear.relaxed(seconds=self.clock.until(_SOLVE_SHARE))
                if found.answer.x is None:
                    break
                relaxation = found

    def _is_narrow(self, program: SavingProgram) -> bool:
        """Whether some schedules are no answers of `program`."""
        return bool(self.conflicts) or any(m.is_burst for m in program.moments)

    def _fixing(self, program: SavingProgram, relaxation: Relaxation, free: int) -> Fixing | None:
        """Values for all but the `free` variables of which the relaxation is least sure."""
        return program.linear.fixing(relaxation, free)

    def _bound(self) -> None:
        """The bound over all schedules."""
        size = len(self.facts.operators) * (2 + 4 * len(self.moments))
        outer = size > _LARGE
        program = self._program(bursts=False, window=self.window if outer else None, outer=outer)
        answer = program.linear.relaxed(seconds=max(self.clock.until(1.0), 1.0)).answer
        self._note_bound(answer, whole=True)


_WHOLE = 260
_LEAST_WINDOW = 100
_LARGE = 12000
_MOST_FREE = 2500
_MOST_ROUNDS = 12
_MOST_STARTS = 4
_RELAX_SHARE = 0.35
_SOLVE_SHARE = 0.75
_NEAR = 0.003
