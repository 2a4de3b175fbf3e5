"""Save what a schedule has room for: values that it recomputes, those of most seconds a byte first.

Of 2 bytes is v, which the sixth operator recomputes; the budget is 8:

    bytes alive     4 4 6 6 8 8 6 4     v is freed after the first operator
    with v saved    6 6 8 8 8 8 6 4     v stays alive
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from torchremat.planning.problem.problem import Operator, Part, Problem
from torchremat.planning.problem.trial import Evaluated, Evaluator
from torchremat.planning.search.clock import NEVER, Deadline
from torchremat.planning.search.incumbent import Incumbent

# Rounds at most: what is saved in one makes room for the next. Chosen by hand.
_MOST_ROUNDS = 8
# Nominal seconds for one place of a schedule: measured, of a core of about 3 GHz.
_SECONDS_OF_PLACE = 1.3e-6


def fill_room(
    evaluator: Evaluator, incumbent: Incumbent, trial: Evaluated, deadline: Deadline = NEVER
) -> None:
    """Note trials with more and more of what `trial` recomputes saved, until `deadline`.

    `trial` fits, and so do they.
    """
    for _ in range(_MOST_ROUNDS):
        chosen = _choose(evaluator, trial)
        deadline.charge(_SECONDS_OF_PLACE * len(trial.costs.live))
        if not chosen or deadline.is_over:
            break
        decisions = trial.decisions
        drops = {step: values - chosen for step, values in decisions.drops.items()}
        saved = decisions.saved | chosen
        found = incumbent.note(evaluator(replace(decisions, saved=saved, drops=drops)))
        if not found.fits or found.costs.added_seconds >= trial.costs.added_seconds:
            break
        trial = found


@dataclass(frozen=True)
class _Gaps:
    """Where a value is not there though it was and will be read again: it would be, if saved."""

    value: int
    runs_again: int
    places: tuple[tuple[int, int], ...]


def _choose(evaluator: Evaluator, trial: Evaluated) -> frozenset[int]:
    problem = evaluator.problem
    room: NDArray[np.int64] = evaluator.budget - np.array(trial.costs.live, dtype=np.int64)

    def rank(gaps: _Gaps) -> tuple[float, int]:
        seconds = problem.operators[problem.producers[gaps.value]].seconds * gaps.runs_again
        return (-seconds / max(problem.nbytes[gaps.value], 1), gaps.value)

    chosen: set[int] = set()
    for gaps in sorted(_find_gaps(problem, trial), key=rank):
        nbytes = problem.nbytes[gaps.value]
        if all(room[start:end].min() >= nbytes for start, end in gaps.places):
            chosen.add(gaps.value)
            for start, end in gaps.places:
                room[start:end] -= nbytes
    return frozenset(chosen)


def _find_gaps(problem: Problem, trial: Evaluated) -> list[_Gaps]:
    schedule = trial.replay.schedule
    order = (*schedule.forward, *schedule.backward)
    events = _find_events(order, problem.operators)
    found = []
    for v, (writes, reads) in events.items():
        op = problem.operators[problem.producers[v]]
        if len(writes) < 2 or op.part is not Part.FORWARD or v in problem.outputs:
            continue
        places = []
        reader = 0
        for start, end in itertools.pairwise(writes):
            last = start
            while reader < len(reads) and reads[reader] < end:
                last = reads[reader]
                reader += 1
            if last + 1 < end:
                places.append((last + 1, end))
        found.append(_Gaps(v, len(writes) - 1, tuple(places)))
    return found


def _find_events(
    order: Sequence[int], operators: Sequence[Operator]
) -> Mapping[int, tuple[list[int], list[int]]]:
    """The places where each value is written and where it is read, in order."""
    found: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for place, o in enumerate(order):
        for v in operators[o].reads:
            found[v][1].append(place)
        for v in operators[o].writes:
            found[v][0].append(place)
    return found
