"""The integer program: which values are saved, and when operators are recomputed.

Some moments of the backward pass cut it into intervals. Variables, for each known value v, the
operator o that makes it, each moment m and the interval j before it:

    s_v      v is saved                        i_oj     o runs in interval j
    a_vm     v is alive beyond moment m        f_o      o runs forward though it need not

    least    sum of seconds_o i_oj  (+ seconds_o (f_o - 1) for what only the backward pass needs)
    so that  a_vm          <= a_v(m-1) + i_oj      it was alive, or computed since (a_v0 = s_v)
             1             <= a_v(m-1) + i_oj      an operator of the pass reads v in interval j
             i_pj          <= a_u(m-1) + i_oj      p, that reads u, which o makes
             s_v           <= f_o
             bytes at m    <= budget

This is Checkmate (Jain et al., MLSys 2020) with intervals for its steps. With all moments that
matter its answers are schedules. For any moments it bounds them. Take a schedule within the budget,
with the steps in their order and a forward pass that runs nothing twice. Set each variable to 1 if
what it stands for is so. All rows hold:

- What is alive at a moment was saved or made before, and so was all that an operator reads.
- Values alive at a moment take room together, and the schedule keeps within the budget.

Each i_oj that is 1 is at least one run, so the schedule adds no less than these variables cost.
Without a window there are no other rows: the optimum, in fractions too, is a lower bound.

The relaxation is made tight by r_o, that o runs at all, and d_om, that it runs after m:

             s_v + r_o >= 1      r_p <= s_u + r_o      sum of i_oj         >= r_o
             a_vm + d_om >= 1    d_pm <= a_um + d_om   sum of later i_oj   >= d_om

With a link to a host values may be offloaded instead of saved: `offload_rows.py` has the rows.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

from torchremat.planning.milp.intervals import Intervals, PeakPoint
from torchremat.planning.milp.linear_program import LinearProgram
from torchremat.planning.milp.offload_rows import HostRows
from torchremat.planning.milp.problem_index import ProblemIndex
from torchremat.planning.problem.problem import Part
from torchremat.planning.problem.replay import Decisions, Replay
from torchremat.planning.problem.trial import Floats
from torchremat.planning.search.clock import WorkTimer


class SavingProgram:
    """The program of a problem under a budget, with rows for bytes at some moments.

    Args:
        window: operators of the forward pass that lie further than this before what the backward
            pass has reached are not recomputed yet. Without it every schedule is an answer.
        conflicts: sets of values that must not all be saved.
        outer: operators outside of the window may run, at any time. Every schedule is then an
            answer, and some answers are no schedules.
    """

    def __init__(
        self,
        index: ProblemIndex,
        budget: int,
        moments: Sequence[PeakPoint],
        positions: Iterable[int] = (),
        window: int | None = None,
        *,
        conflicts: Iterable[Sequence[int]] = (),
        outer: bool = False,
        timer: WorkTimer | None = None,
    ) -> None:
        self.outer = outer
        self.index = index
        self.problem = index.problem
        self.budget = budget
        self.moments = sorted(set(moments))
        self.window = window
        self.linear = LinearProgram(timer)
        self.times = Intervals(index, self.moments, window, outer=outer)
        self._add_variables()
        self._add_reads()
        self._add_relaxation()
        self._add_early()
        self._add_waiting()
        self._add_forward_bytes(positions)
        for values in conflicts:
            self.linear.at_most([(self.saved[v], 1.0) for v in values], len(values) - 1.0)
        for number, moment in enumerate(self.moments, 1):
            self._add_bytes(number, moment)

    def _add_variables(self) -> None:
        index, linear, problem = self.index, self.linear, self.problem
        self.saved = {v: linear.variable(integral=True) for v in index.values}
        self.runs: dict[tuple[int, int], int] = {}
        self.alive: dict[tuple[int, int], int] = {}
        self.again: dict[int, int] = {}
        for o in index.operators:
            seconds = problem.operators[o].seconds
            if o in index.may_run:
                self.again[o] = linear.variable()
                for j in range(self.times.first[o], self.times.last[o] + 1):
                    if self.times.is_allowed(o, j):
                        self.runs[o, j] = linear.variable(seconds, integral=True)
            for v in index.writes[o]:
                for m in range(self.times.first[o] + 1, self.times.last_value.get(v, -1) + 1):
                    self.alive[v, m] = linear.variable(integral=True)
        spans = {
            v: (self.times.first[problem.producers[v]], self.times.last_value[v])
            for v in index.values
            if v in self.times.last_value
        }
        self.host = HostRows.of(problem, linear, self.moments, self.saved, spans, outer=self.outer)

    def _build_alive_terms(self, v: int, number: int) -> list[tuple[int, float]]:
        if number > self.times.last_value.get(v, -1):
            return []
        variable = self.alive.get((v, number))
        return [(self.saved[v] if variable is None else variable, 1.0)]

    def _build_run_terms(self, o: int, interval: int) -> list[tuple[int, float]]:
        if self.outer:
            interval = max(interval, self.times.first[o])
        variable = self.runs.get((o, interval))
        return [] if variable is None else [(variable, 1.0)]

    def _add_reads(self) -> None:
        linear, producers = self.linear, self.problem.producers
        read = {
            (v, self.times.interval[step]): step
            for v, steps in self.index.direct_steps.items()
            for step in reversed(steps)
        }
        for (v, j), step in sorted(read.items()):
            made = [
                *self._build_run_terms(producers[v], j),
                *self.host.build_fetch_terms(v, j, step),
            ]
            linear.at_least([*self._build_alive_terms(v, j), *made], 1.0)
        for (p, j), variable in self.runs.items():
            for u in self.index.reads[p]:
                if self.outer and 0 < j == self.times.first[p]:  # u was there at some time by then
                    there = self._build_run_terms_between(producers[u], 0, j)
                    terms = [
                        *self._build_saved_terms(u),
                        *(there or self._build_run_terms(producers[u], j)),
                    ]
                else:
                    made = [
                        *self._build_run_terms(producers[u], j),
                        *self.host.build_fetch_terms(u, j, self.times.last_step[j]),
                    ]
                    terms = [*self._build_alive_terms(u, j), *made]
                linear.at_least([*terms, (variable, -1.0)], 0.0)
        for (v, m), variable in self.alive.items():
            made = [
                *self._build_run_terms(producers[v], m - 1),
                *self.host.build_fetch_terms(v, m - 1),
            ]
            linear.at_least([*self._build_alive_terms(v, m - 1), *made, (variable, -1.0)], 0.0)
        for o in self.again:
            op = self.problem.operators[o]
            if op.draws:
                linear.at_most(self._build_later_run_terms(o, 0), 1.0)

    def _build_saved_terms(self, v: int) -> list[tuple[int, float]]:
        return [(self.saved[v], 1.0), *self.host.build_offload_terms(v)]

    def _build_later_run_terms(self, o: int, interval: int) -> list[tuple[int, float]]:
        return self._build_run_terms_between(o, interval, self.times.last[o])

    def _build_run_terms_between(self, o: int, first: int, last: int) -> list[tuple[int, float]]:
        intervals = range(max(first, self.times.first[o]), min(last, self.times.last[o]) + 1)
        return [(i, 1.0) for j in intervals if (i := self.runs.get((o, j))) is not None]

    def _add_relaxation(self) -> None:
        """Rows that follow for integers, but not for fractions."""
        linear, index, producers = self.linear, self.index, self.problem.producers
        for o, again in self.again.items():
            linear.at_least([*self._build_later_run_terms(o, 0), (again, -1.0)], 0.0)
            for u in index.reads[o]:
                terms = [
                    *self._build_saved_terms(u),
                    *self._build_rerun_terms(producers[u]),
                    (again, -1.0),
                ]
                linear.at_least(terms, 0.0)
        for v in index.direct_steps:
            linear.at_least(
                [*self._build_saved_terms(v), *self._build_rerun_terms(producers[v])], 1.0
            )
        for number, moment in enumerate(self.moments, 1):
            if not moment.is_recompute:
                self._add_deferred(number)

    def _build_rerun_terms(self, o: int) -> list[tuple[int, float]]:
        return [(self.again[o], 1.0)] if o in self.again else []

    def _add_deferred(self, number: int) -> None:
        linear, index, producers = self.linear, self.index, self.problem.producers
        deferred: dict[int, list[tuple[int, float]]] = {}
        near: set[int] = set()
        for o in index.operators:
            if self.times.last[o] < number or o not in self.again:
                continue
            if number <= self.times.first[o]:
                deferred[o] = self._build_rerun_terms(o)
            else:
                near.add(o)
                variable = linear.variable()
                deferred[o] = [(variable, 1.0)]
                linear.at_least([*self._build_later_run_terms(o, number), (variable, -1.0)], 0.0)
        for o in index.operators:
            if self.times.first[o] < number:
                for v in index.writes[o]:
                    if self.times.last_direct.get(v, -1) >= number:
                        later = [*deferred.get(o, ()), *self.host.build_fetch_terms_from(v, number)]
                        linear.at_least([*self._build_alive_terms(v, number), *later], 1.0)
        for p in sorted(near):
            for u in index.reads[p]:
                if self.outer and number <= self.times.first[producers[u]]:
                    continue
                ((variable, _),) = deferred[p]
                later = [
                    *deferred.get(producers[u], ()),
                    *self.host.build_fetch_terms_from(u, number),
                ]
                linear.at_least(
                    [*self._build_alive_terms(u, number), *later, (variable, -1.0)], 0.0
                )

    def _add_early(self) -> None:
        """Operators of either pass may run forward, once, and need not run backward then."""
        problem, linear = self.problem, self.linear
        late = [o for o in self.index.operators if problem.operators[o].part is Part.EITHER_PASS]
        early: dict[int, int] = {}
        for o in late:
            op = problem.operators[o]
            early[o] = linear.variable(op.seconds)
            linear.offset -= op.seconds
            for v in self.index.writes[o]:
                for kept, _ in self._build_saved_terms(v):
                    linear.at_least([(early[o], 1.0), (kept, -1.0)], 0.0)
            for u in self.index.reads[o]:
                if problem.producers[u] in early:
                    linear.at_least([(early[problem.producers[u]], 1.0), (early[o], -1.0)], 0.0)
            if not op.repeatable:
                linear.at_most([(early[o], 1.0), *self._build_later_run_terms(o, 0)], 1.0)
        self.early = early

    def _add_waiting(self) -> None:
        problem = self.problem
        seconds = [op.seconds for op in problem.operators]
        early = [(variable, seconds[o]) for o, variable in self.early.items()]
        again = [(variable, seconds[o]) for (o, _), variable in self.runs.items()]
        passes = (
            (problem.seconds_of(problem.forward), early),
            (problem.seconds_of(problem.backward), again),
        )
        self.host.add_waiting(problem, self.linear, passes)

    def _add_forward_bytes(self, positions: Iterable[int]) -> None:
        problem, index = self.problem, self.index
        forward = index.forward_bytes
        end = [(self.saved[v], problem.nbytes[v]) for v in index.values if v not in problem.written]
        self.linear.at_most(end, self.budget - forward.at_end)
        for position in positions:
            terms = [
                (self.saved[v], problem.nbytes[v])
                for v in index.values
                if forward.made.get(v, position + 1) <= position > forward.last[v]
            ]
            terms += [  # their copies are not yet done
                (variable, problem.nbytes[v])
                for v, variable in self.host.offloaded.items()
                if forward.made.get(v, position) == position - 1 and position > forward.last[v]
            ]
            self.linear.at_most(terms, self.budget - forward.live[position])

    def _add_bytes(self, number: int, moment: PeakPoint) -> None:
        nbytes, index = self.problem.nbytes, self.index
        if moment.is_recompute:
            read: tuple[int, ...] = ()
            fixed = index.backward_bytes.before[moment.step]
        else:
            read = index.direct[moment.step]
            fixed = index.backward_bytes.at[moment.step]
        terms: list[tuple[int, float]] = []
        for v in index.values:
            o = self.problem.producers[v]
            if v in read:
                continue
            if self.outer and number <= self.times.first[o] and o in self.again:
                if self.times.last_direct.get(v, -1) >= number:  # alive, or recomputed
                    fixed += nbytes[v]
                    terms.append((self.again[o], -nbytes[v]))
                    terms += [
                        (variable, -nbytes[v]) for variable, _ in self.host.build_offload_terms(v)
                    ]
            else:
                terms += [
                    (variable, nbytes[v]) for variable, _ in self._build_alive_terms(v, number)
                ]
        if moment.is_recompute:
            run = self._build_run_terms(moment.operator, number - 1)
            inside = self.problem.operators[moment.operator].nbytes_inside
            terms += [(variable, float(inside)) for variable, _ in run]
            for v in self.times.busy(moment):
                running = [(variable, -1.0) for variable, _ in run]
                self.linear.at_least([*self._build_alive_terms(v, number), *running], 0.0)
        self.linear.at_most(terms, self.budget - fixed)

    def ranks(self) -> Floats:
        """Where in the forward pass each variable belongs, from 0 to 1."""
        producers, rank = self.problem.producers, self.index.rank
        found = np.zeros(self.linear.num_variables)
        for v, i in (*self.saved.items(), *self.host.offloaded.items()):
            found[i] = rank[producers[v]]
        for (v, _), i in self.alive.items():
            found[i] = rank[producers[v]]
        for (o, _), i in self.runs.items():
            found[i] = rank[o]
        return found / max(len(rank), 1)

    def places(self) -> Floats:
        """Where in the backward pass each variable belongs, from 0 to 1; -1 for what is saved."""
        found = np.full(self.linear.num_variables, -1.0)
        for (_, m), i in self.alive.items():
            found[i] = self.moments[m - 1].step / len(self.index.direct)
        for (_, j), i in self.runs.items():
            found[i] = self.times.last_step[j] / len(self.index.direct)
        return found

    def variables_of(self, replay: Replay) -> Floats | None:
        """The integers that describe a schedule; `None` if something runs that may not yet."""
        x = np.zeros(self.linear.num_variables)
        x[[self.saved[v] for v in replay.schedule.saved if v in self.saved]] = 1.0
        since = dict.fromkeys(replay.schedule.saved, 0)  # the interval since which a value is there
        away = set(replay.schedule.offloaded)
        x[[self.host.offloaded[v] for v in away]] = 1.0
        for o, step in zip(replay.schedule.backward, replay.steps, strict=True):
            runs_again = o in self.index.rank
            interval = bisect_left(
                self.moments, PeakPoint(step, o) if runs_again else PeakPoint(step)
            )
            reads = self.index.reads[o] if runs_again else self.index.direct[step]
            for v in away.intersection(reads):
                since[v] = bisect_left(self.moments, PeakPoint(step - 1))
                if (v, since[v]) not in self.host.loads:
                    return None
            away.difference_update(reads)
            for v in reads:
                for m in range(since.get(v, 0) + 1, interval + 1):
                    if (v, m) in self.alive:
                        x[self.alive[v, m]] = 1.0
            if runs_again:
                if (o, interval) not in self.runs:
                    return None
                x[self.runs[o, interval]] = 1.0
                since.update((v, interval) for v in self.index.writes[o])
                moment = self.moments[interval] if interval < len(self.moments) else None
                if moment == PeakPoint(step, o):
                    for v in self.times.busy(moment):
                        if (v, interval + 1) in self.alive:
                            x[self.alive[v, interval + 1]] = 1.0
        return x

    def decisions(self, x: Floats, threshold: float = 0.5) -> Decisions:
        saved = frozenset(v for v, i in self.saved.items() if x[i] > threshold)
        offloaded = frozenset(
            v
            for v, i in self.host.offloaded.items()
            if x[i] + x[self.saved[v]] > threshold and v not in saved
        )
        gone: dict[int, set[int]] = {}
        for (v, m), i in self.alive.items():
            moment = self.moments[m - 1]
            if x[i] <= threshold and not moment.is_recompute:
                gone.setdefault(moment.step, set()).add(v)
        early: dict[int, set[int]] = {}
        for (o, j), i in self.runs.items():
            if x[i] > threshold and j < len(self.moments):
                early.setdefault(self.moments[j].step, set()).add(o)
        return Decisions(
            saved,
            {step: frozenset(values) for step, values in sorted(gone.items())},
            {step: frozenset(operators) for step, operators in sorted(early.items())},
            offloaded,
        )
