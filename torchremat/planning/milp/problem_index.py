"""The indices that all integer programs of a problem share, whatever their moments and budget."""

from functools import cached_property

from torchremat.planning.problem.fixed_bytes import BackwardBytes, ForwardBytes
from torchremat.planning.problem.problem import Part, Problem


class ProblemIndex:
    """A problem without its outputs, which are alive whatever is decided."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.values = sorted(problem.known - problem.outputs)
        chosen = set(self.values)
        self.operators = sorted({problem.producers[v] for v in self.values})
        self.rank = {o: i for i, o in enumerate(self.operators)}
        self.reads = {
            o: tuple(u for u in problem.operators[o].reads if u in chosen) for o in self.operators
        }
        self.writes = {
            o: tuple(v for v in problem.operators[o].writes if v in chosen) for o in self.operators
        }
        self.direct = [
            tuple(v for v in problem.operators[b].reads if v in chosen) for b in problem.backward
        ]
        self.forward_bytes = ForwardBytes.of(problem)
        self.backward_bytes = BackwardBytes.of(problem)
        self.may_run = {
            o
            for o in self.operators
            if problem.operators[o].repeatable or problem.operators[o].part is Part.EITHER_PASS
        }

    @cached_property
    def direct_steps(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for step, reads in enumerate(self.direct):
            for v in reads:
                found.setdefault(v, []).append(step)
        return found

    @cached_property
    def front(self) -> list[int]:
        """How far into the forward pass the backward pass is at each step, by ranks."""
        front, found = len(self.operators), []
        for reads in self.direct:
            if reads:
                front = min(front, max(self.rank[self.problem.producers[v]] for v in reads))
            found.append(front)
        return found
