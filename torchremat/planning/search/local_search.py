"""Small changes to decisions, each tried on the simulator, while they make things better."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from torchremat.planning.problem.problem import Part, Problem
from torchremat.planning.problem.replay import Decisions
from torchremat.planning.problem.trial import Evaluated, Evaluator
from torchremat.planning.search.clock import Deadline

WIDTH = 48
"""The changes of one kind that are tried, the most promising first."""


class LocalSearch:
    def __init__(self, evaluator: Evaluator, deadline: Deadline) -> None:
        self.evaluator = evaluator
        self.deadline = deadline
        self.problem: Problem = evaluator.problem
        self.seconds = [op.seconds for op in self.problem.operators]
        self.tiny = sum(self.seconds) * 1e-5

    def repair(self, start: Evaluated) -> Evaluated:
        current = start
        while not current.fits and not self._is_late():
            best, best_score = None, 0.0
            for decisions in self._reliefs(current):
                if self._is_late():
                    break
                trial = self.evaluator(decisions)
                won = current.excess - trial.excess
                lost = trial.costs.added_seconds - current.costs.added_seconds
                score = won / (max(lost, 0.0) + self.tiny)
                if score > best_score:
                    best, best_score = trial, score
            if best is None:
                break
            current = best
        return current

    def improve(self, start: Evaluated) -> Evaluated:
        """Take time away from `start`, which fits."""
        current: Evaluated = start
        while (better := self._find_better(current)) is not None:
            current = better
        return current

    def save_needless_copies(self, start: Evaluated) -> Evaluated:
        """Save what is offloaded in vain: `start` fits, and still does with it saved."""
        current = start
        for v in self._cheapest(start.decisions.offloaded, most=len(self.problem.nbytes)):
            if self._is_late():
                break
            trial = self.evaluator(_save(current.decisions, v))
            if trial.rank < current.rank:
                current = trial
        return current

    def _find_better(self, current: Evaluated) -> Evaluated | None:
        least = current.costs.added_seconds - self.tiny * 1e-6
        for decisions in self._savings(current):
            if self._is_late():
                return None
            trial = self.evaluator.try_for_less(decisions, least)
            if trial is not None:
                return trial
        return None

    def _is_late(self) -> bool:
        return self.deadline.is_over

    def _reliefs(self, trial: Evaluated) -> Iterator[Decisions]:
        live = trial.costs.live
        worst = max(range(len(live)), key=live.__getitem__)
        num_forward = len(trial.replay.schedule.forward)
        if worst < num_forward:
            yield from self._forward_reliefs(trial, worst)
        else:
            yield from self._backward_reliefs(trial, worst - num_forward)

    def _forward_reliefs(self, trial: Evaluated, position: int) -> Iterator[Decisions]:
        operators, order = self.problem.operators, trial.replay.schedule.forward
        busy = {*operators[order[position]].reads}
        made = {v for o in order[: position + 1] for v in operators[o].writes}
        idle = made - busy
        kept = trial.decisions.saved_or_offloaded - self.evaluator.fixed
        yield from _unsave(trial.decisions, self._cheapest(kept & idle))
        yield from self._offload(trial.decisions, trial.decisions.saved & idle)

    def _backward_reliefs(self, trial: Evaluated, place: int) -> Iterator[Decisions]:
        order, decisions = trial.replay.schedule.backward, trial.decisions
        op = self.problem.operators[order[place]]
        all_idle = _find_read_later(self.problem, order, place).difference(op.reads, op.writes)
        idle = all_idle - self.evaluator.fixed
        yield from _unsave(decisions, self._cheapest(idle & decisions.saved_or_offloaded))
        yield from self._offload(decisions, all_idle & decisions.saved)
        yield from self._free_values(trial, place, idle)
        again = dict.fromkeys(
            v
            for o in order[: place + 1]
            if self.problem.operators[o].part is not Part.BACKWARD
            for v in self.problem.operators[o].writes
            if v not in decisions.saved
        )
        for v in list(again)[-WIDTH:]:
            yield _save(decisions, v)
        yield from self._offload(decisions, list(again)[-WIDTH:])

    def _free_values(self, trial: Evaluated, place: int, idle: set[int]) -> Iterator[Decisions]:
        decisions, steps = trial.decisions, trial.replay.steps
        step = steps[place]
        last_read = _find_last_reads(self.problem, trial.replay.schedule.backward, place)
        for v in self._cheapest(v for v in idle if self._may_drop(v)):
            made = self._find_step_of(v, trial.replay.schedule.backward, steps, place)
            at = max(last_read.get(v, -1), made)
            for when in {at, step - 1}:
                if 0 <= when < step or 0 <= when == at:
                    for gone in {
                        frozenset((v,)),
                        self._with_sources(v, when, decisions.saved_or_offloaded),
                    }:
                        drops = dict(decisions.drops)
                        drops[when] = drops.get(when, frozenset()) | gone
                        yield replace(decisions, drops=drops)

    def _find_step_of(
        self, v: int, order: tuple[int, ...], steps: tuple[int, ...], place: int
    ) -> int:
        """The step for which `v` was recomputed before `place`; -1 if it was not."""
        producer = self.problem.producers[v]
        return next((steps[j] for j in range(place, -1, -1) if order[j] == producer), -1)

    def _with_sources(self, v: int, step: int, kept: frozenset[int]) -> frozenset[int]:
        """`v`, and its sources that no operator of the backward pass reads later."""
        problem = self.problem
        found = {v}
        stack = [v]
        while stack:
            for u in problem.operators[problem.producers[stack.pop()]].reads:
                if u in found or u in kept or u in self.evaluator.fixed or not self._may_drop(u):
                    continue
                if self._last_direct.get(u, -1) <= step:
                    found.add(u)
                    stack.append(u)
        return frozenset(found)

    @cached_property
    def _last_direct(self) -> dict[int, int]:
        problem = self.problem
        return {v: i for i, o in enumerate(problem.backward) for v in problem.operators[o].reads}

    def _may_drop(self, v: int) -> bool:
        op = self.problem.operators[self.problem.producers[v]]
        return op.repeatable and not op.draws

    def _savings(self, trial: Evaluated) -> Iterator[Decisions]:
        problem, decisions = self.problem, trial.decisions
        saved = decisions.saved
        for step, values in decisions.drops.items():
            for v in values & values_recomputed(trial, problem):
                yield replace(decisions, drops=_remove_one(decisions.drops, step, v))
        for step, operators in decisions.early.items():
            for o in operators:
                yield replace(decisions, early=_remove_one(decisions.early, step, o))
        order = trial.replay.schedule.backward
        again = {o for o in order if problem.operators[o].part is not Part.BACKWARD}
        gains = {v for o in again for v in problem.operators[o].writes if v not in saved}
        best = self._cheapest(gains, reverse=True)
        for v in best:
            yield _save(decisions, v)
        yield from self._offload(decisions, best)
        if trial.costs.link_seconds:
            yield from self._relieve_link(decisions)
        losses = self._cheapest(saved - self.evaluator.fixed)
        for v in best:
            for u in losses:
                if self._seconds_of(u) < self._seconds_of(v):
                    yield _save(replace(decisions, saved=saved - {u}), v)
        for v in best:  # one takes the other's place
            yield from (_save(d, v) for d in self._offload(decisions, saved - {v}))

    def _relieve_link(self, decisions: Decisions) -> Iterator[Decisions]:
        for v in self._cheapest(decisions.offloaded, reverse=True):
            yield _save(decisions, v)
        yield from _unsave(decisions, self._cheapest(decisions.offloaded))
        for v in self._cheapest(decisions.offloaded, reverse=True):
            for u in self._cheapest(decisions.saved - self.evaluator.fixed):
                yield _save(replace(decisions, saved=decisions.saved - {u}), v)

    def _offload(self, decisions: Decisions, values: Iterable[int]) -> Iterator[Decisions]:
        """Offload one of `values`, if it may be: those that take longest to recompute first."""
        if not self.problem.offloadable:
            return
        chosen = self.problem.offloadable.intersection(values) - decisions.offloaded
        for v in self._cheapest(chosen, reverse=True):
            offloaded = decisions.offloaded | {v}
            yield replace(decisions, saved=decisions.saved - {v}, offloaded=offloaded)

    def _seconds_of(self, v: int) -> float:
        return self.seconds[self.problem.producers[v]]

    def _cheapest(
        self, values: Iterable[int], *, reverse: bool = False, most: int = WIDTH
    ) -> list[int]:
        """The members of `values` that take the least time each byte; or the most."""
        nbytes = self.problem.nbytes
        return sorted(
            sorted(values), key=lambda v: self._seconds_of(v) / max(nbytes[v], 1), reverse=reverse
        )[:most]


def values_recomputed(trial: Evaluated, problem: Problem) -> frozenset[int]:
    """The values that the backward pass recomputes: freeing another one early costs no time."""
    order = trial.replay.schedule.backward
    return frozenset(v for o in order for v in problem.operators[o].writes)


def _find_read_later(problem: Problem, order: tuple[int, ...], place: int) -> set[int]:
    wanted: set[int] = set()
    for o in reversed(order[place + 1 :]):
        wanted.difference_update(problem.operators[o].writes)
        wanted.update(problem.operators[o].reads)
    return wanted & problem.known


def _find_last_reads(problem: Problem, order: tuple[int, ...], place: int) -> dict[int, int]:
    found: dict[int, int] = {}
    step = 0
    for o in order[:place]:
        found.update((v, step) for v in problem.operators[o].reads)
        step += problem.operators[o].part is Part.BACKWARD
    return found


def _unsave(decisions: Decisions, values: Iterable[int]) -> Iterator[Decisions]:
    for v in values:
        offloaded = decisions.offloaded - {v}
        yield replace(decisions, saved=decisions.saved - {v}, offloaded=offloaded)


def _save(decisions: Decisions, v: int) -> Decisions:
    return replace(decisions, saved=decisions.saved | {v}, offloaded=decisions.offloaded - {v})


def _remove_one(
    sets: Mapping[int, frozenset[int]], step: int, member: int
) -> dict[int, frozenset[int]]:
    left = {**sets, step: sets[step] - {member}}
    return {at: values for at, values in left.items() if values}
