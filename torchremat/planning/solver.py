"""The solver: the schedule of least added time within a budget, with a proof of how near it is.

    relax       a linear program for what is saved, and recomputed when; its answer, rounded, is
                simulated, and the moments that are above the budget become rows of it
    solve       the same in integers, again with rows for what the simulation finds
    improve     small changes that bring an answer under the budget, or take time away

An `Incumbent` has the best schedule that the simulation accepted so far, and the proved bound.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from torchremat.planning.chains.chain_optimum import try_chains
from torchremat.planning.chains.cut_stages import try_stages
from torchremat.planning.milp.near_answers import search_near
from torchremat.planning.milp.row_generation import RowGeneration
from torchremat.planning.milp.whole_rounds import WholeRounds
from torchremat.planning.problem.backward_order import floor_of
from torchremat.planning.problem.orders import find_lowest_need, renumber_back
from torchremat.planning.problem.problem import Problem, Schedule
from torchremat.planning.problem.replay import Decisions
from torchremat.planning.problem.trial import Evaluated, Evaluator
from torchremat.planning.search.backward_search import BackwardFrontier, BackwardSearch, Limits
from torchremat.planning.search.clock import Deadline, TimeSlice, WorkTimer
from torchremat.planning.search.eviction import Evictor, try_evictions
from torchremat.planning.search.incumbent import Incumbent
from torchremat.planning.search.least_peak import (
    find_lowest_by_eviction,
    find_lowest_by_steps,
    is_too_small,
)
from torchremat.planning.search.local_search import LocalSearch
from torchremat.planning.search.min_cut import SECONDS_OF_CUT, cut_saved_sets
from torchremat.planning.search.prompt_search import search_promptly
from torchremat.planning.search.solution import build_solution
from torchremat.planning.search.solver_options import Solution, SolverOptions

# The shares below divide the time of a search, which is work that is counted. They were chosen by
# hand: a part with a larger share may find better schedules, and leaves less to those after it.

# Of the whole time, the search that uses the link to a host. The search without it gets the rest.
_LINKED_SHARE = 0.6
# Of the search without the link, the part without offloading. The rest improves its answer.
_ALONE_SHARE = 0.7
# Of the whole time, the pass that saves what is offloaded in vain. It comes on top of the limit.
_TIDY_SHARE = 0.1
# Of the whole time, the search near answers of the first programs that do not fit. It comes on top.
_NEAR_SHARE = 0.6
# More time, as a part of the first search, where no schedule was found that fits.
_SPARE = 0.5
# The point of the first search by which eviction and a search from the last step end.
_EVICTION_SHARE = 0.3
# The same for a problem of more than `_MOST_OPERATORS`: its programs get more of the time.
_LARGE_SHARE = 0.1
# The point by which local moves end that start from nothing saved, where a budget is low.
_LOW_SHARE = 0.3
# Of the whole time, the first search of a small problem. What follows improves its answer.
_FIRST_SHARE = 0.5
# Of the time that is left then, the wider searches from the last step.
_BACK_SHARE = 0.6
# Of the time that is left after them, the program with all moments.
_REFINE_SHARE = 0.8
# Of the time for one larger budget, the search for it. The rest brings its answer under ours.
_EASIER_SHARE = 0.6
# Times the budget: the larger budgets whose plans are brought under it. A budget near the
# floor, where few schedules fit, needs them most. The factors were chosen by hand.
_EASIER = (1.04, 1.1, 1.2)
# Times the floor of the order. Below, moves from nothing saved are best, and run first.
_LOW = 1.06
# The searches after the first run only where the best is further from its bound: 3 %, by hand.
_FAR = 0.03
# Of the time of a step, what is not worth a prompt search of another order of the forward pass,
# which takes as long as that of the first. Chosen by hand.
_PROMPT_ORDERS = 0.03
# Values times steps of the largest problem that is searched from the last step to the first. The
# sets of values grow with both. Chosen by hand; docs/explanation/planner.md names it.
_MOST_SEARCHED = 20_000
# Sets that the first search from the last step goes on with: more take longer. By hand.
_FIRST_WIDTH = 50
# The widths of the later searches, each twice the last. They end once no set was left out.
_WIDTHS = (25, 50, 100, 200, 400, 800)
# Sets that these searches look at: the clock would not end them alike on every machine.
_MOST_STATES = 150_000
# Operators of the largest problem that gets more than the first search.
_MOST_OPERATORS = 3000
# Known values of the largest problem whose first program is solved in fractions only: the rounds
# after it have no window there, and solve the same in integers.
_MOST_WHOLE = 260
# Minimum cuts that are tried even when the time is over, so that there is a start to improve.
_LEAST_CUTS = 4
# Searches for a peak below the least that was found, each below the last; chosen by hand.
_MOST_DESCENTS = 2
# Of the whole time, each of them: most find nothing, and nobody waits gladly for an error.
_DESCENT_SHARE = 0.1
# The gap that ends them: whatever time the schedule adds, its peak alone counts.
_ANY_GAP = 1e6
# Schedules above the budget that are repaired, and answers of one search that are simulated.
_MOST_STARTS = 4
# The gap of an optimum, with what HiGHS leaves open.
_SAFE_GAP = 1e-6


def solve(problem: Problem, budget: int, options: SolverOptions | None = None) -> Solution:
    """The schedule of least added time whose peak is at most `budget` bytes.

    The operators of the backward pass that need cotangents run in the order of `problem`. The
    answer has no schedule if none was found; `least_peak` is then what one can get down to.
    """
    options = options or SolverOptions()
    timer = WorkTimer(has_wall=options.seconds is not None)
    incumbent = _search_links(problem, budget, options, timer)
    if incumbent.best is None and not options.is_prompt and options.enough is None:
        _take_least(problem, budget, incumbent, options)
    return build_solution(problem, incumbent, budget)


def _search_links(
    problem: Problem, budget: int, options: SolverOptions, timer: WorkTimer
) -> Incumbent:
    """Search with the link to a host, if there is one, and without it."""
    seconds = options.seconds_for(problem)
    if not problem.offloadable:
        return _search(problem, budget, options, timer, seconds)
    incumbent = _search(problem, budget, options, timer, _LINKED_SHARE * seconds)
    if not incumbent.is_good:
        left = replace(options, progress=None)
        _search_without_link(problem, budget, left, (1 - _LINKED_SHARE) * seconds, incumbent)
    if incumbent.best is not None:
        evaluator = Evaluator(problem, budget, timer.charge)
        local = LocalSearch(evaluator, timer.within(_TIDY_SHARE * seconds))
        incumbent.note(local.save_needless_copies(incumbent.best))
    return incumbent


def _take_least(
    problem: Problem, budget: int, incumbent: Incumbent, options: SolverOptions
) -> None:
    """Take the schedule of least peak where nothing else was found.

    It does not depend on the budget. So the least peak that an error names is a budget that is met.
    """
    least = _find_least(problem, options.seconds, options.solver)
    timer = WorkTimer(has_wall=options.seconds is not None)
    evaluator = Evaluator(problem, budget, timer.charge)
    incumbent.lowest = incumbent.note(evaluator(least))
    if incumbent.lowest.fits:
        deadline = timer.within(options.seconds_for(problem))
        incumbent.note(LocalSearch(evaluator, deadline).improve(incumbent.lowest))


@functools.lru_cache(maxsize=16)  # budgets that are too small are tried one after the other
def _find_least(problem: Problem, seconds: float | None, solver: str) -> Decisions:
    """The decisions of least peak that are found, whatever time they add."""
    options = SolverOptions(seconds, _ANY_GAP, solver)
    timer = WorkTimer(has_wall=seconds is not None)
    seconds = options.seconds_for(problem)
    incumbent = Incumbent(TimeSlice(timer, seconds), 0.0)
    evaluator = Evaluator(problem, 0, timer.charge)
    incumbent.note(evaluator(Decisions(problem.needed)))
    _begin(evaluator, incumbent, None)
    if problem.offloadable:
        alone = replace(problem, host_bytes_per_second=None)
        incumbent.note(evaluator(_find_least(alone, options.seconds, solver)))
    else:
        try_stages(evaluator, incumbent, timer.within(seconds))
    _find_lowest(incumbent, Evictor(problem, timer.within(seconds)))
    assert incumbent.lowest is not None
    for _ in range(_MOST_DESCENTS):
        budget = incumbent.lowest.costs.peak - 1
        if budget < floor_of(problem) or incumbent.clock.elapsed_fraction > 1:
            break
        found = _search(problem, budget, options, timer, _DESCENT_SHARE * seconds).best
        if found is None:
            break
        incumbent.note_lowest(found)
    return incumbent.lowest.decisions


def solve_orders(
    problems: Sequence[Problem], budget: int, options: SolverOptions | None = None
) -> Solution:
    """The best `solve` of `problems`, which differ in their order as those of `orders_of` do.

    If in one of them nothing need be recomputed, it is the first of these. Else those that order
    the forward pass anew are all searched, by a prompt search unless an answer is near its bound.
    Orders that need more than `budget` are left out. If none has an answer, it is that of the
    least peak.
    """
    plain = (p for p in problems if Evaluator(p, budget)(Decisions(p.needed)).fits)
    first = next(plain, None)
    if first is not None:
        return _solve_renumbered(first, budget, options)
    problems = [p for p in problems if find_lowest_need(p) <= budget] or problems
    anew = [problem for problem in problems if problem.numbers is not None]
    solutions = _solve_given([p for p in problems if p.numbers is None], budget, options)
    if not _is_settled(solutions, problems, options or SolverOptions()):
        solutions += [_solve_renumbered(problem, budget, options) for problem in anew]
    if all(solution.schedule is None for solution in solutions):
        return min(solutions, key=lambda solution: solution.least_peak)
    best = min(solutions, key=lambda solution: (solution.added_seconds, solution.peak))
    bound = min(solution.lower_bound_seconds for solution in solutions)
    return replace(best, lower_bound_seconds=bound)  # in another order, one might add less


def _is_settled(
    solutions: Sequence[Solution], problems: Sequence[Problem], options: SolverOptions
) -> bool:
    """Whether an answer makes a search of further orders of the forward pass needless."""
    found = [s for s in solutions if s.schedule is not None]
    if options.enough is not None and any(s.added_seconds <= options.enough for s in found):
        return True
    gaps = (s.added_seconds - s.lower_bound_seconds for s in found)
    near = _PROMPT_ORDERS * problems[0].step_seconds
    return options.is_prompt and min(gaps, default=math.inf) <= near


def _solve_given(
    problems: Sequence[Problem], budget: int, options: SolverOptions | None
) -> list[Solution]:
    """The solutions of `problems` as far as the first that has an answer.

    Only where a problem is small is there more in the orders after the first than time they take.
    """
    solutions: list[Solution] = []
    for problem in problems:
        if solutions and not _is_searchable(problem):
            break
        solutions.append(solve(problem, budget, options))
        if solutions[-1].schedule is not None:
            break
    return solutions


def _solve_renumbered(problem: Problem, budget: int, options: SolverOptions | None) -> Solution:
    found = solve(problem, budget, options)
    schedule = None if found.schedule is None else renumber_back(problem, found.schedule)
    return replace(found, schedule=schedule, lowest=renumber_back(problem, found.lowest))


def _search(
    problem: Problem, budget: int, options: SolverOptions, timer: WorkTimer, seconds: float
) -> Incumbent:
    is_small = len(problem.operators) <= _MOST_OPERATORS
    whole = TimeSlice(timer, seconds)
    is_first = is_small and not options.is_prompt
    clock = TimeSlice(timer, _FIRST_SHARE * seconds if is_first else seconds, options.progress)
    evaluator = Evaluator(problem, budget, timer.charge)
    gap, little = options.gap_for(problem), options.little_for(problem)
    incumbent = Incumbent(clock, gap, little, options.enough)
    if incumbent.note(evaluator(Decisions(problem.needed))).fits:
        return incumbent
    near = _begin(evaluator, incumbent, options.near)
    floor, is_large = floor_of(problem), len(problem.known) > _MOST_WHOLE
    if budget >= floor:
        has_integers = is_large and options.solver != "local"
        try_chains(evaluator, incumbent)
        if not incumbent.is_good:
            WholeRounds(evaluator, incumbent).run(has_integers=has_integers)
        if not incumbent.is_near(_FAR):
            search_near(evaluator, incumbent, _NEAR_SHARE * seconds)
    if incumbent.is_near(_SAFE_GAP) or (is_large and incumbent.is_good):
        return incumbent
    if options.is_prompt and not problem.offloadable:
        if budget >= floor and not incumbent.is_near(_FAR):
            search_promptly(evaluator, incumbent, near, clock.deadline(1.0))
        return incumbent
    share = _EVICTION_SHARE if is_small else _LARGE_SHARE
    if budget < floor or not _start(evaluator, incumbent, clock.deadline(share)):
        return incumbent
    _search_on(evaluator, incumbent, options, is_low=budget < _LOW * floor)
    if incumbent.best is None:
        _repair_feasible(evaluator, incumbent, timer.within(_SPARE * clock.seconds))
    elif is_small and not incumbent.is_near(_FAR):
        _search_further(evaluator, incumbent, whole)
    return incumbent


def _search_on(
    evaluator: Evaluator, incumbent: Incumbent, options: SolverOptions, *, is_low: bool
) -> None:
    if incumbent.best is not None and is_low:
        local = LocalSearch(evaluator, incumbent.clock.deadline(_LOW_SHARE))
        incumbent.note(local.improve(incumbent.best))
    if options.solver != "local":
        RowGeneration(evaluator, incumbent).run()
    if incumbent.best is None:
        _cut(evaluator, incumbent)
    _polish(evaluator, incumbent)


def _search_further(evaluator: Evaluator, incumbent: Incumbent, whole: TimeSlice) -> None:
    """Look further in the rest of the time, where the best is far from its bound."""
    if _is_searchable(evaluator.problem):
        deadline = whole.timer.within(_BACK_SHARE * whole.seconds_until(1.0))
        _step_back_wider(evaluator, incumbent, deadline)
    _refine(evaluator, incumbent, _REFINE_SHARE * whole.seconds_until(1.0))
    left = whole.seconds_until(1.0)
    for factor in _EASIER:
        _try_larger_budget(evaluator, incumbent, factor, left / len(_EASIER))


def _begin(evaluator: Evaluator, incumbent: Incumbent, near: Schedule | None) -> Evaluated | None:
    """Try the simplest decisions, and those of `near`, which are returned."""
    problem = evaluator.problem
    found = None
    incumbent.note(evaluator(Decisions(evaluator.fixed)))
    if near is not None:
        away = frozenset(near.offloaded) & problem.offloadable
        saved = (frozenset(near.saved) | evaluator.fixed) - away
        found = incumbent.note(evaluator(Decisions(saved, offloaded=away)))
    if problem.offloadable:
        kept = (problem.needed | evaluator.fixed) - problem.offloadable
        incumbent.note(evaluator(Decisions(kept, offloaded=problem.offloadable)))
    return found


def _start(evaluator: Evaluator, incumbent: Incumbent, deadline: Deadline) -> bool:
    """Look for some schedule that fits; whether it is not proved that there is none."""
    problem = evaluator.problem
    if not problem.offloadable:  # the walk knows no link: from what it finds none is used
        evictor = Evictor(problem, deadline)
        for saved in (problem.known, evaluator.fixed):
            for trial in try_evictions(evaluator, evictor, saved):
                incumbent.note(trial)
    if incumbent.best is not None or not _is_searchable(problem):
        return True
    if is_too_small(problem, evaluator.budget, deadline):
        return False
    _step_back(evaluator, incumbent, Limits(_FIRST_WIDTH, _MOST_STATES, deadline))
    return True


def _search_without_link(
    problem: Problem, budget: int, options: SolverOptions, seconds: float, incumbent: Incumbent
) -> None:
    """Search with nothing offloaded: that gives answers too, and starts for better ones."""
    alone = replace(problem, host_bytes_per_second=None)
    timer = incumbent.clock.timer
    found = _search(alone, budget, options, timer, _ALONE_SHARE * seconds)
    evaluator = Evaluator(problem, budget, timer.charge)
    for trial in (found.lowest, found.best):
        if trial is not None:
            incumbent.note(evaluator(trial.decisions))
    if incumbent.best is not None and not incumbent.is_good:
        local = LocalSearch(evaluator, timer.within((1 - _ALONE_SHARE) * seconds))
        incumbent.note(local.improve(incumbent.best))


def _cut(evaluator: Evaluator, incumbent: Incumbent) -> None:
    for number, saved in enumerate(cut_saved_sets(evaluator.problem)):
        incumbent.clock.timer.charge(SECONDS_OF_CUT * len(evaluator.problem.operators))
        incumbent.note(evaluator(Decisions(saved)))
        if incumbent.clock.elapsed_fraction > 1 and number > _LEAST_CUTS:
            break


def _polish(evaluator: Evaluator, incumbent: Incumbent) -> None:
    """Bring trials under the budget that promise to be better, and take time away from the best."""
    above = sorted((t for t in incumbent.trials if not t.fits), key=lambda t: t.costs.peak)
    for trial in above[:_MOST_STARTS]:
        if incumbent.is_good or incumbent.clock.elapsed_fraction > 1:
            break
        if incumbent.best is None or trial.costs.added_seconds < incumbent.best.costs.added_seconds:
            half = incumbent.clock.timer.within(incumbent.clock.seconds_until(1.0) / 2)
            incumbent.note(LocalSearch(evaluator, half).repair(trial))
    if incumbent.best is not None and not incumbent.is_good:
        local = LocalSearch(evaluator, incumbent.clock.deadline(1.0))
        incumbent.note(local.improve(incumbent.best))


def _repair_feasible(evaluator: Evaluator, incumbent: Incumbent, deadline: Deadline) -> None:
    assert incumbent.lowest is not None
    incumbent.note(LocalSearch(evaluator, deadline).repair(incumbent.lowest))


def _find_lowest(incumbent: Incumbent, evictor: Evictor) -> None:
    assert incumbent.lowest is not None
    problem = evictor.problem
    floor = floor_of(problem)
    lowest = find_lowest_by_eviction(evictor, floor, incumbent.lowest.costs.peak)
    if lowest is not None:
        incumbent.note_lowest(lowest)
    if incumbent.lowest.costs.peak > floor and _is_searchable(problem):
        lowest = find_lowest_by_steps(problem, incumbent.trials[0].costs.peak, evictor.deadline)
        if lowest is not None:
            incumbent.note_lowest(lowest)


def _is_searchable(problem: Problem) -> bool:
    return not problem.offloadable and BackwardSearch(problem).size <= _MOST_SEARCHED


def _step_back(
    evaluator: Evaluator, incumbent: Incumbent, limits: Limits, near: Evaluated | None = None
) -> BackwardFrontier:
    search = BackwardSearch(evaluator.problem)
    found = search.run(evaluator.budget, limits, None if near is None else near.replay.schedule)
    for decisions in itertools.islice(search.decisions(found), _MOST_STARTS):
        if incumbent.note(evaluator(decisions)).fits:
            break
    return found


def _step_back_wider(evaluator: Evaluator, incumbent: Incumbent, deadline: Deadline) -> None:
    states, before = _MOST_STATES, incumbent.best
    for width, is_near in itertools.product(_WIDTHS, (False, True)):
        limits = Limits(width, states, deadline, prompt=True)
        found = _step_back(evaluator, incumbent, limits, incumbent.best if is_near else None)
        states -= found.states
        if incumbent.is_near(_FAR) or not (found.is_through and found.is_cut):
            break
    if incumbent.best is not None and incumbent.best is not before:
        incumbent.note(LocalSearch(evaluator, deadline).improve(incumbent.best))


def _refine(evaluator: Evaluator, incumbent: Incumbent, seconds: float) -> None:
    clock = TimeSlice(incumbent.clock.timer, seconds)
    near = Incumbent(clock, incumbent.gap, enough=incumbent.enough)
    near.best, near.lowest, near.bound = incumbent.best, incumbent.lowest, incumbent.bound
    rounds = RowGeneration(evaluator, near)
    if rounds.is_fine:
        rounds.refine()
        if near.best is not None:
            incumbent.note(near.best)


def _try_larger_budget(
    evaluator: Evaluator, incumbent: Incumbent, factor: float, seconds: float
) -> None:
    easier = evaluator.under(int(factor * evaluator.budget))
    timer = incumbent.clock.timer
    found = Incumbent(TimeSlice(timer, _EASIER_SHARE * seconds), incumbent.gap)
    local = LocalSearch(evaluator, timer.within(seconds))
    found.note(easier(Decisions(evaluator.problem.needed)))
    found.note(easier(Decisions(easier.fixed)))
    RowGeneration(easier, found).run()
    if found.best is not None:
        fitting = incumbent.note(local.repair(evaluator(found.best.decisions)))
        if fitting.fits:
            incumbent.note(local.improve(fitting))
