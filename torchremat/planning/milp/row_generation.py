"""Row generation: a program is solved and its answer simulated; peaks above the budget become rows.

    rows for moments    program     simulated                     added
    none                5 seconds   above the budget at step 3    step 3
    step 3              8 seconds   above it at steps 1 and 7     steps 1 and 7
    steps 1, 3, 7       9 seconds   within the budget

One moment for each operator would make the program exact, and too large to solve.
"""

from dataclasses import replace

from torchremat.planning.milp.intervals import PeakPoint
from torchremat.planning.milp.linear_program import Answer, Relaxation
from torchremat.planning.milp.neighbourhood_search import Neighbourhoods
from torchremat.planning.milp.peak_rows import PeakRows
from torchremat.planning.milp.problem_index import ProblemIndex
from torchremat.planning.milp.saving_program import SavingProgram
from torchremat.planning.milp.whole_rounds import try_answer
from torchremat.planning.problem.trial import Evaluated, Evaluator
from torchremat.planning.search.eviction import Evictor, try_evictions
from torchremat.planning.search.incumbent import Incumbent
from torchremat.planning.search.local_search import LocalSearch

# Operators of the largest problem without a window; docs/explanation/planner.md says why.
_WHOLE = 260
# The least window, in operators. A narrower one forbids more schedules; chosen by hand.
_LEAST_WINDOW = 100
# Values times steps of the largest program with all moments: its variables grow so. By hand.
_MOST_FINE = 6000
# Integers up to which HiGHS solves the whole program, not a neighbourhood. Chosen by hand.
_SMALL = 1200
# Estimated variables beyond which the program of the final bound has a window. Chosen by hand.
_LARGE = 40_000
# Variables up to which the final bound comes from integers, not fractions. Chosen by hand.
_SOLVABLE = 9_000
# Variables that the first neighbourhood leaves free. The number doubles until there is an answer.
_LEAST_FREE = 250
# Rounds of integer programs at most; the clock may end them before. Chosen by hand.
_MOST_ROUNDS = 16
# Moments in the program of the final bound, where there is a window: those found first matter most.
_MOST_PROVED = 8

# Shares of the time of the search, chosen by hand: a part that gets more leaves less to the next.
# The bound of the root, from the end of the forward pass alone, is a small program.
_ROOT_SHARE = 0.1
# The rounds in fractions end at this part of the time.
_RELAX_SHARE = 0.35
# One repair of an answer: each round may need one.
_REPAIR_SHARE = 0.04
# One repair of a start, without which there may be no schedule at all.
_FEASIBLE_SHARE = 0.2
# The rounds in integers end at this part. The rest is for the bound.
_SOLVE_SHARE = 0.85
# They end earlier where the best is within 5 % of the bound, so that a proof gets more time.
_PROVABLE_SHARE = 0.5


class RowGeneration:
    def __init__(self, evaluator: Evaluator, incumbent: Incumbent) -> None:
        self.evaluator = evaluator
        self.incumbent = incumbent
        self.clock = incumbent.clock
        self.problem = evaluator.problem
        self.index = ProblemIndex(evaluator.problem)
        self.evictor = Evictor(evaluator.problem, self.clock.deadline(1.0))
        num = len(self.index.operators)
        self.window: int | None = None if num <= _WHOLE else max(_LEAST_WINDOW, num // 16)
        self.most_peaks = 12 if num <= _WHOLE else 6
        self.rows = PeakRows(self.index, evaluator.budget)
        self.tried: list[Evaluated] = []  # answers of programs
        self.program = self._build_program()

    def run(self) -> None:
        if self.window is not None:
            self._prove_root_bound()
        relaxation = self._relax()
        while relaxation is None and self.window is not None and self.clock.elapsed_fraction < 0.5:
            wider = 3 * self.window
            self.window = None if wider > len(self.index.operators) else wider
            relaxation = self._relax()
        self._repair_feasible()
        if relaxation is not None or self.incumbent.best is not None:
            self._solve(relaxation)
        if not self.incumbent.is_good:
            self._prove()

    @property
    def is_fine(self) -> bool:
        return len(self.index.values) * len(self.index.direct) <= _MOST_FINE

    def refine(self) -> None:
        """Search around the best schedule, with all moments of the backward pass as rows."""
        self.window = None
        self.rows.moments.update((PeakPoint(step), None) for step in range(len(self.index.direct)))
        self.rows.positions.update(self.index.forward_bytes.made.values())
        for _ in range(_MOST_ROUNDS):
            self.program = self._build_program()
            if (
                self._improve(Neighbourhoods.of(self.program, None))
                or self._compute_seconds_left() <= 0
            ):
                break
            if not any([self._add_moments(trial, narrow=True) for trial in self.tried[-2:]]):
                break

    def _build_program(self) -> SavingProgram:
        return self.rows.build_program(self.window, self.clock.timer)

    @property
    def _is_whole(self) -> bool:
        """Whether every schedule is an answer of the program."""
        return self.window is None and self.rows.are_for_all

    def _relax(self) -> Relaxation | None:
        self._add_moments(self.incumbent.trials[0], narrow=False)
        found = self._solve_relaxation()
        while found is not None and self.clock.elapsed_fraction < _RELAX_SHARE:
            if not self._add_moments(self._try(found.answer), narrow=False):
                break
            found = self._solve_relaxation()
        return found

    def _solve_relaxation(self) -> Relaxation | None:
        self.program = self._build_program()
        found = self.program.linear.relax(seconds=self.clock.seconds_until(_SOLVE_SHARE))
        if self._is_whole:
            self.incumbent.prove(found.answer.bound)
        return None if found.answer.x is None else found

    def _try(self, answer: Answer) -> Evaluated:
        self.tried += try_answer(self.program, answer, self.evaluator, self.incumbent)
        return self.tried[-1]

    def _repair_feasible(self) -> None:
        relaxed = self.incumbent.trials[-1]
        if not relaxed.fits:
            self._repair(relaxed, _FEASIBLE_SHARE)
        if self.incumbent.best is None:
            self._repair(self.incumbent.trials[1], _FEASIBLE_SHARE)

    def _solve(self, relaxation: Relaxation | None) -> None:
        found = relaxation
        for _ in range(_MOST_ROUNDS):
            if self._search(found) or self._compute_seconds_left() <= 0:
                break
            if not any([self._add_moments(trial, narrow=True) for trial in self.tried[-2:]]):
                break
            found = self._solve_relaxation()
            if found is None and self.incumbent.best is None:
                break

    def _search(self, relaxation: Relaxation | None) -> bool:
        """Search for answers of the program; whether all fit the budget."""
        near = Neighbourhoods.of(self.program, relaxation)
        answer = self._first(near, relaxation)
        if answer.x is not None:
            trial = self._try(answer)
            if not trial.fits:
                self._repair(trial, _REPAIR_SHARE)
                return False
            if _is_optimal(answer, self.incumbent.gap):
                return True
        return self._improve(near)

    def _first(self, near: Neighbourhoods, relaxation: Relaxation | None) -> Answer:
        gap = self.incumbent.gap
        if len(near.integral) <= _SMALL:
            share = self._compute_seconds_left() * 0.6
            answer = self.program.linear.solve(seconds=share, gap=gap / 2)
            if self._is_whole:
                self.incumbent.prove(answer.bound)
            return answer
        if relaxation is None:
            return Answer(None, float("inf"), 0.0)
        answer = near.find_first(_LEAST_FREE, self._compute_seconds_left, gap / 4)
        return replace(answer, bound=relaxation.answer.bound)  # not that of a part

    def _improve(self, near: Neighbourhoods) -> bool:
        """Search around the best schedule; whether all answers fit the budget."""
        best = self.incumbent.best
        x = None if best is None else self.program.variables_of(best.replay)
        if best is None or x is None or self.incumbent.is_good:
            return True
        start = Answer(x, best.costs.added_seconds, 0.0)
        for better in near.improve(start, self._compute_seconds_left, self.incumbent.gap / 4):
            trial = self._try(better)
            if not trial.fits:
                self._repair(trial, _REPAIR_SHARE)
                return False
            if self.incumbent.is_good:
                break
        return True

    def _compute_seconds_left(self) -> float:
        """The seconds for answers; where a proof may come of it, some are left for that."""
        best = self.incumbent.best
        provable = self.program.linear.num_variables < _SOLVABLE
        near = best is not None and best.costs.added_seconds < 1.05 * self.incumbent.bound
        return self.clock.seconds_until(_PROVABLE_SHARE if provable and near else _SOLVE_SHARE)

    def _repair(self, trial: Evaluated, share: float) -> None:
        """Bring `trial` under the budget if that is quick and it promises to be the best."""
        best = self.incumbent.best
        if best is None or trial.costs.added_seconds < best.costs.added_seconds:
            if not trial.decisions.offloaded:  # eviction knows no link
                for found in try_evictions(self.evaluator, self.evictor, trial.decisions.saved):
                    self.incumbent.note(found)
            seconds = min(share * self.clock.seconds, self.clock.seconds_until(1.0))
            self.incumbent.note(
                LocalSearch(self.evaluator, self.clock.timer.within(seconds)).repair(trial)
            )

    def _prove_root_bound(self) -> None:
        made = self.index.forward_bytes.made
        positions = [max(made.values(), default=0)]
        program = SavingProgram(
            self.index, self.evaluator.budget, [], positions, timer=self.clock.timer
        )
        seconds = self.clock.seconds_until(_ROOT_SHARE)
        self.incumbent.prove(program.linear.relax(seconds=seconds).answer.bound)

    def _prove(self) -> None:
        moments = [m for m in self.rows.moments if not m.is_recompute]
        if self.window is not None:  # the first ones matter most
            moments = moments[:_MOST_PROVED]
        num = len(self.index.operators) * (2 + 4 * len(moments))
        outer = self.window is not None and num > _LARGE
        window = self.window if outer else None
        program = SavingProgram(
            self.index,
            self.evaluator.budget,
            moments,
            sorted(self.rows.positions),
            window,
            outer=outer,
            timer=self.clock.timer,
        )
        left = self.clock.seconds_until(1.0)
        if num > _SOLVABLE:
            self.incumbent.prove(program.linear.relax(seconds=max(left, 1.0)).answer.bound)
        elif left > 0.1:
            answer = program.linear.solve(seconds=0.9 * left, gap=self.incumbent.gap / 2)
            self.incumbent.prove(answer.bound)
            if answer.x is not None and not outer:
                self.program = program
                self._try(answer)

    def _add_moments(self, trial: Evaluated, *, narrow: bool) -> bool:
        """Add rows for what is above the budget; whether any is new."""
        return self.rows.add_peaks(trial, narrow=narrow, most=self.most_peaks)


def _is_optimal(answer: Answer, gap: float) -> bool:
    return answer.value <= answer.bound * (1 + gap) + 1e-12
