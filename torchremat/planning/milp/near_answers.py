"""Schedules that fit, near answers of programs that are above the budget when they are simulated.

A program of few moments does not see that recomputation needs memory itself. Rounds with more
moments may take all of the time of a search. So what an answer for less memory saves is saved, and
the rest of the budget is for recomputation, stage by stage:

    unrolled GAN, half of the peak     saved for     with stages, within half of it
                                       50 %          does not fit
                                       45 %          adds 25.9 % of the forward pass
                                       40 %          adds 25.9 %; no schedule adds less than 25.4 %
"""

from torchremat.planning.chains.cut_stages import try_stages
from torchremat.planning.milp.whole_rounds import WholeRounds
from torchremat.planning.problem.replay import Decisions
from torchremat.planning.problem.trial import Evaluator
from torchremat.planning.search.clock import Deadline, TimeSlice, WorkTimer
from torchremat.planning.search.incumbent import Incumbent
from torchremat.planning.search.local_search import LocalSearch

# Of the budget, those of the programs. Chosen by hand.
_SMALLER = (0.9, 0.75, 0.6)
# The point of the search by which the last of these begins. The rest is for answers above it.
_PROGRAM_SHARE = 0.7
# Answers above the budget that are brought under it, at most.
_MOST_ANSWERS = 4
# The search ends where the best is so near to its bound: 3 %, by hand.
_FAR = 0.03


def search_near(evaluator: Evaluator, incumbent: Incumbent, seconds: float) -> None:
    """Note schedules that fit near answers that do not; this has `seconds` of its own."""
    timer = WorkTimer(has_wall=incumbent.clock.timer.has_wall)
    evaluator = Evaluator(evaluator.problem, evaluator.budget, timer.charge)
    clock = TimeSlice(timer, seconds)
    if not evaluator.problem.offloadable:  # what is on the host takes no room in a stage
        _try_stages(evaluator, incumbent, clock)
    if not incumbent.is_near(_FAR):
        _bring_under(evaluator, incumbent, clock.deadline(1.0))


def _try_stages(evaluator: Evaluator, incumbent: Incumbent, clock: TimeSlice) -> None:
    deadline = clock.deadline(1.0)
    try_stages(evaluator, incumbent, deadline)
    for factor in _SMALLER:
        if incumbent.is_near(_FAR) or clock.elapsed_fraction > _PROGRAM_SHARE:
            break
        saved = _solve_in_fractions(evaluator.under(int(factor * evaluator.budget)), clock)
        if saved:
            try_stages(evaluator, incumbent, deadline, saved)


def _solve_in_fractions(smaller: Evaluator, clock: TimeSlice) -> frozenset[int]:
    """Solve the first program for a smaller budget: what its answer saves, rounded."""
    found = Incumbent(clock, 0.0)
    found.note(smaller(Decisions(smaller.problem.needed)))
    WholeRounds(smaller, found).run(has_integers=False)
    return found.trials[-1].decisions.saved if len(found.trials) > 1 else frozenset()


def _bring_under(evaluator: Evaluator, incumbent: Incumbent, deadline: Deadline) -> None:
    """Bring answers under the budget that are above it and add less than the best."""
    local = LocalSearch(evaluator, deadline)
    before = incumbent.best
    above = (t for t in incumbent.trials if not t.fits and t.is_allowed)
    for trial in sorted(above, key=lambda t: t.costs.peak)[:_MOST_ANSWERS]:
        if incumbent.best is None or trial.costs.added_seconds < incumbent.best.costs.added_seconds:
            incumbent.note(local.repair(trial))
    if incumbent.best is not None and incumbent.best is not before:
        incumbent.note(local.improve(incumbent.best))
