"""The bytes of a step that no decision about what is saved changes.

forward     what the pass needs although nothing is saved
backward    cotangents and gradients, what an operator reads and writes, and outputs
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torchremat.planning.problem.problem import Problem, Schedule
from torchremat.planning.problem.schedule_costs import costs_unchecked


@dataclass(frozen=True)
class ForwardBytes:
    """The forward pass when nothing is saved.

    Attributes:
        live: the bytes alive while each operator runs.
        made: the position of the operator that makes each value.
        last: the last position at which each value is alive anyway.
    """

    live: tuple[int, ...]
    at_end: int
    made: dict[int, int]
    last: dict[int, int]

    @classmethod
    def of(cls, problem: Problem) -> "ForwardBytes":
        operators, nbytes = problem.operators, problem.nbytes
        made: dict[int, int] = {}
        last: dict[int, int] = {}
        for i, o in enumerate(problem.forward):
            made.update((v, i) for v in operators[o].writes)
            last.update((v, i) for v in (*operators[o].reads, *operators[o].writes))
        last.update((v, len(problem.forward)) for v in problem.written)
        live = costs_unchecked(problem, Schedule((), problem.forward, ())).live
        lasting = problem.written | (problem.outputs & problem.known)
        return cls(live, problem.constant + sum(nbytes[v] for v in lasting), made, last)


@dataclass(frozen=True)
class BackwardBytes:
    """The steps of the backward pass, without the values that could be recomputed.

    Attributes:
        at: while the operator of each step runs, with the values that it reads.
        before: just before it.
    """

    at: tuple[int, ...]
    before: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem) -> "BackwardBytes":
        nbytes = problem.nbytes
        lasting = problem.gradients | problem.outputs
        passing = list(_sum_passing(problem, lasting))
        made = problem.constant + problem.backward_constant
        made += sum(nbytes[v] for v in problem.outputs)
        at, before = [], []
        for (during, ahead), o in zip(reversed(passing), problem.backward, strict=True):
            before.append(made + ahead)
            made += sum(nbytes[v] for v in problem.operators[o].writes if v in lasting)
            at.append(made + during)
        return cls(tuple(at), tuple(before))


def _sum_passing(problem: Problem, lasting: frozenset[int]) -> Iterator[tuple[int, int]]:
    """From the last step to the first, the bytes of other values: while it runs and before it."""
    nbytes, known = problem.nbytes, problem.known
    wanted: set[int] = set()
    total = 0
    for o in reversed(problem.backward):
        op = problem.operators[o]
        read = 0
        for v in op.reads:
            if v in known:
                read += 0 if v in lasting else nbytes[v]
            elif v not in lasting and v not in wanted:
                wanted.add(v)
                total += nbytes[v]
        during = total + read + op.nbytes_inside
        for v in op.writes:
            if v in wanted:
                wanted.discard(v)
                total -= nbytes[v]
            elif v not in lasting:
                during += nbytes[v]
        yield during, total
