"""Rounds of programs: each is solved, its answer simulated, and what is above the budget added.

rows for moments    program     simulated                     added
none                5 seconds   above the budget at step 3    step 3
step 3              8 seconds   above it at steps 1 and 7     steps 1 and 7
steps 1, 3, 7       9 seconds   keeps within the budget
"""

import time
from dataclasses import replace

from torchremat.planning.linear import Answer, Relaxation
from torchremat.planning.local_search import LocalSearch
from torchremat.planning.neighbourhoods import Neighbourhoods
from torchremat.planning.ordering import Decisions
from torchremat.planning.problem import Part
from torchremat.planning.program import Facts, Moment, SavingProgram
from torchremat.planning.record import Record
from torchremat.planning.trials import Trial, Trier


class Rounds:
    """The rounds of a search; what they find goes to `record`."""

    def __init__(self, trier: Trier, record: Record) -> None:
        self.trier = trier
        self.record = record
        self.clock = record.clock
        self.problem = trier.problem
        self.facts = Facts(trier.problem)
        num = len(self.facts.operators)
        self.window: int | None = None if num <= _WHOLE else max(_LEAST_WINDOW, num // 16)
        self.most_hills = 12 if num <= _WHOLE else 6
        self.moments: set[Moment] = set()
        self.positions: set[int] = set()
        self.conflicts: set[frozenset[int]] = set()
        self.program = self._program(self.window)

    def run(self) -> None:
        """Search until the time is over, or what was found is good."""
        relaxation = self._relaxed()
        while relaxation is None and self.window is not None and self.clock.gone < 0.5:
            wider = 3 * self.window
            self.window = None if wider > len(self.facts.operators) else wider
            relaxation = self._relaxed()
        if relaxation is not None:
            self._solve(relaxation)
        if not self.record.is_good:
            self._prove()

    def _program(
        self, window: int | None, *, narrow: bool = True, outer: bool = False
    ) -> SavingProgram:
        """The program with all rows; if not `narrow` with those that every schedule obeys."""
        return SavingProgram(
            self.facts,
            self.trier.budget,
            [m for m in self.moments if narrow or not m.is_burst],
            sorted(self.positions),
            window,
            conflicts=sorted(map(sorted, self.conflicts)) if narrow else (),
            outer=outer,
        )

    @property
    def _is_whole(self) -> bool:
        """Whether every schedule is an answer of the program."""
        bursts = any(m.is_burst for m in self.moments)
        return self.window is None and not bursts and not self.conflicts

    # --- in fractions ----------------------------------------------------------------------------

    def _relaxed(self) -> Relaxation | None:
        """The relaxation with the moments that matter for it; `None` if nothing fits."""
        self._add_moments(self.record.trials[0], narrow=False)
        found = self._relax()
        while found is not None and self.clock.gone < _RELAX_SHARE:
            if not self._add_moments(self._try(found.answer), narrow=False):
                break
            found = self._relax()
        return found

    def _relax(self) -> Relaxation | None:
        self.program = self._program(self.window)
        found = self.program.linear.relaxed(seconds=self.clock.until(_SOLVE_SHARE))
        if self._is_whole:
            self.record.prove(found.answer.bound)
        return None if found.answer.x is None else found

    def _try(self, answer: Answer) -> Trial:
        """Simulate an answer: as late as it can be, or as early as it says."""
        assert answer.x is not None
        decisions = self.program.decisions(answer.x)
        late = self.record.note(self.trier(Decisions(decisions.saved, decisions.drops)))
        if late.fits or not decisions.early:
            return late
        early = self.record.note(self.trier(decisions))
        return min(early, late, key=lambda t: t.rank)

    # --- in integers -----------------------------------------------------------------------------

    def _solve(self, relaxation: Relaxation) -> None:
        found: Relaxation | None = relaxation
        for _ in range(_MOST_ROUNDS):
            if found is None or self.clock.gone > _SOLVE_SHARE or self._search(found):
                break
            narrow = [self._add_moments(trial, narrow=True) for trial in self.record.trials[-2:]]
            if not any(narrow):
                break
            found = self._relax()

    def _search(self, relaxation: Relaxation) -> bool:
        """Search for answers of the program; whether the last keeps within the budget."""
        near = Neighbourhoods.of(self.program, relaxation)
        if len(near.integral) <= _SMALL:
            share = self.clock.until(_SOLVE_SHARE) * 0.6
            answer = self.program.linear.solve(seconds=share, gap=self.record.gap / 2)
            if self._is_whole:
                self.record.prove(answer.bound)
        else:
            found = near.first(_LEAST_FREE, self._left, self.record.gap / 4)
            answer = replace(found, bound=relaxation.answer.bound)  # not that of a part
        if answer.x is None:
            return True
        trial = self._try(answer)
        if trial.fits and not self.record.is_good and not _is_optimal(answer, self.record.gap):
            for better in near.improved(answer, self._left, self.record.gap / 4):
                trial = self._try(better)
                if not trial.fits or self.record.is_good:
                    break
        if not trial.fits:
            self._repair(trial)
        return trial.fits

    def _left(self) -> float:
        provable = self.program.linear.num_variables < _SOLVABLE
        return self.clock.until(_PROVABLE_SHARE if provable else _SOLVE_SHARE)

    def _repair(self, trial: Trial) -> None:
        """Bring `trial` under the budget if that is quick and it promises to be the best."""
        best = self.record.best
        if best is None or trial.costs.added_seconds < best.costs.added_seconds:
            seconds = min(0.04 * self.clock.seconds, self.clock.until(1.0))
            self.record.note(LocalSearch(self.trier, time.monotonic() + seconds).repair(trial))

    def _prove(self) -> None:
        """A bound for all schedules, and perhaps a better answer."""
        num = len(self.facts.operators) * (2 + 4 * len(self.moments))
        outer = self.window is not None and num > _LARGE
        self.program = self._program(self.window if outer else None, narrow=False, outer=outer)
        left = self.clock.until(1.0)
        if num > _SOLVABLE:
            self.record.prove(self.program.linear.relaxed(seconds=max(left, 1.0)).answer.bound)
        elif left > 0.1:
            answer = self.program.linear.solve(seconds=0.9 * left, gap=self.record.gap / 2)
            self.record.prove(answer.bound)
            if answer.x is not None and not outer:
                self._try(answer)

    # --- moments ---------------------------------------------------------------------------------

    def _add_moments(self, trial: Trial, *, narrow: bool) -> bool:
        """Add rows for what is above the budget; whether any is new."""
        before = len(self.moments) + len(self.positions) + len(self.conflicts)
        schedule = trial.replay.schedule
        num_forward = len(schedule.forward)
        distance = max(3, len(trial.costs.live) // 80)
        for number, i in enumerate(trial.hills(self.trier.budget, distance)):
            if number == self.most_hills:
                break
            if i < num_forward:
                self._add_position(trial, i, narrow)
            else:
                place = i - num_forward
                self._add_moment(trial.replay.steps[place], schedule.backward[place], narrow)
        return len(self.moments) + len(self.positions) + len(self.conflicts) > before

    def _add_moment(self, step: int, o: int, narrow: bool) -> None:
        self.moments.add(Moment(step))
        if narrow and o in self.facts.rank:
            self.moments.add(Moment(step, o))
            if step:
                self.moments.add(Moment(step - 1))

    def _add_position(self, trial: Trial, position: int, narrow: bool) -> None:
        order = trial.replay.schedule.forward
        op = self.problem.operators[order[position]]
        made = self.facts.forward_bytes.made
        if op.part is not Part.KNOWN:
            self.positions.update(made[v] for v in op.writes[:1])
        elif narrow:  # all that is saved by then is too much
            values = {v for o in order[: position + 1] for v in self.problem.operators[o].writes}
            saved = values.intersection(trial.decisions.saved, self.facts.values)
            self.conflicts.add(frozenset(saved))


def _is_optimal(answer: Answer, gap: float) -> bool:
    return answer.value <= answer.bound * (1 + gap) + 1e-12


_WHOLE = 260
_LEAST_WINDOW = 100
_SMALL = 1200
_LARGE = 12_000
_SOLVABLE = 9_000
_LEAST_FREE = 250
_MOST_ROUNDS = 16
_RELAX_SHARE = 0.35
_SOLVE_SHARE = 0.75
_PROVABLE_SHARE = 0.5
