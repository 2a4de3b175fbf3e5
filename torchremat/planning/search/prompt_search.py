"""The answers that take little time: of 1,800 operators 2 s, and 28 s find none better."""

from torchremat.planning.problem.replay import Decisions
from torchremat.planning.problem.trial import Evaluated, Evaluator
from torchremat.planning.search.clock import NEVER, Deadline
from torchremat.planning.search.eviction import RULES, Evictor, try_evictions
from torchremat.planning.search.incumbent import Incumbent
from torchremat.planning.search.local_search import LocalSearch
from torchremat.planning.search.min_cut import SECONDS_OF_CUT, cut_saved_sets

# Of the time of a step, what is not worth local moves. They take as long as all else does, and gain
# little near the bound. Chosen by hand.
_LITTLE = 0.003


def search_promptly(
    evaluator: Evaluator, incumbent: Incumbent, near: Evaluated | None, deadline: Deadline
) -> None:
    """Note minimum cuts, evictions and local moves, until `deadline` if one of them fits.

    `near` is brought under the budget if nothing else fits.
    """
    problem = evaluator.problem
    for saved in cut_saved_sets(problem):
        incumbent.clock.timer.charge(SECONDS_OF_CUT * len(problem.operators))
        incumbent.note(evaluator(Decisions(saved)))
        if deadline.is_over:
            break
    _evict(evaluator, incumbent, deadline)
    if incumbent.best is None and near is not None:
        incumbent.note(LocalSearch(evaluator, deadline).repair(near))
    best = incumbent.best
    little = _LITTLE * problem.step_seconds
    if best is not None and best.costs.added_seconds - incumbent.bound > little:
        incumbent.note(LocalSearch(evaluator, deadline).improve(best))


def _evict(evaluator: Evaluator, incumbent: Incumbent, deadline: Deadline) -> None:
    problem = evaluator.problem
    for start in (problem.known, evaluator.fixed):
        for rule in RULES:
            if incumbent.best is None or not deadline.is_over:
                evictor = Evictor(problem, deadline if incumbent.best else NEVER)
                for trial in try_evictions(evaluator, evictor, start, (rule,)):
                    incumbent.note(trial)
        if incumbent.best is not None:
            break
