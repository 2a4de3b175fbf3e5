"""The longest chain of a step: values that are each computed from the one before.

    forward     a -> x -> y -> z        backward    dz (reads y), dy (reads x), dx (reads a)

Whoever wants y once more needs x alive, and x needs a, whatever else the step does. So a game of
pebbles on the chain bounds the time that any schedule of the whole step adds:

    pebble      a value of the chain that is alive; it takes at least `unit` bytes
    move        a value is computed from its alive predecessor; its first move is free
    demand      a step of the backward pass reads a value of the chain, the last value first
    room        pebbles at most: of what the budget leaves beside all that is alive anyway
"""

import bisect
import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from torchremat.planning.problem.fixed_bytes import BackwardBytes
from torchremat.planning.problem.problem import Problem

# Sizes of values for which a chain is looked for: those of the most time. Chosen by hand.
_MOST_UNITS = 2
# Of the time of the forward pass, the least of a chain that says much about it. Chosen by hand.
_LEAST_SHARE = 0.9
# Of the moves of a chain, the most that read another large value. A residual network has more, and
# linear programs say more about it. Chosen by hand.
_MOST_JOINED = 0.1


@dataclass(frozen=True)
class Demand:
    """Steps of the backward pass, one after the other, that read one value of a chain.

    Attributes:
        value: what they read.
        moves: the moves that lead to it from the start of the chain.
        seconds: the time of these moves.
        first: the first of the steps, a position in the backward pass.
        last: the last of them.
        bytes_at: bytes that are alive anyway at one of the steps, without values of the chain: at
            that where they are most.
        bytes_before: the least that are alive anyway between that step and the one of the demand
            before.
    """

    value: int
    moves: int
    seconds: float
    first: int
    last: int
    bytes_at: int
    bytes_before: int


@dataclass(frozen=True)
class Chain:
    """A chain, and the demands of a backward pass in their order.

    Attributes:
        unit: bytes of its smallest value.
        moves: how many lead from its start to its end.
        demands: each of a value further down the chain than the one before.
        constant: bytes that are alive in the forward pass anyway.
    """

    unit: int
    moves: int
    demands: tuple[Demand, ...]
    constant: int


def find_chains(problem: Problem) -> Iterator[Chain]:
    """The chains of most seconds, for the sizes of values that take most of the time.

    Steps that do little beside have one; others have none.
    """
    seconds: dict[int, float] = defaultdict(float)
    for v in problem.known - problem.outputs:
        seconds[problem.nbytes[v]] += problem.operators[problem.producers[v]].seconds
    seconds.pop(0, None)
    for unit in heapq.nlargest(_MOST_UNITS, sorted(seconds), key=seconds.__getitem__):
        path = _find_path(problem, unit)
        if not _is_most(problem, unit, path):
            continue
        demands = _find_demands(problem, unit, path)
        if demands:
            yield Chain(unit, len(path), demands, problem.constant)


def _find_path(problem: Problem, unit: int) -> dict[int, tuple[int, float]]:
    """The values of a chain, with how many moves and seconds lead to each."""
    reached: dict[int, float] = {}
    before: dict[int, int] = {}
    for o in problem.forward:
        op = problem.operators[o]
        read = max((v for v in op.reads if v in reached), key=reached.__getitem__, default=None)
        start = 0.0 if read is None else reached[read]
        for v in op.writes:
            if problem.nbytes[v] >= unit and v not in problem.outputs:
                reached[v] = start + op.seconds
                if read is not None:
                    before[v] = read
    if not reached:
        return {}
    path = [max(reached, key=reached.__getitem__)]
    while path[-1] in before:
        path.append(before[path[-1]])
    return {v: (moves, reached[v]) for moves, v in enumerate(reversed(path), 1)}


def _is_most(problem: Problem, unit: int, path: Mapping[int, tuple[int, float]]) -> bool:
    """Whether `path` takes most of the forward pass, and seldom reads what is not on it."""
    operators = [problem.operators[problem.producers[v]] for v in path]
    share = sum(op.seconds for op in operators) / (problem.seconds_of(problem.forward) or 1.0)
    large = {v for v in problem.known - problem.outputs if problem.nbytes[v] >= unit}
    joined = sum(len(large.intersection(op.reads)) > 1 for op in operators)
    return share >= _LEAST_SHARE and joined <= _MOST_JOINED * len(operators)


def _find_demands(
    problem: Problem, unit: int, path: Mapping[int, tuple[int, float]]
) -> tuple[Demand, ...]:
    """The most steps that read values of a chain from its end to its start."""
    stands_for = _find_side_values(problem, unit, path)
    reads = [
        (step, u)
        for step, b in enumerate(problem.backward)
        for u in sorted(
            {stands_for[v] for v in problem.operators[b].reads if v in stands_for},
            key=lambda u: -path[u][0],
        )
    ]
    falling = _choose_falling(reads, path)
    groups = [
        [step for step, _ in group] for _, group in groupby(falling, key=lambda read: read[1])
    ]
    values = [u for u, _ in groupby(u for _, u in falling)]
    fixed = BackwardBytes.of(problem)
    demands: list[Demand] = []
    start = 0
    for u, steps in zip(values, groups, strict=True):
        at, step = max(
            (fixed.at[step] - _count_read(problem, step, stands_for), step) for step in steps
        )
        before = min(fixed.before[min(start, step) : step + 1])
        demands.append(Demand(u, *path[u], steps[0], steps[-1], at, before))
        start = step + 1
    return tuple(demands)


def _count_read(problem: Problem, step: int, stands_for: Mapping[int, int]) -> int:
    reads = problem.operators[problem.backward[step]].reads
    return sum(problem.nbytes[v] for v in reads if v in stands_for)


def _find_side_values(
    problem: Problem, unit: int, path: Mapping[int, tuple[int, float]]
) -> dict[int, int]:
    """The values of the chain, and others computed from them, with the value that each stands for.

    To have the cosine of x in the place of x leaves no more room: it is as large at least.
    """
    found = {v: v for v in path}
    for v in problem.known - problem.outputs:
        read = [u for u in problem.operators[problem.producers[v]].reads if u in path]
        if v not in path and read and problem.nbytes[v] >= unit:
            found[v] = max(read, key=lambda u: path[u][0])
    return found


def _choose_falling(
    reads: list[tuple[int, int]], path: Mapping[int, tuple[int, float]]
) -> list[tuple[int, int]]:
    """The longest part of `reads` in which no value is further up the chain than one before."""
    ends: list[int] = []  # of the part of each length that ends furthest up, minus its moves
    tails: list[int] = []
    before: list[int | None] = []
    for i, (_, u) in enumerate(reads):
        place = bisect.bisect_right(ends, -path[u][0])
        before.append(tails[place - 1] if place else None)
        ends[place : place + 1] = [-path[u][0]]
        tails[place : place + 1] = [i]
    chosen: list[tuple[int, int]] = []
    last = tails[-1] if tails else None
    while last is not None:
        chosen.append(reads[last])
        last = before[last]
    return chosen[::-1]
