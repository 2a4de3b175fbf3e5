"""From what is kept to a schedule: what is not there is computed again just before it is read.

    kept    x                      backward    dz, dy (reads y), dx (reads x)
    forward x -> y -> z            y is computed again before dy, and let go after it
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torchremat.planning.problem import Part, Problem, Schedule


@dataclass(frozen=True)
class Decisions:
    """What is kept.

    Attributes:
        saved: the values that the forward pass hands to the backward pass.
        drops: values that are let go in the middle of the backward pass, to be computed again if
            they are read once more; by the position, among the operators of the backward pass, of
            the one after which they are let go. What is not let go is kept to its last use.
    """

    saved: frozenset[int]
    drops: Mapping[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Replay:
    """A schedule, and why it computes again what it does.

    Attributes:
        schedule: the schedule.
        steps: for each operator of the backward order, the position among the operators of the
            backward pass of the one that it runs for, or is.
        wanted_by: for each of them the operator that reads it next: its consumer in the chain that
            leads to the one it runs for.
    """

    schedule: Schedule
    steps: tuple[int, ...]
    wanted_by: tuple[int, ...]


def replay_of(problem: Problem, decisions: Decisions) -> Replay:
    """The schedule in which everything is computed again as late as it can be."""
    operators = problem.operators
    producers = problem.producers
    known = problem.known
    there = set(decisions.saved) | (problem.outputs & known)
    order: list[int] = []
    steps: list[int] = []
    wanted_by: list[int] = []
    for step, b in enumerate(problem.backward):
        for v in operators[b].reads:
            if v in known and v not in there:
                _compute_again(operators, producers, known, there, (v, b), step, (order, steps, wanted_by))
        order.append(b)
        steps.append(step)
        wanted_by.append(b)
        if step in decisions.drops:
            there -= decisions.drops[step]
    schedule = Schedule(
        tuple(sorted(decisions.saved)), forward_order(problem, decisions.saved), tuple(order)
    )
    return Replay(schedule, tuple(steps), tuple(wanted_by))


def _compute_again(operators, producers, known, there, wanted, step, out) -> None:
    """Run what computes the value `wanted[0]`, after what it reads; without recursion."""
    order, steps, wanted_by = out
    stack = [wanted]
    while stack:
        v, reader = stack[-1]
        if v in there:
            stack.pop()
            continue
        o = producers[v]
        missing = [(u, o) for u in operators[o].reads if u in known and u not in there]
        if missing:
            stack.extend(reversed(missing))
            continue
        order.append(o)
        steps.append(step)
        wanted_by.append(reader)
        there.update(operators[o].writes)
        stack.pop()


def forward_order(problem: Problem, saved: Iterable[int]) -> tuple[int, ...]:
    """The operators of the forward pass; those that only `saved` values need come early.

    Each runs as soon as what it reads is there.
    """
    operators = problem.operators
    extra: set[int] = set()
    stack = [problem.producers[v] for v in saved]
    while stack:
        o = stack.pop()
        if o not in extra and operators[o].part is Part.KNOWN:
            extra.add(o)
            stack.extend(problem.producers[v] for v in operators[o].reads)
    if not extra:
        return problem.forward
    after: dict[int, int] = {}
    for o in sorted(extra):
        reads = (problem.producers[v] for v in operators[o].reads)
        after[o] = max((after.get(p, p) for p in reads), default=-1)
    runs = [*((o, -1) for o in problem.forward), *((after[o], o) for o in extra)]
    return tuple(o if extra_one < 0 else extra_one for o, extra_one in sorted(runs))
