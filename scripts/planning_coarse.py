"""Problems made small enough for Checkmate's program: neighbours become one operator."""

import itertools
from dataclasses import replace

from torchremat.planning.problem.problem import Operator, Part, Problem


def coarsened(problem: Problem, most: int) -> Problem:
    """`problem` with neighbours made one operator, until there are at most `most`.

    Two neighbours in the order of a part become one where that hides the most bytes: values of the
    first that only the second reads are then inside. The result is a problem for oracle and solver
    alike.
    """
    while len(problem.operators) > most:
        order = [*problem.forward, *sorted(_late(problem))]
        pairs = [(a, b) for a, b in itertools.pairwise(order) if _may_merge(problem, a, b)]
        if not pairs:
            return problem
        problem = merged(problem, *min(pairs, key=lambda pair: _loss(problem, *pair)))
    return problem


def _late(problem: Problem) -> list[int]:
    return [o for o, op in enumerate(problem.operators) if op.part is not Part.FORWARD]


def _may_merge(problem: Problem, a: int, b: int) -> bool:
    one, two = problem.operators[a], problem.operators[b]
    last = b == len(problem.operators) - 1
    return one.part is two.part and one.repeatable == two.repeatable and not last


def _loss(problem: Problem, a: int, b: int) -> tuple[int, float]:
    """The cost of a merge: the bytes in use at once, then the seconds."""
    one, two = problem.operators[a], problem.operators[b]
    touched = {*one.reads, *one.writes, *two.reads, *two.writes}
    return sum(problem.nbytes[v] for v in touched), one.seconds + two.seconds


def merged(problem: Problem, a: int, b: int) -> Problem:
    """`problem` with the operators `a` and then `b`, neighbours, as one."""
    one, two = problem.operators[a], problem.operators[b]
    others = {v for o, op in enumerate(problem.operators) if o not in (a, b) for v in op.reads}
    kept = others | problem.outputs | problem.gradients | problem.written
    reads = tuple(sorted({*one.reads, *(v for v in two.reads if v not in one.writes)}))
    writes = tuple(v for v in (*one.writes, *two.writes) if v in kept)
    hidden = [v for v in (*one.writes, *two.writes) if v not in kept]
    nbytes = problem.nbytes
    first = sum(nbytes[v] for v in {*reads, *one.writes}) + one.nbytes_inside
    passed = [v for v in one.writes if v in kept or v in two.reads]
    second = sum(nbytes[v] for v in {*reads, *passed, *two.writes}) + two.nbytes_inside
    inside = max(first, second) - sum(nbytes[v] for v in {*reads, *writes})
    both = Operator(
        reads,
        writes,
        one.seconds + two.seconds,
        one.part,
        one.repeatable,
        nbytes_inside=max(inside, 0),
    )
    operators = list(problem.operators)
    operators[b] = both
    del operators[a]
    renumbered = {v: i for i, v in enumerate(sorted(set(range(len(nbytes))) - set(hidden)))}
    number = renumbered.__getitem__
    return replace(
        problem,
        operators=tuple(
            replace(op, reads=tuple(map(number, op.reads)), writes=tuple(map(number, op.writes)))
            for op in operators
        ),
        nbytes=tuple(nbytes[v] for v in renumbered),
        outputs=frozenset(map(number, problem.outputs)),
        gradients=frozenset(map(number, problem.gradients)),
        written=frozenset(map(number, problem.written)),
    )
