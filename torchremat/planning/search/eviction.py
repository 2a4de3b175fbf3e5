"""Schedules from one walk over the backward pass: values stay alive until memory runs out.

Before each step of the backward pass, the values that it reads and that are not alive are
recomputed. Where that is above the budget, values that are not wanted just then are freed. First go
those that cost little time for the bytes that they free, and for how long. This is dynamic tensor
rematerialisation (Kirisame et al., ICLR 2021), but later reads are known.

    step         dz        dy, reads y       dx, reads x
    computes     -         x, y              -
    alive after  x, y, z   x                 -             y is freed where x has no room beside it
"""

import heapq
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from torchremat.planning.problem.fixed_bytes import ForwardBytes
from torchremat.planning.problem.problem import Part, Problem
from torchremat.planning.problem.recomputation import Recomputation
from torchremat.planning.problem.replay import Decisions
from torchremat.planning.problem.trial import Evaluated, Evaluator
from torchremat.planning.search.clock import NEVER, Deadline

# Times that one walk goes back a step: more take longer, for lower budgets. Chosen by hand.
_MOST_RETURNS = 200
# Nominal seconds of one operator or value that the walk looks at: measured, at about 3 GHz.
_SECONDS_OF_VISIT = 5e-7


@dataclass(frozen=True)
class EvictionRule:
    """The value of least seconds / (bytes ** `nbytes` * steps ** `steps`) is freed first."""

    nbytes: float
    steps: float


RULES = (EvictionRule(1, 1), EvictionRule(1, 0.5), EvictionRule(1, 0), EvictionRule(0, 1))


class Evictor:
    def __init__(self, problem: Problem, deadline: Deadline = NEVER) -> None:
        self.problem = problem
        self.deadline = deadline
        self.again = Recomputation(problem)

    def decisions(self, budget: int, rule: EvictionRule, saved: Iterable[int]) -> Decisions | None:
        """Decisions that keep the backward pass within `budget`; `None` if none were found.

        The forward pass saves what the budget allows of `saved`.

        >>> from torchremat.planning.problem.problem import Operator, Part, Problem
        >>> a = Operator((), (0,), 1.0, Part.FORWARD)
        >>> b = Operator((0,), (1,), 1.0, Part.FORWARD)
        >>> db = Operator((1,), (2,), 1.0, Part.BACKWARD)
        >>> da = Operator((0, 2), (3,), 1.0, Part.BACKWARD)
        >>> problem = Problem((a, b, db, da), (4, 4, 4, 4), gradients=frozenset({3}))
        >>> Evictor(problem).decisions(8, RULES[0], [0, 1]) is None    # da needs 12 bytes
        True
        >>> Evictor(problem).decisions(12, RULES[0], [0, 1]).saved
        frozenset({0, 1})
        """
        visits = self.again.visits
        kept = _choose_saved(self.again, budget, rule, set(saved) - self.problem.outputs)
        backward = _BackwardPass(self.again, budget, rule, kept)
        step, num_returns = 0, 0
        while step < len(self.problem.backward):
            stuck = None if self.deadline.is_over else backward.run(step)
            self.deadline.charge(_SECONDS_OF_VISIT * (self.again.visits - visits))
            visits = self.again.visits
            if self.deadline.is_over:
                return None
            if stuck is None:
                step += 1
            elif num_returns == _MOST_RETURNS or not backward.promise_earlier(step, stuck):
                return None
            else:
                num_returns += 1
                step -= 1
                backward.back_to(step)
        return backward.decisions()


def try_evictions(
    evaluator: Evaluator,
    evictor: Evictor,
    saved: Iterable[int],
    rules: Iterable[EvictionRule] = RULES,
) -> Iterator[Evaluated]:
    saved = tuple(saved)
    for rule in rules:
        decisions = evictor.decisions(evaluator.budget, rule, saved)
        if decisions is not None:
            yield evaluator(decisions)


class _Queue:
    """Values by score, which only grows as others are freed: only the first is rated anew."""

    def __init__(
        self, again: Recomputation, rule: EvictionRule, step: int, there: Collection[int]
    ) -> None:
        self.again = again
        self.rule = rule
        self.step = step
        self.uses = again.next_uses(step, there)
        self.scores: dict[int, float] = {}

    def first(self, values: Collection[int], there: Collection[int]) -> int:
        for v in values:
            if v not in self.scores:
                self.scores[v] = self.score(v, there)
        while True:
            self.again.visits += len(values)
            first = min(values, key=lambda v: (self.scores[v], v))
            score = self.score(first, there)
            if score <= self.scores[first]:
                return first
            self.scores[first] = score

    def score(self, v: int, there: Collection[int]) -> float:
        """The seconds of `v` for what it frees: small for a value that goes early."""
        nbytes = self.again.problem.nbytes[v]
        if v not in self.uses:
            return -nbytes
        steps = self.uses[v] - self.step + 1
        worth: float = max(nbytes, 1) ** self.rule.nbytes * steps**self.rule.steps
        return self.again.seconds_again(v, there) / worth


def _choose_saved(
    again: Recomputation, budget: int, rule: EvictionRule, saved: set[int]
) -> set[int]:
    problem = again.problem
    forward = ForwardBytes.of(problem)
    nbytes, operators = problem.nbytes, problem.operators
    last = dict(forward.last)
    for o, op in enumerate(operators):
        if op.part is Part.EITHER_PASS:  # it runs when what it reads is there
            at = max((last.get(u, -1) for u in again.reads[o]), default=-1)
            last.update((v, at) for v in op.writes)
    room = [budget - live for live in forward.live]
    room.append(budget - max(forward.at_end, again.bytes_of_steps.before[0]))
    idle_from: dict[int, list[int]] = {}  # the moment from which each value waits unread
    for v in saved:
        idle_from.setdefault(last[v] + 1, []).append(v)
    queue = _Queue(again, rule, 0, saved)
    idle: list[tuple[float, int]] = []  # what may go, the least score first
    waiting = 0  # bytes of values that wait unread
    kept = set(saved)
    for i in range(len(room)):
        for v in idle_from.get(i, ()):
            waiting += nbytes[v]
            if v not in again.lasting:
                heapq.heappush(idle, (queue.score(v, kept), v))
        while waiting > room[i] and idle:
            old, v = heapq.heappop(idle)
            score = queue.score(v, kept)
            if score > old and idle and score > idle[0][0]:
                heapq.heappush(idle, (score, v))
                continue
            kept.discard(v)
            waiting -= nbytes[v]
    return kept


@dataclass
class _StepRecompute:
    """The recomputation for one step.

    Attributes:
        order: the same, and the operator of the step.
        first: when each value is read first, a position in `order`.
        last: when it is read last.
    """

    operators: list[int]
    order: list[int]
    first: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Above:
    run: _StepRecompute
    place: int
    alive: set[int]


@dataclass(frozen=True)
class _Before:
    there: frozenset[int]
    saved: frozenset[int]
    num_drops: int
    num_early: int


class _BackwardPass:
    def __init__(
        self, again: Recomputation, budget: int, rule: EvictionRule, saved: set[int]
    ) -> None:
        self.again = again
        self.problem = again.problem
        self.budget = budget
        self.rule = rule
        self.there = set(saved)
        self.saved = set(saved)
        self.drops: list[tuple[int, int]] = []  # steps, and values that go after them
        self.early: list[tuple[int, int]] = []  # steps, and operators that run before them
        self.promised: dict[int, set[int]] = {}
        """Values that must be alive after a step, though it may not read them."""
        self.before: list[_Before] = []

    def back_to(self, step: int) -> None:
        before = self.before[step]
        self.there, self.saved = set(before.there), set(before.saved)
        del self.drops[before.num_drops :], self.early[before.num_early :]
        del self.before[step:]

    def run(self, step: int) -> _Above | None:
        """Make room for a step; the moment at which there is none, if so."""
        again, promised = self.again, self.promised.get(step, set())
        self.before.append(
            _Before(frozenset(self.there), frozenset(self.saved), len(self.drops), len(self.early))
        )
        self.there = {v for v in self.there if again.last.get(v, -1) >= step}
        gone: set[int] = set()  # after this step
        queue: _Queue | None = None
        while True:
            run = self._plan_recompute(step, promised)
            above = self._find_above(step, run, gone)
            made = self.there.union(*(again.writes[o] for o in run.operators))
            if above is None:
                break
            choice = self._list_freeable(step, above, gone)
            if not choice:
                self.before.pop()
                return above
            left = made - gone
            queue = queue or _Queue(again, self.rule, step + 1, left)
            v = queue.first(choice, left)
            if v in self.there and run.first.get(v, above.place) >= above.place:
                self._free_before(step, v)
            else:
                gone.add(v)
                self.drops.append((step, v))
        self.early += [(step, self.problem.producers[v]) for v in promised - self.there]
        self.there = {v for v in made - gone if again.last.get(v, -1) > step}
        return None

    def _free_before(self, step: int, v: int) -> None:
        self.there.discard(v)
        if step:
            self.drops.append((step - 1, v))
        else:
            self.saved.discard(v)

    def _plan_recompute(self, step: int, promised: Collection[int]) -> _StepRecompute:
        again, b = self.again, self.problem.backward[step]
        operators = again.missing([*again.reads[b], *promised], self.there)
        run = _StepRecompute(operators, [*operators, b])
        for place, o in enumerate(run.order):
            for v in again.reads[o]:
                run.first.setdefault(v, place)
                run.last[v] = place
        run.last.update((v, len(run.order)) for v in promised)
        return run

    def _find_above(self, step: int, run: _StepRecompute, gone: Collection[int]) -> _Above | None:
        again, nbytes = self.again, self.problem.nbytes

        def stays(v: int) -> bool:
            return v not in gone and again.last.get(v, -1) > step

        again.visits += len(self.there) + 4 * len(run.order)
        alive = {v for v in self.there if v in run.last or stays(v)}
        total = sum(nbytes[v] for v in alive)
        fixed = again.bytes_of_steps
        for place, o in enumerate(run.order):
            new = set(again.writes[o]) - alive
            alive |= new
            total += sum(nbytes[v] for v in new)
            if place < len(run.operators):
                live = total + fixed.before[step] + self.problem.operators[o].nbytes_inside
            else:
                live = total + fixed.at[step] - sum(nbytes[v] for v in again.reads[o])
            if live > self.budget:
                return _Above(run, place, alive)
            for v in {*again.reads[o], *again.writes[o]}:
                if v in alive and run.last.get(v, -1) <= place and not stays(v):
                    alive.discard(v)
                    total -= nbytes[v]
        return None

    def _list_freeable(self, step: int, above: _Above, gone: Collection[int]) -> set[int]:
        run, place, again = above.run, above.place, self.again
        o = run.order[place]
        promised = self.promised.get(step - 1, ())
        found: set[int] = set()
        for v in above.alive.difference(again.reads[o], again.writes[o], again.lasting):
            if run.last.get(v, -1) < place:
                if v not in gone and again.last.get(v, -1) > step:
                    found.add(v)
            elif v in self.there and run.first.get(v, -1) > place and v not in promised:
                found.update({v} if self.problem.producers[v] > o else ())  # made again only later
        return found

    def promise_earlier(self, step: int, stuck: _Above) -> bool:
        """Promise what a step is stuck for a step earlier; whether there is any hope."""
        run, again, nbytes = stuck.run, self.again, self.problem.nbytes
        if not step or stuck.place >= len(run.operators):
            return False
        crossing: set[int] = set()  # what is made up to a place, and read after it
        best: set[int] | None = None
        for place, o in enumerate(run.operators):
            crossing.update(again.writes[o])
            crossing = {v for v in crossing if run.last.get(v, -1) > place}
            if place >= stuck.place and (
                best is None or sum(nbytes[v] for v in crossing) <= sum(nbytes[v] for v in best)
            ):
                best = set(crossing)
        promised = self.promised.setdefault(step - 1, set())
        if best is None or best <= promised:
            return False
        promised |= best
        return True

    def decisions(self) -> Decisions:
        return Decisions(
            frozenset(self.saved),
            _group_by_step(self.drops),
            _group_by_step(self.early),
            frozenset(),
        )


def _group_by_step(pairs: Iterable[tuple[int, int]]) -> dict[int, frozenset[int]]:
    found: dict[int, set[int]] = {}
    for step, member in pairs:
        found.setdefault(step, set()).add(member)
    return {step: frozenset(found[step]) for step in sorted(found)}
