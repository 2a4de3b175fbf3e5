"""Checkmate's program: the optimum over whole schedules, as an oracle for small problems.

After Jain et al., Checkmate (MLSys 2020): a stage for each operator of the backward pass, in their
order. In stage t, before its own operator runs,

    R[t, o]   operator o, which needs no cotangent, is computed (again)      0 or 1
    S[t, v]   value v is in memory when the stage begins; S[0, v]: it is saved
    D[t, v, j] v is alive in stage t after its reader j                       ("FREE" in the paper)
    E[o]      o, which only the backward pass needs, runs in the forward pass

    least     sum of seconds_o R[t, o] + seconds_o E[o]
    so that   S[t+1, v] <= S[t, v] + R[t, maker of v]         alive if it was, or is made
              R[t, o]   <= S[t, u] + R[t, maker of u]         o reads u
              1         <= S[t, v] + R[t, maker of v]         the operator of stage t reads v
              D[t, v, j] >= R[t, reader i], S[t+1, v]         i > j: a later reader, the next stage
              bytes alive while each operator of each stage runs <= budget

The forward pass runs nothing twice. Values are alive as `costs_of` of the planner counts them. Only
R and E are binary: the least S and D are then integers without a constraint.

Operators run in their order within a stage, each at most once; that is Checkmate's class too.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from torchremat.planning.problem.forward_order import ForwardOrder
from torchremat.planning.problem.problem import Part, Problem, Schedule


@dataclass(frozen=True)
class Optimum:
    """The result of the program.

    Attributes:
        schedule: the best schedule found; `None` if there is none, or none was found in time.
        added_seconds: the time that it adds.
        bound: no schedule of the class adds less.
        is_proved: whether the search came to its end.
        is_prompt_optimum: whether it did among schedules that compute nothing for a later stage.
        seconds: that the search took.
    """

    schedule: Schedule | None
    added_seconds: float
    bound: float
    is_proved: bool
    seconds: float
    is_prompt_optimum: bool = False


def checkmate(problem: Problem, budget: int, *, seconds: float, gap: float = 1e-4) -> Optimum:
    """The schedule of least added time within `budget`, found in `seconds` or not at all.

    First of the schedules that compute nothing for a later stage, which are far fewer; then, with
    what that found as a limit, of all. Only the second proves a bound.
    """
    first = _Program(problem, budget, is_prompt=True).solve(seconds / 2, gap)
    program = _Program(problem, budget, is_prompt=False)
    if first.schedule is not None:
        program.limit(first.added_seconds)
    every = program.solve(seconds - first.seconds, gap)
    took = first.seconds + every.seconds
    if every.schedule is None and first.schedule is not None:
        # under the limit nothing was found: if there is nothing, what was is the optimum
        bound = min(every.bound, first.added_seconds)
        return replace(
            first,
            bound=bound,
            is_proved=every.is_proved,
            seconds=took,
            is_prompt_optimum=first.is_proved,
        )
    return replace(every, seconds=took, is_prompt_optimum=first.is_proved)


@dataclass
class _Rows:
    """Linear constraints, added one by one, and the variables that they are about."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    binary: list[int] = field(default_factory=list)
    entries: tuple[list[int], list[int], list[float]] = field(default_factory=lambda: ([], [], []))
    bounds: list[float] = field(default_factory=list)

    def variable(self, *, cost: float = 0.0, upper: float = 1.0, binary: bool = False) -> int:
        self.cost.append(cost)
        self.lower.append(0.0)
        self.upper.append(upper)
        self.binary.append(int(binary))
        return len(self.cost) - 1

    def at_most(self, terms: Iterable[tuple[int, float]], bound: float) -> None:
        """`sum of factor x variable <= bound`."""
        rows, columns, factors = self.entries
        for variable, factor in terms:
            rows.append(len(self.bounds))
            columns.append(variable)
            factors.append(factor)
        self.bounds.append(bound)

    def no_more(self, small: int, large: Iterable[int], bound: float = 0.0) -> None:
        """`small <= sum of large + bound`."""
        self.at_most([(small, 1.0), *((i, -1.0) for i in large)], bound)


class _Program:
    """The program; `is_prompt` if nothing is computed but for the operator of its stage."""

    def __init__(self, problem: Problem, budget: int, *, is_prompt: bool) -> None:
        self.problem = problem
        self.budget = budget
        self.is_prompt = is_prompt
        self.rows = _Rows()
        self.scale = max((op.seconds for op in problem.operators), default=1.0) or 1.0
        self.unit = float(max(problem.nbytes, default=1)) or 1.0
        self.early = {
            o: self.rows.variable(cost=problem.operators[o].seconds / self.scale, binary=True)
            for o in self.again
            if problem.operators[o].part is Part.EITHER_PASS
        }
        self.stages = [self._variables(t) for t in range(len(problem.backward) + 1)]
        self._forward()
        for t in range(len(problem.backward)):
            self._stage(t)
        self._once()

    # --- what there is ---------------------------------------------------------------------------

    @cached_property
    def again(self) -> tuple[int, ...]:
        """Operators that may run in the backward pass though they need no cotangent, in order."""
        problem = self.problem
        wanted = set(problem.needed)
        found = []
        for o in range(len(problem.operators) - 1, -1, -1):
            op = problem.operators[o]
            if op.part is not Part.BACKWARD and wanted.intersection(op.writes):
                found.append(o)
                wanted.update(op.reads)
        return tuple(reversed(found))

    @cached_property
    def values(self) -> tuple[int, ...]:
        """The values that these operators make, without outputs, which stay in memory anyway."""
        operators = self.problem.operators
        made = {v for o in self.again for v in operators[o].writes}
        return tuple(sorted(made - self.problem.outputs))

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """For each value those of `again` that read it, in order."""
        operators = self.problem.operators
        return {v: tuple(o for o in self.again if v in operators[o].reads) for v in self.values}

    def _variables(self, t: int) -> tuple[dict[int, int], dict[int, int]]:
        """R and S of a stage; of the last, which is none, nothing is in memory."""
        problem = self.problem
        last = t == len(problem.backward)
        runs, there = {}, {}
        for o in () if last else self.again:
            op = problem.operators[o]
            allowed = op.repeatable or op.part is Part.EITHER_PASS
            runs[o] = self.rows.variable(
                cost=op.seconds / self.scale, upper=float(allowed), binary=True
            )
        for v in self.values:
            there[v] = self.rows.variable(upper=0.0 if last else 1.0)
        return runs, there

    # --- the forward pass ------------------------------------------------------------------------

    def _forward(self) -> None:
        """Rows for what is alive in the forward pass; what is saved is made there."""
        problem, rows = self.problem, self.rows
        order = ForwardOrder(problem).order(
            [v for o in self.early for v in problem.operators[o].writes]
        )
        place = {o: i for i, o in enumerate(order)}
        saved = self.stages[0][1]
        for o, e in self.early.items():
            for v in set(problem.operators[o].writes) & set(saved):
                rows.no_more(saved[v], [e])
            for u in problem.operators[o].reads:
                if problem.producers[u] in self.early:
                    rows.no_more(e, [self.early[problem.producers[u]]])
        terms: list[list[tuple[int, float]]] = [[] for _ in order]
        fixed = [problem.constant / self.unit] * len(order)
        for o in order:
            op = problem.operators[o]
            for v in op.writes:
                self._alive_forward(v, place, fixed, terms)
            if op.nbytes_inside:
                if o in self.early:
                    terms[place[o]].append((self.early[o], op.nbytes_inside / self.unit))
                else:
                    fixed[place[o]] += op.nbytes_inside / self.unit
        for i in range(len(order)):
            rows.at_most(terms[i], self.budget / self.unit - fixed[i])

    def _alive_forward(self, v, place, fixed, terms) -> None:
        """Add the bytes of `v` where it is alive."""
        problem, rows = self.problem, self.rows
        size = problem.nbytes[v] / self.unit
        made = place[problem.producers[v]]
        readers = [o for o in place if v in problem.operators[o].reads]
        if v in problem.outputs:
            for i in range(made, len(fixed)):
                fixed[i] += size
            return
        certain = made - 1 if problem.producers[v] in self.early else made
        certain = max([certain, *(place[o] for o in readers if o not in self.early)])
        if v in problem.written:
            certain = len(fixed) - 1
        for i in range(made, certain + 1):
            fixed[i] += size
        saved = self.stages[0][1].get(v)
        later = sorted(place[o] for o in readers if o in self.early)
        by_place = {place[o]: e for o, e in self.early.items()}
        hold, of = None, None
        for i in range(certain + 1, len(fixed)):
            wanting = [by_place[p] for p in later if p >= i]
            if i == made and problem.producers[v] in self.early:
                wanting.append(self.early[problem.producers[v]])
            if wanting != of:
                hold, of = rows.variable(), wanting
                for e in wanting:
                    rows.no_more(e, [hold])
                if saved is not None:
                    rows.no_more(saved, [hold])
            terms[i].append((hold, size))

    # --- a stage of the backward pass ------------------------------------------------------------

    def _stage(self, t: int) -> None:
        problem, rows = self.problem, self.rows
        runs, there = self.stages[t]
        after = self.stages[t + 1][1]
        own = problem.operators[problem.backward[t]]
        for v in self.values:
            rows.no_more(after[v], [there[v], runs[problem.producers[v]]])
        for o in self.again:
            for u in problem.operators[o].reads:
                if u in there:
                    rows.no_more(runs[o], [there[u], runs[problem.producers[u]]])
        for v in set(own.reads) & set(there):
            rows.at_most([(there[v], -1.0), (runs[problem.producers[v]], -1.0)], -1.0)
        self._useful(t)
        held = self._held(t)
        terms: dict[int, list[tuple[int, float]]] = {o: [] for o in self.again}
        last: list[tuple[int, float]] = []
        fixed = {o: held / self.unit for o in self.again}
        for o in self.again:
            inside = problem.operators[o].nbytes_inside / self.unit
            if inside:
                terms[o].append((runs[o], inside))
        end = self._own_nbytes(t) / self.unit
        for v in self.values:
            end += self._alive_in(t, v, terms, fixed, last)
        for o in self.again:
            for v in set(problem.operators[o].writes) & problem.outputs:
                terms[o].append((runs[o], problem.nbytes[v] / self.unit))
            rows.at_most(terms[o], self.budget / self.unit - fixed[o])
        rows.at_most(last, self.budget / self.unit - end)

    def _useful(self, t: int) -> None:
        """Bar values without a reader: this cuts off no optimum, and helps the search."""
        problem, rows = self.problem, self.rows
        runs, there = self.stages[t]
        after = self.stages[t + 1][1]
        own = set(problem.operators[problem.backward[t]].reads)
        for v in self.values:
            if v not in own:
                rows.no_more(there[v], [after[v], *(runs[r] for r in self.readers[v])])
        for o in self.again:
            writes = [v for v in problem.operators[o].writes if v in there]
            if len(problem.operators[o].writes) == 1 and writes:
                rows.at_most([(runs[o], 1.0), (there[writes[0]], 1.0)], 1.0)
            users = [runs[r] for v in writes for r in self.readers[v]]
            if not self.is_prompt:
                users += [after[v] for v in writes]
            if not own.intersection(writes):
                rows.no_more(runs[o], users)

    def _alive_in(self, t, v, terms, fixed, last) -> float:
        """Add the bytes of `v` in stage `t`; what is certain while its own operator runs."""
        problem, rows = self.problem, self.rows
        runs, there = self.stages[t]
        after = self.stages[t + 1][1]
        own = problem.operators[problem.backward[t]]
        size = problem.nbytes[v] / self.unit
        maker, readers = problem.producers[v], self.readers[v]
        read_last = v in own.reads
        for o in self.again:  # before it is recomputed
            if o < maker:
                terms[o].append((there[v], size))
        if len(problem.operators[maker].writes) == 1:
            terms[maker] += [(there[v], size), (runs[maker], size)]
        else:
            either = rows.variable()
            rows.no_more(there[v], [either])
            rows.no_more(runs[maker], [either])
            terms[maker].append((either, size))
        hold = None  # after the readers before: must it stay in memory?
        for j, first in enumerate([maker, *readers]):
            here = [o for o in self.again if first < o]
            if j < len(readers):
                here = [o for o in here if o <= readers[j]]
            if read_last:
                for o in here:
                    fixed[o] += size
                continue
            hold = rows.variable() if j < len(readers) else after[v]
            for reader in readers[j:]:
                rows.no_more(runs[reader], [hold])
            if j < len(readers):
                rows.no_more(after[v], [hold])
            for o in here:
                terms[o].append((hold, size))
        if read_last:
            return size
        last.append((after[v], size))
        return 0.0

    @cached_property
    def _late_reads(self) -> list[set[int]]:
        """For each stage, the values that need cotangents and are read in it or later."""
        problem = self.problem
        found: list[set[int]] = []
        wanted: set[int] = set()
        for o in reversed(problem.backward):
            op = problem.operators[o]
            wanted = (wanted - set(op.writes)) | (set(op.reads) - problem.known)
            found.append(wanted - problem.gradients)
        return found[::-1]

    def _held(self, t: int) -> int:
        """The bytes that no decision changes, before the operator of stage `t` runs."""
        problem = self.problem
        made = {v for o in problem.backward[:t] for v in problem.operators[o].writes}
        held = problem.outputs | (made & problem.gradients) | self._late_reads[t]
        total = problem.constant + problem.backward_constant
        return total + sum(problem.nbytes[v] for v in held)

    def _own_nbytes(self, t: int) -> int:
        """The bytes that no decision changes, while it runs."""
        op = self.problem.operators[self.problem.backward[t]]
        return self._held(t) + op.nbytes_inside + sum(self.problem.nbytes[v] for v in op.writes)

    def _once(self) -> None:
        for o in self.again:
            if not self.problem.operators[o].repeatable and o in self.early:
                runs = [(runs[o], 1.0) for runs, _ in self.stages[:-1]]
                self.rows.at_most([*runs, (self.early[o], 1.0)], 1.0)

    def limit(self, seconds: float) -> None:
        """Look only for schedules that add no more than `seconds`."""
        must = self.problem.seconds_of(self.early)
        bound = (seconds + must) / self.scale * (1 + 1e-9)
        self.rows.at_most([(i, c) for i, c in enumerate(self.rows.cost) if c], bound)

    # --- the answer ------------------------------------------------------------------------------

    def solve(self, seconds: float, gap: float) -> Optimum:
        rows = self.rows
        rows.variable()  # there may be nothing to decide
        r, c, factors = rows.entries
        matrix = sparse.csr_matrix((factors, (r, c)), shape=(len(rows.bounds), len(rows.cost)))
        started = time.perf_counter()
        result = milp(
            np.array(rows.cost),
            constraints=LinearConstraint(matrix, ub=np.array(rows.bounds) + 1e-9),
            bounds=Bounds(np.array(rows.lower), np.array(rows.upper)),
            integrality=np.array(rows.binary),
            options={"time_limit": seconds, "mip_rel_gap": gap},
        )
        took = time.perf_counter() - started
        must = self.problem.seconds_of(self.early)
        bound = getattr(result, "mip_dual_bound", None)
        bound = -must if bound is None else bound * self.scale - must
        if result.x is None:
            proved = result.status == 2
            return Optimum(None, np.inf, np.inf if proved else max(bound, 0.0), proved, took)
        added = float(result.fun) * self.scale - must
        return Optimum(
            self._schedule(result.x), max(added, 0.0), max(bound, 0.0), result.status == 0, took
        )

    def _schedule(self, x: np.ndarray) -> Schedule:
        problem = self.problem
        order: list[int] = []
        for t, o in enumerate(problem.backward):
            order += [a for a, i in self.stages[t][0].items() if x[i] > 0.5]
            order.append(o)
        there, saved = set(problem.outputs), set(problem.outputs & problem.known)
        for o in order:  # where memory is to spare, S may be more than is wanted
            saved.update(v for v in problem.operators[o].reads if v not in there)
            there.update(problem.operators[o].reads, problem.operators[o].writes)
        return Schedule(tuple(sorted(saved)), ForwardOrder(problem).order(saved), tuple(order))
