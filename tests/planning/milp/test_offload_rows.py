"""Offloading as numbers: what it costs, and the solver against brute force with a link to a host.

Two oracles, as in `test_oracles.py`, each with the third choice:

    kept        every way to save, offload or compute again each value
    schedules   for every set of offloaded values, a shortest path over states
"""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
from hypothesis import assume, given, note, seed, settings
from hypothesis import strategies as st

from tests.planning.schedules import check_outer_programs, plain_schedule
from tests.planning.test_oracles import (
    CHAIN,
    OPTIONS,
    Schedules,
    examples,
    least_peak,
    least_seconds,
    must_run,
    problems,
    runs_allowed,
)
from torchremat.planning.problem.problem import Operator, Part, Problem, Schedule
from torchremat.planning.problem.replay import Decisions, replay_of
from torchremat.planning.problem.schedule_costs import ScheduleError, costs_of
from torchremat.planning.search.solver_options import Solution, SolverOptions
from torchremat.planning.solver import solve

FORWARD, EITHER, BACKWARD = Part.FORWARD, Part.EITHER_PASS, Part.BACKWARD

# --- the optimum over all schedules --------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """Steps done; bits of the known values in memory and of what ran and may not again.

    Then those of offloaded values that are being copied (they may not be let go yet, in the
    backward pass not be read yet), and that the host still has; seconds of the forward pass.
    """

    done: int
    memory: int = 0
    ran: int = 0
    copying: int = 0
    away: int = 0
    forward: float = 0.0


@dataclass(frozen=True)
class _Offloading:
    """The graph of states if `offloaded` is offloaded."""

    problem: Problem
    offloaded: frozenset[int]

    @cached_property
    def plain(self) -> Schedules:
        return Schedules(self.problem)

    @cached_property
    def bits(self) -> int:
        return sum(1 << v for v in self.offloaded)

    @cached_property
    def copy_seconds(self) -> float:
        return self.problem.copy_seconds(self.offloaded)

    def least(self, budget: int, best: float) -> float:
        """The least time of both passes, if that is below `best`."""
        start = _State(0)
        costs = {start: 0.0}
        queue: list[tuple[float, int, _State]] = [(0.0, 0, start)]
        count = itertools.count()
        while queue:
            cost, _, state = heapq.heappop(queue)
            if cost > costs[state] or cost >= best:
                continue
            if state.done > len(self.plain.order):
                return cost
            for after, live, then in self._after(state, cost):
                if live <= budget and then < costs.get(after, math.inf):
                    costs[after] = then
                    heapq.heappush(queue, (then, next(count), after))
        return best

    def _after(self, state: _State, cost: float) -> Iterator[tuple[_State, int, float]]:
        problem, plain, done = self.problem, self.plain, state.done
        middle = len(problem.forward)
        if done == len(plain.order):
            waits = max(0.0, self.copy_seconds - (cost - state.forward))
            yield replace(state, done=done + 1), 0, cost + waits
            return
        for o in plain.again:
            op = problem.operators[o]
            allowed = op.part is EITHER or not (done <= middle or plain.single >> o & 1)
            if allowed and not state.ran >> o & 1:
                yield from self._runs(o, state, done, cost)
        if done == middle:
            yield from self._between(state, cost)
        else:
            yield from self._runs(plain.order[done], state, done + 1, cost)
        for v in problem.known - plain.held:
            bit = 1 << v
            if state.memory & bit and not (done <= middle and state.copying & bit):
                yield (
                    replace(state, memory=state.memory & ~bit, copying=state.copying & ~bit),
                    0,
                    cost,
                )
            if done > middle and state.away & bit and not state.memory & bit:
                copying = state.copying | (bit if done > middle + 1 else 0)
                away = state.away & ~bit
                yield replace(state, memory=state.memory | bit, away=away, copying=copying), 0, cost

    def _runs(
        self, o: int, state: _State, then: int, cost: float
    ) -> Iterator[tuple[_State, int, float]]:
        op = self.problem.operators[o]
        is_forward = state.done < len(self.problem.forward) + 1
        if not is_forward and any(state.copying >> v & 1 for v in op.reads):
            return
        written = sum(1 << v for v in op.writes)
        # copies are done, there and back, when the next operator of a pass ran that it must run
        copying = 0 if then > state.done else state.copying
        copying = copying | (written & self.bits) if is_forward else copying & ~written
        for (done, memory, ran), live, seconds in self.plain.runs(
            o, (state.done, state.memory, state.ran), then
        ):
            after = _State(done, memory, ran, copying, state.away, state.forward)
            yield after, live, cost + seconds

    def _between(self, state: _State, cost: float) -> Iterator[tuple[_State, int, float]]:
        problem, plain = self.problem, self.plain
        if not all(state.memory >> v & 1 for v in problem.written - plain.held):
            return
        made = (
            v
            for v in self.offloaded
            if problem.operators[o := problem.producers[v]].part is FORWARD or state.ran >> o & 1
        )
        seconds = max(cost, self.copy_seconds)
        yield (
            _State(
                state.done + 1,
                state.memory & ~self.bits,
                state.ran & plain.single,
                away=sum(1 << v for v in made),
                forward=seconds,
            ),
            0,
            seconds,
        )


def least_seconds_with_a_host(problem: Problem, budget: int) -> float:
    """The least time that a schedule of at most `budget` bytes adds; infinite if none is."""
    best = math.inf
    for offloaded in _subsets(problem.offloadable):
        best = _Offloading(problem, frozenset(offloaded)).least(budget, best)
    return best - problem.seconds_of(must_run(problem))


def _subsets(values: frozenset[int]) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(
        itertools.combinations(sorted(values), k) for k in range(len(values) + 1)
    )


# --- the optimum over what is kept ---------------------------------------------------------------


def best_kept(problem: Problem, budget: int) -> float:
    """The least time over all ways to keep values, nothing being let go before its last use."""
    best = math.inf
    for kept in _subsets(problem.known - problem.outputs):
        for offloaded in _subsets(problem.offloadable.intersection(kept)):
            decisions = Decisions(
                frozenset(kept).difference(offloaded), offloaded=frozenset(offloaded)
            )
            schedule = replay_of(problem, decisions).schedule
            if runs_allowed(problem, schedule):
                costs = costs_of(problem, schedule)
                if costs.peak <= budget:
                    best = min(best, costs.added_seconds)
    return best


# --- random problems -----------------------------------------------------------------------------


@st.composite
def cases(draw) -> tuple[Problem, int]:
    """A problem with a link, and a budget between the least peak without it and the plain peak."""
    problem = draw(problems(most_known=4))
    least, plain = least_peak(problem), costs_of(problem, plain_schedule(problem)).peak
    assume(least < plain)
    rate = draw(st.sampled_from([1.0, 0.5, 2.0, 4.0]))
    least_offload = draw(st.sampled_from([0, 3, 5]))
    problem = replace(problem, host_bytes_per_second=rate, least_offload=least_offload)
    assume(len(problem.offloadable) <= 4)
    share = draw(st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.8]))
    return problem, least + round(share * (plain - least))


LINKED = replace(CHAIN, host_bytes_per_second=1e9)


# --- what it costs -------------------------------------------------------------------------------


def offloading(*values: int) -> Schedule:
    """The chain with nothing computed again, and `values` offloaded."""
    plain = plain_schedule(LINKED)
    saved = tuple(v for v in plain.saved if v not in values)
    return replace(plain, saved=saved, offloaded=values)


@pytest.mark.parametrize(
    ("values", "forward", "backward"),
    [
        ((), (4, 8, 12, 13), (14, 7, 2)),
        ((0,), (4, 8, 8, 9), (14, 7, 2)),  # let go when 1 has run, fetched while 4 runs
        ((2,), (4, 8, 12, 13), (14, 7, 2)),  # its copy is made while 3 runs
        ((0, 1, 2), (4, 8, 8, 5), (14, 7, 2)),  # 1 and 2 are there when the pass begins
    ],
)
def test_what_is_offloaded_is_there_until_it_is_copied_and_again_a_step_before_it_is_read(
    values, forward, backward
):
    """Values 0, 1 and 2 have 4 bytes, what else there is has 1."""
    costs = costs_of(LINKED, offloading(*values))
    assert costs.live == (*forward, *backward)
    assert costs.added_seconds == pytest.approx(0, abs=1e-6)


def test_only_operators_that_always_run_give_time_for_a_copy():
    """Not 2, which only the backward pass needs, nor what is computed again."""
    operators = (
        Operator((), (0,), 1.0, FORWARD),
        Operator((), (1,), 1.0, FORWARD),
        Operator((), (2,), 1.0, FORWARD),
        Operator((0, 1), (3,), 1.0, EITHER),
        Operator((), (4,), 1.0, BACKWARD),
        Operator((3, 4), (5,), 1.0, BACKWARD),
        Operator((5,), (), 0.0, BACKWARD),
    )
    nbytes = (8, 4, 1, 1, 1, 1)
    problem = Problem(operators, nbytes, gradients=frozenset({5}), host_bytes_per_second=1e9)
    again = Schedule((), (0, 1, 2), (4, 1, 3, 5, 6), offloaded=(0,))  # 3 reads 0, for 5: after 4
    assert costs_of(problem, again).live == (8, 12, 1, 9, 13, 14, 3, 1)
    early = Schedule((3,), (0, 1, 3, 2), (4, 5, 6), offloaded=(1,))  # 1 is there until 2 ran
    assert costs_of(problem, early).live[:4] == (8, 12, 13, 6)


@pytest.mark.parametrize(("rate", "waits"), [(4.0, 0.0), (1.0, 2.0), (0.4, 2.0 + 8.0)])
def test_each_pass_takes_as_long_as_its_operators_or_its_copies(rate, waits):
    """The forward pass takes 8 seconds, the backward pass 2."""
    costs = costs_of(replace(LINKED, host_bytes_per_second=rate), offloading(0))
    assert costs.added_seconds == costs.link_seconds == pytest.approx(waits)


@pytest.mark.parametrize(
    ("problem", "schedule", "match"),
    [
        (CHAIN, offloading(0), r"which may not be: values \[0\]"),
        (replace(LINKED, least_offload=5), offloading(0), r"which may not be"),
        (LINKED, offloading(3), r"which may not be: values \[3\]"),  # an output
        (LINKED, replace(offloading(0), saved=(0, 1, 2)), r"and saved besides: values \[0\]"),
    ],
)
def test_what_may_not_be_offloaded(problem, schedule, match):
    with pytest.raises(ScheduleError, match=match):
        costs_of(problem, schedule)


def test_what_is_offloaded_is_not_let_go_before_it_is_read():
    decisions = Decisions(frozenset({1, 2}), {0: frozenset({0})}, offloaded=frozenset({0}))
    assert replay_of(LINKED, decisions).schedule == offloading(0)


# --- the oracles themselves ----------------------------------------------------------------------


@examples(25)
@given(case=cases())
def test_the_shortest_path_is_no_longer_than_what_any_choice_costs(case):
    problem, budget = case
    optimum = least_seconds_with_a_host(problem, budget)
    assert optimum <= best_kept(problem, budget) + 1e-9
    assert optimum <= least_seconds(problem, budget)


@examples(16)
@given(case=cases())
def test_an_endless_link_at_the_plain_peak_adds_nothing(case):
    problem, _ = case
    plain = costs_of(problem, plain_schedule(problem)).peak
    assert least_seconds_with_a_host(problem, plain) == 0


# --- the solver ----------------------------------------------------------------------------------


def solved(problem: Problem, budget: int, options: SolverOptions = OPTIONS) -> Solution:
    """What the solver says, checked against the definition."""
    note(f"{problem!r}\nbudget {budget}")
    solution = solve(problem, budget, options)
    note(f"{solution!r}")
    if solution.schedule is not None:
        costs = costs_of(problem, solution.schedule)
        assert costs.peak == solution.peak <= budget
        assert costs.added_seconds == pytest.approx(solution.added_seconds)
        assert runs_allowed(problem, solution.schedule)
    return solution


def check_laws(problem: Problem, budget: int) -> None:
    """The answer lies between the optimum and what no drop finds, the bound below the optimum."""
    solution = solved(problem, budget)
    optimum = least_seconds_with_a_host(problem, budget)
    assert solution.lower_bound_seconds <= optimum + 1e-6
    assert optimum - 1e-9 <= solution.added_seconds <= best_kept(problem, budget) + 1e-9


@examples(40)
@given(case=cases())
def test_the_answer_and_the_bound_lie_on_their_sides_of_the_optimum(case):
    check_laws(*case)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_the_laws_on_many_problems(number):
    @seed(number)
    @settings(examples(100), derandomize=False, database=None)
    @given(case=cases())
    def check(case):
        check_laws(*case)

    check()


@examples(16)
@given(case=cases())
@pytest.mark.parametrize("window", [None, 0, 1, 2])
@pytest.mark.sampled(2)
def test_every_schedule_is_an_answer_of_the_outer_program(window, case):
    problem, budget = case
    note(f"{problem!r}\nbudget {budget}")
    check_outer_programs(problem, budget, window, least_seconds_with_a_host(problem, budget))
