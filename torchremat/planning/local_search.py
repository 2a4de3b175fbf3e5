"""Small changes to decisions, each tried on the simulator, while they make things better.

A change saves a value, no longer saves one, or lets one go in the middle of the backward pass.
First those that bring down what is above the budget, for the least time each byte; then those that
take time away and keep within it.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torchremat.planning.ordering import Decisions, Replay, replay_of
from torchremat.planning.problem import Costs, Part, Problem, costs_unchecked


@dataclass(frozen=True)
class Trial:
    """Decisions with what they cost under a budget."""

    decisions: Decisions
    replay: Replay
    costs: Costs
    excess: float
    """The bytes above the budget, summed over all moments."""

    @property
    def fits(self) -> bool:
        return self.excess == 0

    @property
    def rank(self) -> tuple[float, float]:
        return (self.excess, self.costs.added_seconds)


class LocalSearch:
    """Search around decisions for better ones."""

    def __init__(self, problem: Problem, budget: int, deadline: float, *, width: int = 48) -> None:
        self.problem = problem
        self.budget = budget
        self.deadline = deadline
        self.width = width
        self.tried = 0
        self.seconds = [op.seconds for op in problem.operators]
        self.fixed = frozenset(
            v
            for v in problem.known
            if problem.operators[problem.producers[v]].part is Part.FORWARD
            and not problem.operators[problem.producers[v]].repeatable
        ) | (problem.outputs & problem.known)

    def trial(self, decisions: Decisions) -> Trial:
        """What `decisions` cost."""
        self.tried += 1
        replay = replay_of(self.problem, decisions)
        costs = costs_unchecked(self.problem, replay.schedule)
        budget = self.budget
        excess = sum(live - budget for live in costs.live if live > budget)
        return Trial(decisions, replay, costs, excess)

    def repair(self, start: Trial) -> Trial:
        """Bring `start` under the budget, as far as that goes."""
        current = start
        while not current.fits and time.monotonic() < self.deadline:
            best, best_score = None, 0.0
            for decisions in self._reliefs(current):
                trial = self.trial(decisions)
                won = current.excess - trial.excess
                if won <= 0:
                    continue
                score = won / (max(trial.costs.added_seconds - current.costs.added_seconds, 0) + self._eps)
                if best is None or score > best_score:
                    best, best_score = trial, score
            if best is None:
                break
            current = best
        return current

    def improve(self, start: Trial) -> Trial:
        """Take time away from `start`, which fits."""
        current = start
        improved = True
        while improved and time.monotonic() < self.deadline:
            improved = False
            for decisions in self._savings(current):
                if time.monotonic() > self.deadline:
                    break
                trial = self.trial(decisions)
                if trial.fits and trial.costs.added_seconds < current.costs.added_seconds - self._eps * 1e-6:
                    current = trial
                    improved = True
                    break
        return current

    @cached_property
    def _eps(self) -> float:
        return sum(self.seconds) * 1e-5

    # --- changes ---------------------------------------------------------------------------------

    def _reliefs(self, trial: Trial) -> Iterator[Decisions]:
        """Changes that may lower the bytes where they are highest."""
        problem, decisions = self.problem, trial.decisions
        replay, costs = trial.replay, trial.costs
        live = costs.live
        worst = max(range(len(live)), key=live.__getitem__)
        num_forward = len(replay.schedule.forward)
        saved = decisions.saved
        if worst < num_forward:
            busy = set(problem.operators[replay.schedule.forward[worst]].reads)
            made = {
                v for o in replay.schedule.forward[: worst + 1] for v in problem.operators[o].writes
            }
            candidates = [v for v in (saved - self.fixed) & made if v not in busy]
            yield from self._without(decisions, self._cheapest(candidates))
            return
        place = worst - num_forward
        order = replay.schedule.backward
        step = replay.steps[place]
        there, next_read, last_read = self._around(order, place)
        busy = {*problem.operators[order[place]].reads, *problem.operators[order[place]].writes}
        idle = [v for v in there if v not in busy and v not in problem.outputs]
        yield from self._without(
            decisions, self._cheapest([v for v in idle if v in saved and v not in self.fixed])
        )
        for v in self._cheapest([v for v in idle if v not in self.fixed and self._may_drop(v)]):
            at = max(last_read.get(v, -1), self._made_at(v, order, replay.steps, place))
            for when in {at, step - 1}:
                if 0 <= when < step or (when == at and 0 <= at <= step):
                    for gone in {frozenset((v,)), self._with_sources(v, when, saved)}:
                        dropped = dict(decisions.drops)
                        dropped[when] = dropped.get(when, frozenset()) | gone
                        yield Decisions(saved, dropped)
        again = [
            v
            for o in dict.fromkeys(order[: place + 1])
            if problem.operators[o].part is not Part.BACKWARD
            for v in problem.operators[o].writes
            if v not in saved
        ]
        recent = again[-self.width :]
        for v in recent:
            yield Decisions(saved | {v}, decisions.drops)

    def _around(self, order, place):
        problem = self.problem
        wanted: set[int] = set()
        next_read: dict[int, int] = {}
        for j in range(len(order) - 1, place, -1):
            op = problem.operators[order[j]]
            wanted.difference_update(op.writes)
            wanted.update(op.reads)
        there = (wanted & problem.known)
        last_read: dict[int, int] = {}
        step = 0
        for j in range(place):
            o = order[j]
            for v in problem.operators[o].reads:
                last_read[v] = step
            if problem.operators[o].part is Part.BACKWARD:
                step += 1
        return there, next_read, last_read

    def _made_at(self, v, order, steps, place):
        producer = self.problem.producers[v]
        for j in range(place, -1, -1):
            if order[j] == producer:
                return steps[j]
        return -1

    def _with_sources(self, v: int, step: int, saved: frozenset[int]) -> frozenset[int]:
        """`v`, and what it is computed from that no operator of the backward pass reads later."""
        found = {v}
        stack = [v]
        while stack:
            for u in self.problem.operators[self.problem.producers[stack.pop()]].reads:
                if u in found or u in saved or u in self.fixed or not self._may_drop(u):
                    continue
                if self._last_direct.get(u, -1) <= step:
                    found.add(u)
                    stack.append(u)
        return frozenset(found)

    @cached_property
    def _last_direct(self) -> dict[int, int]:
        """The last step that reads each value itself."""
        return {
            v: step
            for step, o in enumerate(self.problem.backward)
            for v in self.problem.operators[o].reads
        }

    def _may_drop(self, v: int) -> bool:
        op = self.problem.operators[self.problem.producers[v]]
        return op.repeatable and not op.draws

    def _cheapest(self, values: Iterable[int]) -> list[int]:
        nbytes, producers, seconds = self.problem.nbytes, self.problem.producers, self.seconds
        return sorted(values, key=lambda v: seconds[producers[v]] / max(nbytes[v], 1))[: self.width]

    def _without(self, decisions: Decisions, values: Iterable[int]) -> Iterator[Decisions]:
        for v in values:
            yield Decisions(decisions.saved - {v}, decisions.drops)

    def _savings(self, trial: Trial) -> Iterator[Decisions]:
        """Changes that may take time away."""
        problem, decisions = self.problem, trial.decisions
        saved = decisions.saved
        for step, values in decisions.drops.items():
            for v in values:
                dropped = dict(decisions.drops)
                dropped[step] = values - {v}
                if not dropped[step]:
                    del dropped[step]
                yield Decisions(saved, dropped)
        again = {
            o for o in trial.replay.schedule.backward if problem.operators[o].part is not Part.BACKWARD
        }
        gains = sorted(
            (v for o in again for v in problem.operators[o].writes if v not in saved),
            key=lambda v: -self.seconds[problem.producers[v]] / max(problem.nbytes[v], 1),
        )[: self.width]
        for v in gains:
            yield Decisions(saved | {v}, decisions.drops)
        losses = sorted(
            saved - self.fixed,
            key=lambda v: self.seconds[problem.producers[v]] / max(problem.nbytes[v], 1),
        )[: self.width]
        for v in gains:
            for u in losses:
                if self.seconds[problem.producers[u]] < self.seconds[problem.producers[v]]:
                    yield Decisions(saved - {u} | {v}, decisions.drops)
