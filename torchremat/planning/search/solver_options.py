"""The question to the solver, and its answer."""

from collections.abc import Callable
from dataclasses import dataclass

from torchremat.planning.problem.problem import Problem, Schedule

# Near enough to the bound for a small problem. Its last 0.2 % would take most of the time.
_LEAST_GAP = 0.002
# The same for a large one, where each thousandth takes seconds; chosen by hand.
_MOST_GAP = 0.01
# Operators up to which the first of them holds.
_MOST_EXACT = 500
# Of the time of a step of more operators: what is not worth a search. Chosen by hand.
_LITTLE = 1e-4
# For each operator more: 0.8 % of a thousand operators took a second, and 0.4 % five.
_MORE_GAP = 1.2e-5


@dataclass(frozen=True)
class SolverOptions:
    """How long and how hard to search.

    Attributes:
        seconds: the time to take at most, roughly; the best found by then is the answer. Without
            it, 5 seconds and 6 more for each thousand operators, at most 28, in work that is
            counted: the clock plays no part, and the answer is the same on every machine.
        gap: how near to the optimum, as a fraction, is near enough. Without it, 0.002, and of more
            than 500 operators more: 0.008 of a thousand, 0.01 at most.
        solver: "milp" or "auto" for integer programs; "local" for minimum cuts and local search.
        progress: called now and then with the elapsed fraction of the time.
        near: a schedule of the same operators, at other sizes say, that the search begins from.
        enough: seconds that an answer may add. The first that adds no more ends the search, and so
            does the proof that there is none; there may then be no answer.
        share: the part of that time that this search has, as one of several.
        is_prompt: whether the first answers are enough: half a second, and as much more for each
            thousand operators. There may then be none where a longer search finds one.
    """

    seconds: float | None = None
    gap: float | None = None
    solver: str = "auto"
    progress: Callable[[float], None] | None = None
    near: Schedule | None = None
    is_prompt: bool = False
    enough: float | None = None
    share: float = 1.0

    def gap_for(self, problem: Problem) -> float:
        if self.gap is not None:
            return self.gap
        more = _MORE_GAP * max(0, len(problem.operators) - _MOST_EXACT)
        return min(_LEAST_GAP + more, _MOST_GAP)

    def little_for(self, problem: Problem) -> float:
        """Seconds that are not worth a search: 0 where a search is short."""
        if self.gap is not None or len(problem.operators) <= _MOST_EXACT:
            return 0.0
        return _LITTLE * problem.step_seconds

    def seconds_for(self, problem: Problem) -> float:
        if self.seconds is not None:
            return self.share * self.seconds
        if self.is_prompt:
            return 0.5 + 0.0005 * len(problem.operators)
        return self.share * min(28.0, 5.0 + 0.006 * len(problem.operators))


@dataclass(frozen=True)
class Solution:
    """The answer.

    Attributes:
        schedule: the best schedule found; `None` if none fits.
        lower_bound_seconds: no schedule that fits, with the operators of both passes in their
            order, adds less.
        least_peak: the least peak that was found.
        gap_reason: why the schedule is far from the bound, where it is.
    """

    schedule: Schedule | None
    added_seconds: float
    peak: int
    lower_bound_seconds: float
    least_peak: int
    lowest: Schedule
    gap_reason: str = ""
