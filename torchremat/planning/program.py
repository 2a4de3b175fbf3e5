"""The integer program: what is saved, and what is computed again when in the backward pass.

Some moments of the backward pass cut it into intervals. Variables, for each known value v, the
operator o that makes it, each moment m and the interval j before it:

    s_v      v is saved                        i_oj     o runs in interval j
    a_vm     v is kept beyond moment m         f_o      o runs forward though it need not

    least    sum of seconds_o i_oj  (+ seconds_o (f_o - 1) for what only the backward pass needs)
    so that  a_vm          <= a_v(m-1) + i_oj      it was kept, or computed since (a_v0 = s_v)
             1             <= a_v(m-1) + i_oj      an operator of the pass reads v in interval j
             i_pj          <= a_u(m-1) + i_oj      p, that reads u, which o makes
             s_v           <= f_o
             bytes at m    <= budget

This is Checkmate (Jain et al., MLSys 2020) with intervals for its steps. As every schedule obeys
it, what it proves to be least is a bound; with all moments that matter its answers are schedules.
The relaxation is made tight by r_o, that o runs at all, and d_om, that it runs after m:

             s_v + r_o >= 1      r_p <= s_u + r_o      sum of i_oj         >= r_o
             a_vm + d_om >= 1    d_pm <= a_um + d_om   sum of later i_oj   >= d_om

With a link to a host values may be offloaded instead of saved, see `host_rows`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from torchremat.planning.host_rows import HostRows
from torchremat.planning.linear import Floats, LinearProgram
from torchremat.planning.moments import Moment
from torchremat.planning.ordering import Decisions, Replay
from torchremat.planning.peak_rows import BackwardBytes, ForwardBytes
from torchremat.planning.problem import Part, Problem


class Facts:
    """What the programs of a problem have in common."""

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
            if problem.operators[o].repeatable or problem.operators[o].part is Part.KNOWN
        }

    @cached_property
    def direct_steps(self) -> dict[int, list[int]]:
        """The steps that read each value themselves."""
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


class SavingProgram:
    """The program of a problem under a budget, with rows for bytes at some moments.

    Args:
        facts: of the problem.
        budget: bytes.
        moments: those of the backward pass.
        positions: those of the forward pass.
        window: operators of the forward pass that lie further than this before what the backward
            pass has reached are not computed again yet. Without it every schedule is an answer.
        conflicts: values of which not all are to be saved.
        outer: they may be, and nothing is known of when: every schedule is an answer, and some
            answers are no schedules.
    """

    def __init__(
        self,
        facts: Facts,
        budget: int,
        moments: Sequence[Moment],
        positions: Iterable[int] = (),
        window: int | None = None,
        *,
        conflicts: Iterable[Sequence[int]] = (),
        outer: bool = False,
    ) -> None:
        self.outer = outer
        self.facts = facts
        self.problem = facts.problem
        self.budget = budget
        self.moments = sorted(set(moments))
        self.window = window
        self.linear = LinearProgram()
        self._find_intervals()
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

    # --- when each operator may run ------------------------------------------------------------

    def _find_intervals(self) -> None:
        facts = self.facts
        self.interval = [
            bisect_left(self.moments, Moment(step)) for step in range(len(facts.direct))
        ]
        self.last_step = [*(m.step for m in self.moments), len(facts.direct) - 1]
        self.last_direct: dict[int, int] = {}
        first_direct: dict[int, int] = {}
        for v, steps in facts.direct_steps.items():
            self.last_direct[v] = self.interval[steps[-1]]
            first_direct[v] = self.interval[steps[0]]
        self.last_value = dict(self.last_direct)
        self.last: dict[int, int] = {}
        for o in reversed(facts.operators):
            self.last[o] = max(self.last_value.get(v, -1) for v in facts.writes[o])
            for u in facts.reads[o]:
                self.last_value[u] = max(self.last_value.get(u, -1), self.last[o])
        for number, moment in enumerate(self.moments, 1):
            if moment.is_burst:  # what is read then is alive, though it may be for the last time
                for v in self._busy(moment):
                    self.last_value[v] = max(self.last_value.get(v, -1), number)
        self.first = self._first_intervals(first_direct)

    def _busy(self, moment: Moment) -> tuple[int, ...]:
        return (*self.facts.reads[moment.operator], *self.facts.writes[moment.operator])

    def _first_intervals(self, first_direct: dict[int, int]) -> dict[int, int]:
        facts, window = self.facts, self.window
        if window is None:
            return dict.fromkeys(facts.operators, 0)
        reached = [facts.front[m.step] - window for m in self.moments]  # it only falls
        falling = [-rank for rank in reached]
        first = {}
        for o in facts.operators:
            near = bisect_left(falling, -facts.rank[o])
            first[o] = min([near, *(first_direct.get(v, near) for v in facts.writes[o])])
        producers = self.problem.producers
        for p in reversed(facts.operators):
            for u in facts.reads[p]:
                o = producers[u]
                if facts.rank[p] - facts.rank[o] > window:
                    first[o] = min(first[o], first[p])
        if self.outer:  # the one before stands for all earlier ones
            return {o: max(j - 1, 0) for o, j in first.items()}
        return first

    def _allowed(self, o: int, interval: int) -> bool:
        """Whether `o` may run in the interval; between moments of one step they say in which."""
        before = self.moments[interval - 1] if interval else Moment(-1)
        if interval < len(self.moments):
            after = self.moments[interval]
            if after.is_burst and before.step >= after.step - 1 and o > after.operator:
                return False
            if before.is_burst and after.step == before.step and o <= before.operator:
                return False
        return True

    # --- variables -----------------------------------------------------------------------------

    def _add_variables(self) -> None:
        facts, linear, problem = self.facts, self.linear, self.problem
        self.saved = {v: linear.variable(integral=True) for v in facts.values}
        self.runs: dict[tuple[int, int], int] = {}
        self.kept: dict[tuple[int, int], int] = {}
        self.again: dict[int, int] = {}
        for o in facts.operators:
            seconds = problem.operators[o].seconds
            if o in facts.may_run:
                self.again[o] = linear.variable()
                for j in range(self.first[o], self.last[o] + 1):
                    if self._allowed(o, j):
                        self.runs[o, j] = linear.variable(seconds, integral=True)
            for v in facts.writes[o]:
                for m in range(self.first[o] + 1, self.last_value.get(v, -1) + 1):
                    self.kept[v, m] = linear.variable(integral=True)
        spans = {
            v: (self.first[problem.producers[v]], self.last_value[v])
            for v in facts.values
            if v in self.last_value
        }
        self.host = HostRows.of(problem, linear, self.moments, self.saved, spans, outer=self.outer)

    def _alive(self, v: int, number: int) -> list[tuple[int, float]]:
        """Whether `v` is kept beyond a moment, as terms."""
        if number > self.last_value.get(v, -1):
            return []
        variable = self.kept.get((v, number))
        return [(self.saved[v] if variable is None else variable, 1.0)]

    def _run(self, o: int, interval: int) -> list[tuple[int, float]]:
        if self.outer:
            interval = max(interval, self.first[o])
        variable = self.runs.get((o, interval))
        return [] if variable is None else [(variable, 1.0)]

    # --- rows ----------------------------------------------------------------------------------

    def _add_reads(self) -> None:
        linear, producers = self.linear, self.problem.producers
        read = {
            (v, self.interval[step]): step
            for v, steps in self.facts.direct_steps.items()
            for step in reversed(steps)
        }
        for (v, j), step in sorted(read.items()):
            made = [*self._run(producers[v], j), *self.host.fetched(v, j, step)]
            linear.at_least([*self._alive(v, j), *made], 1.0)
        for (p, j), variable in self.runs.items():
            for u in self.facts.reads[p]:
                if self.outer and 0 < j == self.first[p]:  # u was there at some time by then
                    there = self._runs_between(producers[u], 0, j)
                    terms = [*self._saved(u), *(there or self._run(producers[u], j))]
                else:
                    made = [
                        *self._run(producers[u], j),
                        *self.host.fetched(u, j, self.last_step[j]),
                    ]
                    terms = [*self._alive(u, j), *made]
                linear.at_least([*terms, (variable, -1.0)], 0.0)
        for (v, m), variable in self.kept.items():
            made = [*self._run(producers[v], m - 1), *self.host.fetched(v, m - 1)]
            linear.at_least([*self._alive(v, m - 1), *made, (variable, -1.0)], 0.0)
        for o in self.again:
            op = self.problem.operators[o]
            if op.draws:
                linear.at_most(self._later_runs(o, 0), 1.0)

    def _saved(self, v: int) -> list[tuple[int, float]]:
        """Whether `v` is saved, or offloaded, as terms."""
        return [(self.saved[v], 1.0), *self.host.kept(v)]

    def _later_runs(self, o: int, interval: int) -> list[tuple[int, float]]:
        return self._runs_between(o, interval, self.last[o])

    def _runs_between(self, o: int, first: int, last: int) -> list[tuple[int, float]]:
        intervals = range(max(first, self.first[o]), min(last, self.last[o]) + 1)
        return [(i, 1.0) for j in intervals if (i := self.runs.get((o, j))) is not None]

    def _add_relaxation(self) -> None:
        """Rows that follow for integers, but not for fractions."""
        linear, facts, producers = self.linear, self.facts, self.problem.producers
        for o, again in self.again.items():
            linear.at_least([*self._later_runs(o, 0), (again, -1.0)], 0.0)
            for u in facts.reads[o]:
                terms = [*self._saved(u), *self._again(producers[u]), (again, -1.0)]
                linear.at_least(terms, 0.0)
        for v in facts.direct_steps:
            linear.at_least([*self._saved(v), *self._again(producers[v])], 1.0)
        for number, moment in enumerate(self.moments, 1):
            if not moment.is_burst:
                self._add_deferred(number)

    def _again(self, o: int) -> list[tuple[int, float]]:
        return [(self.again[o], 1.0)] if o in self.again else []

    def _add_deferred(self, number: int) -> None:
        linear, facts, producers = self.linear, self.facts, self.problem.producers
        deferred: dict[int, list[tuple[int, float]]] = {}
        near: set[int] = set()
        for o in facts.operators:
            if self.last[o] < number or o not in self.again:
                continue
            if number <= self.first[o]:
                deferred[o] = self._again(o)
            else:
                near.add(o)
                variable = linear.variable()
                deferred[o] = [(variable, 1.0)]
                linear.at_least([*self._later_runs(o, number), (variable, -1.0)], 0.0)
        for o in facts.operators:
            if self.first[o] < number:
                for v in facts.writes[o]:
                    if self.last_direct.get(v, -1) >= number:
                        later = [*deferred.get(o, ()), *self.host.fetched_from(v, number)]
                        linear.at_least([*self._alive(v, number), *later], 1.0)
        for p in sorted(near):
            for u in facts.reads[p]:
                if self.outer and number <= self.first[producers[u]]:
                    continue
                ((variable, _),) = deferred[p]
                later = [*deferred.get(producers[u], ()), *self.host.fetched_from(u, number)]
                linear.at_least([*self._alive(u, number), *later, (variable, -1.0)], 0.0)

    def _add_early(self) -> None:
        """What only the backward pass needs may run forward, once, and need not run backward."""
        problem, linear = self.problem, self.linear
        late = [o for o in self.facts.operators if problem.operators[o].part is Part.KNOWN]
        early: dict[int, int] = {}
        for o in late:
            op = problem.operators[o]
            early[o] = linear.variable(op.seconds)
            linear.offset -= op.seconds
            for v in self.facts.writes[o]:
                for kept, _ in self._saved(v):
                    linear.at_least([(early[o], 1.0), (kept, -1.0)], 0.0)
            for u in self.facts.reads[o]:
                if problem.producers[u] in early:
                    linear.at_least([(early[problem.producers[u]], 1.0), (early[o], -1.0)], 0.0)
            if not op.repeatable:
                linear.at_most([(early[o], 1.0), *self._later_runs(o, 0)], 1.0)
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
        problem, facts = self.problem, self.facts
        forward = facts.forward_bytes
        end = [(self.saved[v], problem.nbytes[v]) for v in facts.values if v not in problem.written]
        self.linear.at_most(end, self.budget - forward.at_end)
        for position in positions:
            terms = [
                (self.saved[v], problem.nbytes[v])
                for v in facts.values
                if forward.made.get(v, position + 1) <= position > forward.last[v]
            ]
            terms += [  # their copies are not yet done
                (variable, problem.nbytes[v])
                for v, variable in self.host.offloaded.items()
                if forward.made.get(v, position) == position - 1 and position > forward.last[v]
            ]
            self.linear.at_most(terms, self.budget - forward.live[position])

    def _add_bytes(self, number: int, moment: Moment) -> None:
        nbytes, facts = self.problem.nbytes, self.facts
        if moment.is_burst:
            read: tuple[int, ...] = ()
            held = facts.backward_bytes.before[moment.step]
        else:
            read = facts.direct[moment.step]
            held = facts.backward_bytes.at[moment.step]
        terms: list[tuple[int, float]] = []
        for v in facts.values:
            o = self.problem.producers[v]
            if v in read:
                continue
            if self.outer and number <= self.first[o] and o in self.again:
                if self.last_direct.get(v, -1) >= number:  # alive, or computed again
                    held += nbytes[v]
                    terms.append((self.again[o], -nbytes[v]))
                    terms += [(variable, -nbytes[v]) for variable, _ in self.host.kept(v)]
            else:
                terms += [(variable, nbytes[v]) for variable, _ in self._alive(v, number)]
        if moment.is_burst:
            run = self._run(moment.operator, number - 1)
            inside = self.problem.operators[moment.operator].nbytes_inside
            terms += [(variable, float(inside)) for variable, _ in run]
            for v in self._busy(moment):
                running = [(variable, -1.0) for variable, _ in run]
                self.linear.at_least([*self._alive(v, number), *running], 0.0)
        self.linear.at_most(terms, self.budget - held)

    def ranks(self) -> Floats:
        """Where in the forward pass each variable belongs, from 0 to 1."""
        producers, rank = self.problem.producers, self.facts.rank
        found = np.zeros(self.linear.num_variables)
        for v, i in (*self.saved.items(), *self.host.offloaded.items()):
            found[i] = rank[producers[v]]
        for (v, _), i in self.kept.items():
            found[i] = rank[producers[v]]
        for (o, _), i in self.runs.items():
            found[i] = rank[o]
        return found / max(len(rank), 1)

    # --- answers -------------------------------------------------------------------------------

    def variables_of(self, replay: Replay) -> Floats | None:
        """The integers that describe a schedule; `None` if something runs that may not yet."""
        x = np.zeros(self.linear.num_variables)
        x[[self.saved[v] for v in replay.schedule.saved if v in self.saved]] = 1.0
        since = dict.fromkeys(replay.schedule.saved, 0)  # the interval since which a value is there
        away = set(replay.schedule.offloaded)
        x[[self.host.offloaded[v] for v in away]] = 1.0
        for o, step in zip(replay.schedule.backward, replay.steps, strict=True):
            runs_again = o in self.facts.rank
            interval = bisect_left(self.moments, Moment(step, o) if runs_again else Moment(step))
            reads = self.facts.reads[o] if runs_again else self.facts.direct[step]
            for v in away.intersection(reads):
                since[v] = bisect_left(self.moments, Moment(step - 1))
                if (v, since[v]) not in self.host.loads:
                    return None
            away.difference_update(reads)
            for v in reads:
                for m in range(since.get(v, 0) + 1, interval + 1):
                    if (v, m) in self.kept:
                        x[self.kept[v, m]] = 1.0
            if runs_again:
                if (o, interval) not in self.runs:
                    return None
                x[self.runs[o, interval]] = 1.0
                since.update((v, interval) for v in self.facts.writes[o])
                moment = self.moments[interval] if interval < len(self.moments) else None
                if moment == Moment(step, o):
                    for v in self._busy(moment):
                        if (v, interval + 1) in self.kept:
                            x[self.kept[v, interval + 1]] = 1.0
        return x

    def decisions(self, x: Floats, threshold: float = 0.5) -> Decisions:
        """What the variables `x` say."""
        saved = frozenset(v for v, i in self.saved.items() if x[i] > threshold)
        offloaded = frozenset(
            v
            for v, i in self.host.offloaded.items()
            if x[i] + x[self.saved[v]] > threshold and v not in saved
        )
        gone: dict[int, set[int]] = {}
        for (v, m), i in self.kept.items():
            moment = self.moments[m - 1]
            if x[i] <= threshold and not moment.is_burst:
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
