"""Dynamic tensor rematerialization on the graphs of `bench_planning.py`.

The method of Kirisame et al. (ICLR 2021), written anew from the paper. Operators run in the given
order, and nothing is known of those to come. Where one does not fit, values are evicted, those of
least h first:

    h(v) = (seconds of v + seconds of its evicted neighbourhood) / (bytes of v * staleness of v)

The neighbourhood are the evicted values that v would be recomputed from, and those that would be
recomputed from v; staleness is the time since v was last read or written. A value that is read and
not there is recomputed first, from those it was computed from. Once no operator of the given order
reads a value any more, its memory is free at once, as the framework lets go of it.
"""

from collections.abc import Iterator

from torchremat.planning.problem.problem import Part, Problem, Schedule

MOST_TIMES_OF_STEP = 3.0
"""Runs that take longer than so many steps are given up, as the paper gives up what thrashes."""


def evict_dynamically(problem: Problem, budget: int) -> tuple[Schedule, int] | None:
    """The schedule that the method runs within `budget` bytes, and the most that it holds.

    It holds more than the schedule needs, since it does not know what is never read again. `None`
    where it runs out of memory.

    >>> from torchremat.planning.problem.problem import Operator
    >>> run = [Operator((v - 1,) if v else (), (v,), 1.0, Part.FORWARD) for v in range(4)]
    >>> steps = [Operator((v,), (), 1.0, Part.BACKWARD) for v in (3, 2, 1, 0)]
    >>> problem = Problem((*run, *steps), (4,) * 4)
    >>> schedule, most = evict_dynamically(problem, 12)
    >>> schedule.saved, schedule.backward, most
    ((1, 2, 3), (4, 5, 6, 0, 7), 12)
    """
    run = _Run(problem, budget)
    schedule = run.execute()
    return None if schedule is None else (schedule, run.most)


class _Run:
    """One step: `there` are the values in memory, `computed` those that were."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem = problem
        self.budget = budget
        self.used = self.most = problem.constant
        self.there: set[int] = set()
        self.computed: set[int] = set()
        self.pinned = problem.outputs | problem.gradients | problem.written
        self.touched = [0.0] * len(problem.nbytes)
        self.clock = 0.0
        self.most_seconds = MOST_TIMES_OF_STEP * problem.step_seconds
        self.order: list[int] = []
        self.readers: list[list[int]] = [[] for _ in problem.nbytes]
        for o, op in enumerate(problem.operators):
            for v in op.reads:
                self.readers[v].append(o)
        self.uses = [len(readers) for readers in self.readers]
        self.around: dict[int, float] = {}
        """The seconds of the evicted neighbourhood of each value, as far as they are known."""

    def execute(self) -> Schedule | None:
        problem = self.problem
        late = [o for o, op in enumerate(problem.operators) if op.part is not Part.FORWARD]
        end_of_forward = 0
        at_boundary: set[int] = set()
        for o in (*problem.forward, *late):
            if late and o == late[0]:
                end_of_forward, at_boundary = len(self.order), set(self.there)
                self.used += problem.backward_constant
                self.pinned -= problem.written - problem.outputs
            if not self._call(o):
                return None
        forward, backward = self.order[:end_of_forward], self.order[end_of_forward:]
        saved = at_boundary.intersection(self._read_first(backward))
        return Schedule(tuple(sorted(saved)), tuple(forward), tuple(backward))

    def _read_first(self, order: list[int]) -> Iterator[int]:
        """The values that `order` reads before it writes them."""
        written: set[int] = set()
        for o in order:
            yield from (v for v in self.problem.operators[o].reads if v not in written)
            written.update(self.problem.operators[o].writes)

    def _call(self, o: int) -> bool:
        """Run an operator of the given order, after what it needs; whether it did fit in time."""
        frames: list[tuple[int, set[int]]] = [(o, set())]
        while frames:
            current, locked = frames[-1]
            reads = self.problem.operators[current].reads
            locked.update(self.there.intersection(reads))
            missing = next((v for v in reads if v not in self.there), None)
            if missing is not None:
                frames.append((self.problem.producers[missing], set()))
                continue
            if not self._make_room(current, set().union(*(values for _, values in frames))):
                return False
            self._run(current)
            if self.clock > self.most_seconds:
                return False
            frames.pop()
        for v in self.problem.operators[o].reads:
            self.uses[v] -= 1
        for v in (*self.problem.operators[o].reads, *self.problem.operators[o].writes):
            if not self.uses[v] and v not in self.pinned and v in self.there:
                self._evict(v)
        return True

    def _make_room(self, o: int, locked: set[int]) -> bool:
        op, nbytes = self.problem.operators[o], self.problem.nbytes
        need = sum(nbytes[v] for v in op.writes if v not in self.there) + op.nbytes_inside
        while self.used + need > self.budget:
            free = (v for v in self.there if v not in locked and self._may_go(v))
            chosen = min(free, key=lambda v: (self._heuristic(v), v), default=None)
            if chosen is None:
                return False
            self._evict(chosen)
        self.most = max(self.most, self.used + need)
        return True

    def _may_go(self, v: int) -> bool:
        op = self.problem.operators[self.problem.producers[v]]
        return (
            v not in self.pinned and op.repeatable and not op.draws and self.problem.nbytes[v] > 0
        )

    def _heuristic(self, v: int) -> float:
        if v not in self.around:
            found = {self.problem.producers[u] for u in self._neighbourhood(v)[0]}
            self.around[v] = self.problem.seconds_of(sorted(found))
        seconds = self.problem.operators[self.problem.producers[v]].seconds + self.around[v]
        stale = max(self.clock - self.touched[v], 1e-12)
        return seconds / (self.problem.nbytes[v] * stale)

    def _neighbourhood(self, v: int) -> tuple[set[int], set[int]]:
        """Around `v`, the evicted values, and those in memory where they end."""
        evicted: set[int] = set()
        ends: set[int] = set()
        for next_of in (self._parents, self._children):
            stack = [v]
            while stack:
                for u in next_of(stack.pop()):
                    if u in self.there:
                        ends.add(u)
                    elif u in self.computed and u not in evicted:
                        evicted.add(u)
                        stack.append(u)
        return evicted, ends

    def _parents(self, v: int) -> Iterator[int]:
        yield from self.problem.operators[self.problem.producers[v]].reads

    def _children(self, v: int) -> Iterator[int]:
        for o in self.readers[v]:
            yield from self.problem.operators[o].writes

    def _evict(self, v: int) -> None:
        self.there.discard(v)
        self.used -= self.problem.nbytes[v]
        self._forget_around(v)

    def _run(self, o: int) -> None:
        op = self.problem.operators[o]
        self.order.append(o)
        self.clock += op.seconds
        for v in op.writes:
            if v not in self.there:
                self.there.add(v)
                self.computed.add(v)
                self.used += self.problem.nbytes[v]
                self._forget_around(v)
        for v in (*op.reads, *op.writes):
            self.touched[v] = self.clock

    def _forget_around(self, v: int) -> None:
        """`v` was evicted or came back: what it is a neighbour of has another neighbourhood."""
        self.around.pop(v, None)
        for u in self._neighbourhood(v)[1]:
            self.around.pop(u, None)
