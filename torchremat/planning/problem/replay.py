"""From decisions to a schedule: what is not saved is recomputed just before it is read.

saved   x                      backward    dz, dy (reads y), dx (reads x)
forward x -> y -> z            y is recomputed before dy, and freed after it
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from torchremat.planning.problem.problem import Part, Problem, Schedule, count_live


@dataclass(frozen=True)
class Decisions:
    """Decisions of a search. Steps are positions among the operators of the backward pass.

    Attributes:
        saved: the values that the forward pass saves for the backward pass.
        drops: values that are freed in the middle of the backward pass, by the step after which
            they are freed. They are recomputed if they are read once more; other values stay alive
            to their last use.
        early: operators that are recomputed before a step that does not need them, while what they
            read is alive.
        offloaded: the values that the forward pass copies to the host; they are not freed before
            they are read.
    """

    saved: frozenset[int]
    drops: Mapping[int, frozenset[int]] = field(default_factory=dict)
    early: Mapping[int, frozenset[int]] = field(default_factory=dict)
    offloaded: frozenset[int] = frozenset()

    @property
    def saved_or_offloaded(self) -> frozenset[int]:
        return self.saved | self.offloaded if self.offloaded else self.saved


@dataclass(frozen=True)
class Replay:
    """A schedule; `steps` has the step that each backward operator runs for, or is."""

    schedule: Schedule
    steps: tuple[int, ...]


def replay_of(problem: Problem, decisions: Decisions) -> Replay:
    """Recompute everything as late as it can be, for one step in the order of the forward pass."""
    order, steps = backward_order(problem, decisions)
    forward = forward_order(problem, decisions.saved, decisions.offloaded)
    return Replay(schedule_of(decisions, forward, order), steps)


def schedule_of(
    decisions: Decisions, forward: tuple[int, ...], backward: tuple[int, ...]
) -> Schedule:
    saved, offloaded = tuple(sorted(decisions.saved)), tuple(sorted(decisions.offloaded))
    return Schedule(saved, forward, backward, offloaded)


def backward_order(
    problem: Problem, decisions: Decisions
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The operators of the backward pass, and the step that each runs for, or is."""
    operators = problem.operators
    known = problem.known
    drops, early = decisions.drops, decisions.early
    there = set(decisions.saved_or_offloaded) | (problem.outputs & known)
    away = set(decisions.offloaded)  # not yet fetched
    order: list[int] = []
    steps: list[int] = []
    for step, b in enumerate(problem.backward):
        wanted = [v for v in operators[b].reads if v in known and v not in there]
        if step in early:
            wanted += [v for o in early[step] for v in operators[o].writes if v not in there]
        start = len(order)
        if wanted:
            again = find_missing(problem, wanted, there)
            order += again
            steps += [step] * len(again)
        order.append(b)
        steps.append(step)
        for o in order[start:] if away else ():
            away.difference_update(operators[o].reads)
        if step in drops:
            there -= drops[step] - away if away else drops[step]
    return tuple(order), tuple(steps)


def find_missing(problem: Problem, wanted: list[int], there: set[int]) -> list[int]:
    """The operators that compute `wanted` from what is `there`, to which it is added."""
    operators, producers, known = problem.operators, problem.producers, problem.known
    found: set[int] = set()
    while wanted:
        o = producers[wanted.pop()]
        if o not in found:
            found.add(o)
            wanted.extend(u for u in operators[o].reads if u in known and u not in there)
    order = sorted(found)
    for o in order:
        there.update(operators[o].writes)
    return order


def values_used(problem: Problem, decisions: Decisions, backward: Iterable[int]) -> frozenset[int]:
    """The saved or offloaded values that the backward pass reads before it recomputes them."""
    operators = problem.operators
    made: set[int] = set()
    used: set[int] = set()
    for o in backward:
        used.update(v for v in operators[o].reads if v not in made)
        made.update(operators[o].writes)
    return frozenset(used.intersection(decisions.saved_or_offloaded))


# Operators to place times places, up to which each place is tried. One more operator takes a pass
# over the whole order, so beyond that they run as early as they can.
_MOST_PLACES = 20_000


def forward_order(
    problem: Problem, saved: Iterable[int], offloaded: Iterable[int] = ()
) -> tuple[int, ...]:
    """The forward pass, with operators of either pass where the bytes alive are least."""
    operators = problem.operators
    chosen = frozenset(saved)
    extra: set[int] = set()
    stack = [problem.producers[v] for v in chosen.union(offloaded)]
    while stack:
        o = stack.pop()
        if o not in extra and operators[o].part is Part.EITHER_PASS:
            extra.add(o)
            stack.extend(problem.producers[v] for v in operators[o].reads)
    if not extra:
        return problem.forward
    if len(extra) * len(problem.forward) > _MOST_PLACES:
        return _insert_early(problem, extra)
    order = list(problem.forward)
    for o in sorted(extra):
        order.insert(_find_place(problem, order, o, chosen), o)
    return tuple(order)


def _insert_early(problem: Problem, extra: set[int]) -> tuple[int, ...]:
    after: dict[int, int] = {}
    for o in sorted(extra):
        reads = (problem.producers[v] for v in problem.operators[o].reads)
        after[o] = max((after.get(p, p) for p in reads), default=-1)
    runs = [*((o, -1) for o in problem.forward), *((after[o], o) for o in extra)]
    return tuple(first if last < 0 else last for first, last in sorted(runs))


def _find_place(problem: Problem, order: list[int], o: int, saved: frozenset[int]) -> int:
    """Where in the forward pass `o` runs with the least peak, the first of such places."""
    operators, nbytes = problem.operators, problem.nbytes
    op = operators[o]
    live = np.array(count_live(problem, Schedule(tuple(saved), tuple(order), ())), np.int64)
    num = len(order)
    last = {v: i for i, p in enumerate(order) for v in (*operators[p].reads, *operators[p].writes)}
    lasting = saved | problem.outputs | problem.written
    last.update((v, num) for v in lasting if v in last)
    made = {v: i for i, p in enumerate(order) for v in operators[p].writes}
    least = max((made[v] + 1 for v in op.reads), default=0)
    freed = np.zeros(num + 1, np.int64)  # after each position
    for v, i in last.items():
        freed[i] += nbytes[v]
    late, ended = np.zeros(num + 1, np.int64), np.zeros(num + 1, np.int64)
    for v in op.reads:  # alive for longer at each place, and only until there
        late[last[v] + 2 :] += nbytes[v]
        ended[last[v] + 1 :] += nbytes[v]
    inside = np.array([operators[p].nbytes_inside for p in order], np.int64)
    before = np.zeros(num + 1, np.int64)
    before[1:] = live + late[1:]
    before[:least] = 0
    between = np.full(num + 1, problem.constant, np.int64)
    between[1:] = live - inside - freed[:-1]
    during = between + ended + sum(nbytes[v] for v in op.writes) + op.nbytes_inside
    after = np.zeros(num + 1, np.int64)  # what `o` writes comes on top, if it is saved
    after[:-1] = np.maximum.accumulate(live[::-1])[::-1]
    kept = sum(nbytes[v] for v in op.writes if v in saved)
    peaks = np.maximum(np.maximum(np.maximum.accumulate(before), during), after + kept)
    return least + int(np.argmin(peaks[least:]))
