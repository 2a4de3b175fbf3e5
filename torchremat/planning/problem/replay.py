"""From decisions to a schedule: what is not saved is recomputed just before it is read.

saved   x                      backward    dz, dy (reads y), dx (reads x)
forward x -> y -> z            y is recomputed before dy, and freed after it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchremat.planning.problem.forward_order import ForwardOrder
from torchremat.planning.problem.problem import Problem, Schedule


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
    forward = ForwardOrder(problem).order(decisions.saved, decisions.offloaded)
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
    operators, known_reads = problem.operators, problem.known_reads
    drops, early = decisions.drops, decisions.early
    there = set(decisions.saved_or_offloaded) | (problem.outputs & problem.known)
    away = set(decisions.offloaded)  # not yet fetched
    order: list[int] = []
    steps: list[int] = []
    for step, b in enumerate(problem.backward):
        reads = known_reads[b]
        wanted = [] if there.issuperset(reads) else [v for v in reads if v not in there]
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
    operators, producers, known_reads = problem.operators, problem.producers, problem.known_reads
    found: set[int] = set()
    while wanted:
        o = producers[wanted.pop()]
        if o not in found:
            found.add(o)
            wanted.extend([u for u in known_reads[o] if u not in there])
    order = sorted(found)
    for o in order:
        there.update(operators[o].writes)
    return order


def values_used(problem: Problem, decisions: Decisions, backward: Sequence[int]) -> frozenset[int]:
    """The saved or offloaded values that the backward pass reads before it recomputes them."""
    producers, readers, never = problem.producers, problem.readers, len(backward)
    first = dict(zip(reversed(backward), range(never - 1, -1, -1), strict=True))
    return frozenset(
        v
        for v in decisions.saved_or_offloaded
        if min((first.get(o, never) for o in readers[v]), default=never)
        < first.get(producers[v], never)
    )
