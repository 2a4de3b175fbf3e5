"""The first rounds of a search: whole programs of few moments, which every schedule obeys.

    round    moments        fractions    integers, simulated
    1        the peak       2.26 ms      2.29 ms, above the budget at step 7
    2        and step 7     2.31 ms      2.31 ms, within the budget

The fractions prove a bound, whatever the size of the problem. Nearly all of them are integers, so
integers near them are found at once. A step that peaks in few places needs nothing more.
"""

from dataclasses import replace

from torchremat.planning.milp.linear_program import Answer, Relaxation
from torchremat.planning.milp.neighbourhood_search import Neighbourhoods
from torchremat.planning.milp.peak_rows import PeakRows
from torchremat.planning.milp.problem_index import ProblemIndex
from torchremat.planning.milp.saving_program import SavingProgram
from torchremat.planning.problem.trial import Evaluated, Evaluator
from torchremat.planning.search.incumbent import Incumbent

# Peaks that one answer adds: more make larger programs, fewer more rounds. Chosen by hand.
_MOST_PEAKS = 4
# Rounds at most. Each adds moments, and a program that has many is slow; chosen by hand.
_MOST_ROUNDS = 6
# Variables of the largest program but the first, which is solved in any case. Chosen by hand.
_MOST_VARIABLES = 15_000
# Integers left free around the fractions, one number after the other until an answer is good.
_FREE = (250, 1000, 8000)
# Nodes of each search among integers: most end at the first. Chosen by hand.
_MOST_NODES = 20


class WholeRounds:
    """The first rounds for `evaluator`; `incumbent` gets their trials and bounds."""

    def __init__(self, evaluator: Evaluator, incumbent: Incumbent) -> None:
        self.evaluator = evaluator
        self.incumbent = incumbent
        self.rows = PeakRows(ProblemIndex(evaluator.problem), evaluator.budget)

    def run(self, *, has_integers: bool = True) -> None:
        """Solve rounds while they find new peaks; without integers, one round in fractions."""
        is_new = self.rows.add_peaks(self.incumbent.trials[0], narrow=False, most=1)
        for number in range(_MOST_ROUNDS if has_integers else 1):
            program = self.rows.build_program(None, self.incumbent.clock.timer)
            is_large = program.linear.num_variables > _MOST_VARIABLES
            if not is_new or (number and (is_large or self._is_over)):
                break
            found = program.linear.relax()
            self.incumbent.prove(found.answer.bound)
            if found.answer.x is None:
                break
            trial = self._try(program, found.answer)
            if has_integers and not self._is_late:
                trial = self._solve(program, found) or trial
            if trial.fits or self.incumbent.is_good:
                break
            is_new = self.rows.add_peaks(trial, narrow=False, most=_MOST_PEAKS)

    @property
    def _is_over(self) -> bool:
        return self.incumbent.clock.elapsed_fraction > 1

    @property
    def _is_late(self) -> bool:
        """Whether integers would come too late: never before anything is proved."""
        return self._is_over and self.incumbent.bound > 0

    def _solve(self, program: SavingProgram, relaxation: Relaxation) -> Evaluated | None:
        """Look for integers near `relaxation`; the trial of the best, `None` without any."""
        near = Neighbourhoods.of(program, relaxation)
        trial, value = None, float("inf")
        for free in _FREE:
            if near.is_too_hard(free):
                break
            fixed = near.fix_sure(free)
            answer = program.linear.solve(
                gap=self.incumbent.gap / 2, fixed=fixed, nodes=_MOST_NODES
            )
            if fixed is None:
                self.incumbent.prove(answer.bound)
            if answer.x is not None and answer.value < value:
                trial, value = self._try(program, answer), answer.value
            if fixed is None or self._is_near(value) or self._is_late:
                break
        return trial

    def _is_near(self, value: float) -> bool:
        """Whether no answer that costs less than `value` is worth a search."""
        return value <= self.incumbent.bound * (1 + self.incumbent.gap)

    def _try(self, program: SavingProgram, answer: Answer) -> Evaluated:
        return try_answer(program, answer, self.evaluator, self.incumbent)[-1]


def try_answer(
    program: SavingProgram, answer: Answer, evaluator: Evaluator, incumbent: Incumbent
) -> list[Evaluated]:
    """Simulate an answer: recomputed as late as possible and, if that costs more, as it says."""
    assert answer.x is not None
    decisions = program.decisions(answer.x)
    late = incumbent.note(evaluator(replace(decisions, early={})))
    if late.fits and late.costs.added_seconds <= answer.value * (1 + 1e-6):
        return [late]
    return [late, incumbent.note(evaluator(decisions))]
