"""When the backward pass wants a value again, and the operators that recompute it."""

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

from torchremat.planning.problem.fixed_bytes import BackwardBytes
from torchremat.planning.problem.problem import Part, Problem


class Recomputation:
    """The values of `problem` that may be recomputed.

    Attributes:
        reads: for each operator, those of them that it reads.
        writes: likewise, those that it writes.
        bytes_of_steps: the bytes that are alive whatever is decided.
        visits: how many operators and values its methods have looked at: the work of a caller.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        values = problem.known - problem.outputs
        operators = problem.operators
        self.reads = [tuple(v for v in op.reads if v in values) for op in operators]
        self.writes = [tuple(v for v in op.writes if v in values) for op in operators]
        self.bytes_of_steps = BackwardBytes.of(problem)
        self.visits = 0

    @cached_property
    def last(self) -> Mapping[int, int]:
        """The last step that reads each value, or may read a value that is recomputed from it."""
        found: dict[int, int] = {}
        for step, b in enumerate(self.problem.backward):
            found.update((v, step) for v in self.reads[b])
        for o in range(len(self.problem.operators) - 1, -1, -1):
            if self.problem.operators[o].part is not Part.BACKWARD:
                again = (v for v in self.writes[o] if v not in self.problem.early_gradients)
                latest = max((found.get(v, -1) for v in again), default=-1)
                found.update((u, max(found.get(u, -1), latest)) for u in self.reads[o])
        return found

    @cached_property
    def lasting(self) -> frozenset[int]:
        """The values that are never freed early: most cannot be recomputed, or not alike."""
        operators = self.problem.operators
        once = (op for op in operators if op.draws or not op.repeatable)
        return frozenset(v for op in once for v in op.writes) | self.problem.early_gradients

    def missing(self, values: Iterable[int], there: Collection[int]) -> list[int]:
        producers = self.problem.producers
        found: set[int] = set()
        stack = [v for v in values if v not in there]
        while stack:
            o = producers[stack.pop()]
            if o not in found:
                found.add(o)
                stack.extend(u for u in self.reads[o] if u not in there)
        self.visits += len(found) + 1
        return sorted(found)

    def next_uses(self, step: int, there: Collection[int]) -> dict[int, int]:
        """The step from `step` on for which each value that is `there` is wanted next."""
        producers = self.problem.producers
        found: dict[int, int] = {}
        seen: set[int] = set()
        for later in range(step, len(self.problem.backward)):
            stack = list(self.reads[self.problem.backward[later]])
            while stack:
                v = stack.pop()
                if v in there:
                    found.setdefault(v, later)
                elif producers[v] not in seen:
                    seen.add(producers[v])
                    stack.extend(self.reads[producers[v]])
        self.visits += len(self.problem.backward) - step + len(seen) + len(found)
        return found

    def seconds_again(self, v: int, there: Collection[int]) -> float:
        producers = self.problem.producers
        found: set[int] = set()
        stack = [producers[v]]
        while stack:
            o = stack.pop()
            if o not in found:
                found.add(o)
                stack.extend(producers[u] for u in self.reads[o] if u not in there or u == v)
        self.visits += len(found)
        return self.problem.seconds_of(found)
