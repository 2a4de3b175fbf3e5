"""Decisions, tried: the schedule that they lead to, and what it costs under a budget."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from torchremat.planning.problem.forward_order import ForwardOrder
from torchremat.planning.problem.problem import Part, Problem
from torchremat.planning.problem.replay import (
    Decisions,
    Replay,
    backward_order,
    schedule_of,
    values_used,
)
from torchremat.planning.problem.schedule_costs import Costs, costs_unchecked, count_live

Floats = NDArray[np.float64]

# Nominal seconds to replay and simulate one operator. A core of about 3 GHz takes half as long: a
# smaller charge would give every search more tries, and longer ones add hardly anything.
_SECONDS_OF_ONE = 2.2e-6
# Orders of the forward pass that are not found a second time.
_MOST_ORDERS = 128
# The same for one place at which an operator is tried that may run in either pass.
_SECONDS_OF_PLACE = 4e-7

FORBIDDEN = 1 << 60
"""The excess of a schedule in which something runs more often than it may."""


@dataclass(frozen=True)
class Evaluated:
    """Decisions without values saved in vain; `excess` sums bytes above the budget."""

    decisions: Decisions
    replay: Replay
    costs: Costs
    excess: int

    @property
    def fits(self) -> bool:
        return self.excess == 0

    @property
    def is_allowed(self) -> bool:
        return self.excess < FORBIDDEN

    @property
    def rank(self) -> tuple[int, float, int]:
        """Less is better: first the excess, then added seconds, then the number of copies."""
        return (self.excess, self.costs.added_seconds, len(self.decisions.offloaded))

    def find_peaks_above(self, budget: int, distance: int) -> Iterator[int]:
        live = self.costs.live
        found: list[int] = []
        for i in sorted((i for i, n in enumerate(live) if n > budget), key=lambda i: -live[i]):
            if all(abs(i - j) > distance for j in found):
                found.append(i)
                yield i


class Evaluator:
    """Tries decisions under a budget; `charge` gets the nominal seconds of each trial."""

    def __init__(
        self, problem: Problem, budget: int, charge: Callable[[float], None] | None = None
    ) -> None:
        self.problem = problem
        self.budget = budget
        self.charge = charge
        self.count = 0

    def under(self, budget: int) -> "Evaluator":
        """An evaluator of another budget, that charges the same."""
        return Evaluator(self.problem, budget, self.charge)

    @cached_property
    def fixed(self) -> frozenset[int]:
        """The values that must be saved if they are needed, as they cannot be recomputed."""
        operators, producers = self.problem.operators, self.problem.producers
        once = (
            v
            for v in self.problem.known
            if operators[producers[v]].part is Part.FORWARD
            and not operators[producers[v]].repeatable
        )
        return frozenset(once) | (self.problem.outputs & self.problem.known)

    def __call__(self, decisions: Decisions) -> Evaluated:
        return self._finish(*self._settle(decisions))

    def try_for_less(self, decisions: Decisions, seconds: float) -> Evaluated | None:
        """Try `decisions`; `None` unless they fit and add less than `seconds`.

        Most tries end with the peak of the backward pass, which the forward pass does not change.
        """
        decisions, order, steps = self._settle(decisions)
        if not decisions.offloaded:
            forward = self.problem.forward  # in whatever order: its own bytes are not looked at
            live = count_live(self.problem, schedule_of(decisions, forward, order))
            if max(live[len(forward) :], default=0) > self.budget:
                self._charge(len(live))
                return None
        trial = self._finish(decisions, order, steps)
        return trial if trial.fits and trial.costs.added_seconds < seconds else None

    def _settle(self, decisions: Decisions) -> tuple[Decisions, tuple[int, ...], tuple[int, ...]]:
        """`decisions` without what is saved in vain, and their backward pass."""
        self.count += 1
        order, steps = backward_order(self.problem, decisions)
        used = values_used(self.problem, decisions, order)
        if used != decisions.saved_or_offloaded:
            decisions = Decisions(
                used & decisions.saved, decisions.drops, decisions.early, used & decisions.offloaded
            )
            if decisions.early:  # else nothing reads what was saved in vain before it is recomputed
                order, steps = backward_order(self.problem, decisions)
        return decisions, order, steps

    def _finish(
        self, decisions: Decisions, order: tuple[int, ...], steps: tuple[int, ...]
    ) -> Evaluated:
        forward = self._order_forward(decisions.saved, decisions.offloaded)
        replay = Replay(schedule_of(decisions, forward, order), steps)
        costs = costs_unchecked(self.problem, replay.schedule)
        early = len(forward) - len(self.problem.forward)  # each was tried at many places
        self._charge(len(forward) + len(order), early * len(forward))
        budget = self.budget
        excess = sum(live - budget for live in costs.live if live > budget)
        if not self._is_allowed(replay):
            excess += FORBIDDEN
        return Evaluated(decisions, replay, costs, excess)

    @cached_property
    def _order_forward(self) -> Callable[[frozenset[int], frozenset[int]], tuple[int, ...]]:
        """The order of the forward pass; most tries of a search save the same as one before."""
        return functools.lru_cache(maxsize=_MOST_ORDERS)(ForwardOrder(self.problem).order)

    def _charge(self, operators: int, places: int = 0) -> None:
        if self.charge is not None:
            self.charge(_SECONDS_OF_ONE * operators + _SECONDS_OF_PLACE * places)

    def _is_allowed(self, replay: Replay) -> bool:
        if not self._once and not self._draws:
            return True
        schedule = replay.schedule
        ran = [o for o in (*schedule.forward, *schedule.backward) if o in self._once]
        drawn = (
            []
            if self._draws.isdisjoint(schedule.backward)
            else [o for o in schedule.backward if o in self._draws]
        )
        return len(ran) == len(set(ran)) and len(drawn) == len(set(drawn))

    @cached_property
    def _draws(self) -> frozenset[int]:
        return frozenset(o for o, op in enumerate(self.problem.operators) if op.draws)

    @cached_property
    def _once(self) -> frozenset[int]:
        operators = self.problem.operators
        return frozenset(o for o, op in enumerate(operators) if not op.repeatable)
