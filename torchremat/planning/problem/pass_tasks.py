"""The operators of one pass as tasks, of which any order that keeps dependencies may be chosen.

Independent operators may change places. A task comes after those that write what it reads. Tasks
that draw random numbers or communicate keep their order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torchremat.planning.problem.problem import Part, Problem


@dataclass(frozen=True)
class PassTasks:
    """Tasks by position in the given order; values by number.

    Attributes:
        reads: the values that each task reads, which are alive until their last reader ran.
        writes: the values that it writes.
        inside: bytes that it needs only while it runs.
        nbytes: of each value.
        lasting: values that are alive to the end of the pass.
        in_order: tasks that keep their order among each other.
    """

    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    inside: tuple[int, ...]
    nbytes: Sequence[int]
    lasting: frozenset[int]
    in_order: tuple[int, ...]

    @classmethod
    def of_forward(cls, problem: Problem, saved: Iterable[int]) -> "PassTasks":
        """The forward pass, at whose end `saved` are alive."""
        lasting = problem.outputs | problem.written | frozenset(saved)
        order = problem.forward
        inside = tuple(problem.operators[o].nbytes_inside for o in order)
        reads = tuple(problem.operators[o].reads for o in order)
        return cls._of(problem, order, reads, inside, lasting)

    @classmethod
    def of_backward(cls, problem: Problem, saved: frozenset[int]) -> "PassTasks":
        """The backward pass, which finds `saved` and recomputes all else for one operator."""
        reads, inside = [], []
        for o in problem.backward:
            op = problem.operators[o]
            again = [v for v in op.reads if v in problem.known and v not in saved]
            found = {v for v in op.reads if v not in problem.known}
            found |= _find_saved(problem, op.reads, saved)
            reads.append(tuple(sorted(found - problem.outputs)))
            once = sum(problem.nbytes[v] for v in again if v not in problem.outputs)
            inside.append(op.nbytes_inside + once)
        return cls._of(problem, problem.backward, tuple(reads), tuple(inside), problem.gradients)

    @classmethod
    def _of(
        cls,
        problem: Problem,
        order: tuple[int, ...],
        reads: tuple[tuple[int, ...], ...],
        inside: tuple[int, ...],
        lasting: frozenset[int],
    ) -> "PassTasks":
        operators = problem.operators
        in_order = tuple(i for i, o in enumerate(order) if operators[o].in_order)
        writes = tuple(operators[o].writes for o in order)
        return cls(reads, writes, inside, problem.nbytes, lasting, in_order)

    def __len__(self) -> int:
        return len(self.reads)

    @cached_property
    def makers(self) -> dict[int, int]:
        return {v: t for t, writes in enumerate(self.writes) for v in writes}

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for t, reads in enumerate(self.reads):
            for v in reads:
                found.setdefault(v, []).append(t)
        return {v: tuple(tasks) for v, tasks in found.items()}

    @cached_property
    def before(self) -> tuple[frozenset[int], ...]:
        """The tasks that each task needs to have run."""
        found = [{self.makers[v] for v in reads if v in self.makers} for reads in self.reads]
        for first, second in zip(self.in_order, self.in_order[1:], strict=False):
            found[second].add(first)
        return tuple(map(frozenset, found))

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.reads]
        for t, before in enumerate(self.before):
            for p in before:
                found[p].append(t)
        return tuple(map(tuple, found))

    @cached_property
    def at_start(self) -> int:
        """The bytes alive before the first task: what tasks read and none makes."""
        return sum(self.nbytes[v] for v in self.readers if v not in self.makers)

    def live_of(self, order: Sequence[int]) -> list[int]:
        """The bytes alive while each task of `order` runs."""
        nbytes, left = self.nbytes, {v: len(tasks) for v, tasks in self.readers.items()}
        total, live = self.at_start, []
        for t in order:
            total += sum(nbytes[v] for v in self.writes[t])
            live.append(total + self.inside[t])
            total -= sum(nbytes[v] for v in self.writes[t] if self._ends_at_once(v))
            for v in self.reads[t]:
                left[v] -= 1
                if not left[v] and v not in self.lasting:
                    total -= nbytes[v]
        return live

    def peak_of(self, order: Sequence[int]) -> int:
        return max(self.live_of(order), default=0)

    def _ends_at_once(self, v: int) -> bool:
        return v not in self.lasting and v not in self.readers


def _find_saved(problem: Problem, reads: Iterable[int], saved: frozenset[int]) -> set[int]:
    """The values of `saved` from which `reads` are there, or are computed."""
    found: set[int] = set()
    seen: set[int] = set()
    stack = [v for v in reads if v in problem.known] if saved else []
    while stack:
        v = stack.pop()
        if v in saved:
            found.add(v)
        elif v not in seen:
            seen.add(v)
            op = problem.operators[problem.producers[v]]
            if op.part is Part.EITHER_PASS:  # others are not recomputed where all is saved
                stack.extend(op.reads)
    return found
