"""The least peak of a problem: schedules near it, and budgets that are proved too small."""

from collections.abc import Callable
from itertools import islice

from torchremat.planning.problem.backward_order import floor_of
from torchremat.planning.problem.problem import Problem
from torchremat.planning.problem.trial import Evaluated, Evaluator
from torchremat.planning.search.backward_search import BackwardSearch, Limits
from torchremat.planning.search.clock import NEVER, Deadline
from torchremat.planning.search.eviction import Evictor, try_evictions

# Sets that a search for the least peak goes on with. More of them take longer; chosen by hand.
_LOWEST_WIDTH = 50
# Answers of one such search that are simulated. The first one that fits ends it.
_MOST_TRIED = 4
# Of the budget, the part below which a value is reckoned as no bytes in a proof. That keeps the
# sets few, and the proof valid: what does not fit without small values does not fit with them.
_SMALL_PART = 200
# Sets after which a proof is given up; chosen by hand.
_PROOF_STATES = 20_000


def find_lowest_by_eviction(evictor: Evictor, low: int, high: int) -> Evaluated | None:
    """The trial of least peak from `low` to `high`, to within a thousandth; `None` if none is."""

    def find(evaluator: Evaluator) -> Evaluated | None:
        trials = (
            trial
            for start in (evictor.problem.known, evaluator.fixed)
            for trial in try_evictions(evaluator, evictor, start)
        )
        return next((trial for trial in trials if trial.fits), None)

    return _bisect(evictor.problem, low, high, find, evictor.deadline)


def find_lowest_by_steps(problem: Problem, high: int, deadline: Deadline) -> Evaluated | None:
    """The trial of least peak below `high`, to within a thousandth; `None` if none is found."""
    search = BackwardSearch(problem)
    limits = Limits(_LOWEST_WIDTH, deadline=deadline, free=True)

    def find(evaluator: Evaluator) -> Evaluated | None:
        found = search.decisions(search.run(evaluator.budget, limits))
        return next((t for t in map(evaluator, islice(found, _MOST_TRIED)) if t.fits), None)

    return _bisect(problem, floor_of(problem), high, find, deadline)


def _bisect(
    problem: Problem,
    low: int,
    high: int,
    find: Callable[[Evaluator], Evaluated | None],
    deadline: Deadline,
) -> Evaluated | None:
    """The lowest trial that `find` returns for a budget from `low`, which is tried first."""
    best: Evaluated | None = None
    budget = low
    while low < high and not deadline.is_over:
        found = find(Evaluator(problem, budget, deadline.charge))
        if found is None:
            low = budget + max(1, budget // 1000)
        else:
            best, high = found, found.costs.peak
        budget = (low + high) // 2
    return best


def is_too_small(problem: Problem, budget: int, deadline: Deadline = NEVER) -> bool:
    """Whether it is proved that no schedule of `problem` keeps within `budget` bytes.

    The operators of both passes run in their order, and recomputation in that of the forward pass.
    Small values count as no bytes, which can only make more schedules fit.
    """
    search = BackwardSearch(problem, budget // _SMALL_PART)
    limits = Limits(states=_PROOF_STATES, deadline=deadline, free=True)
    return search.run(budget, limits).is_proof
