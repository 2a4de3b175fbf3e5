"""The integer program: what to save and what to compute again, exact in the chains between.

Variables, for each known value v and the operator o that makes it:

    s_v     v is saved                       f_o     o runs forward though it need not
    r_o     o runs in the backward pass

    least       sum of seconds_o r_o  (+ seconds_o (f_o - 1) for what only the backward needs)
    so that     s_v + r_o  >= 1       v is read by an operator of the backward pass
                s_u + r_p  >= r_o     o reads u, which p makes
                f_o        >= s_v     v is made by o, of which the forward pass has no need
    and         bytes alive at a step <= budget, for the steps that matter

Without the last it is a closure problem. Rows for bytes come one by one from what a simulation of
the last solution finds too large.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from torchremat.planning.problem import Part, Problem


@dataclass(frozen=True)
class Row:
    """`sum of coefficients x variables <= bound`."""

    coefficients: dict[int, float]
    bound: float


@dataclass(frozen=True)
class Answer:
    """What the program answers.

    Attributes:
        saved: the values that are saved, `None` if no choice fits.
        seconds: the time that is added; of the relaxation the bound.
        bound: no choice that fits adds less.
        fractions: of the relaxation, how much of each value is saved.
    """

    saved: frozenset[int] | None
    seconds: float
    bound: float
    fractions: np.ndarray = field(repr=False)


class SavingProgram:
    """The program of a problem, to which rows are added."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        known = sorted(problem.known)
        ops = [o for o, op in enumerate(problem.operators) if op.part is not Part.BACKWARD]
        late = [o for o in ops if problem.operators[o].part is Part.KNOWN]
        self.saved = {v: i for i, v in enumerate(known)}
        self.again = {o: len(known) + i for i, o in enumerate(ops)}
        self.early = {o: len(known) + len(ops) + i for i, o in enumerate(late)}
        self.num_variables = len(known) + len(ops) + len(late)
        self._rows: list[Row] = []
        self._scale = max((op.seconds for op in problem.operators), default=1.0) or 1.0
        self.cost = np.zeros(self.num_variables)
        self.lower = np.zeros(self.num_variables)
        self.upper = np.ones(self.num_variables)
        self.offset = 0.0
        self._describe()

    def _describe(self) -> None:
        problem = self.problem
        for o, i in self.again.items():
            op = problem.operators[o]
            self.cost[i] = op.seconds
            if not op.repeatable and op.part is Part.FORWARD:
                self.upper[i] = 0
        for o, i in self.early.items():
            self.cost[i] = problem.operators[o].seconds
            self.offset -= problem.operators[o].seconds
        for v in problem.outputs & problem.known:
            self.lower[self.saved[v]] = 1
        for v in sorted(problem.needed):
            self.require({self.saved[v]: 1, self.again[problem.producers[v]]: 1}, 1)
        for o, i in self.again.items():
            for u in problem.operators[o].reads:
                self.require(
                    {self.saved[u]: 1, self.again[problem.producers[u]]: 1, i: -1}, 0
                )
        for o, i in self.early.items():
            op = problem.operators[o]
            for v in op.writes:
                self.require({i: 1, self.saved[v]: -1}, 0)
            for u in op.reads:
                p = problem.producers[u]
                if p in self.early:
                    self.require({self.early[p]: 1, i: -1}, 0)

    def require(self, coefficients: dict[int, float], least: float) -> None:
        """Add `sum of coefficients x variables >= least`."""
        self.add(Row({i: -c for i, c in coefficients.items()}, -least))

    def add(self, row: Row) -> None:
        """Add a row."""
        self._rows.append(row)

    def add_variable(self) -> int:
        """A further variable between 0 and 1, of no cost."""
        self.cost = np.append(self.cost, 0.0)
        self.lower = np.append(self.lower, 0.0)
        self.upper = np.append(self.upper, 1.0)
        self.num_variables += 1
        return self.num_variables - 1

    def solve(self, *, integral: bool, seconds: float, gap: float = 0.0) -> Answer:
        """Solve it, within `seconds`."""
        data, rows, columns, bounds = [], [], [], []
        for number, row in enumerate(self._rows):
            for i, c in row.coefficients.items():
                rows.append(number)
                columns.append(i)
                data.append(c)
            bounds.append(row.bound)
        matrix = sparse.csr_matrix(
            (data, (rows, columns)), shape=(len(self._rows), self.num_variables)
        )
        integrality = np.zeros(self.num_variables)
        if integral:
            integrality[: len(self.saved)] = 1
            integrality[len(self.saved) : len(self.saved) + len(self.again)] = 1
        result = milp(
            self.cost / self._scale,
            constraints=LinearConstraint(matrix, ub=np.array(bounds)),
            bounds=Bounds(self.lower, self.upper),
            integrality=integrality,
            options={"time_limit": seconds, "mip_rel_gap": gap, "disp": False},
        )
        if result.x is None:
            bound = getattr(result, "mip_dual_bound", None)
            infinite = result.status == 2
            return Answer(None, np.inf, np.inf if infinite else 0.0, np.zeros(0))
        x = result.x
        saved = frozenset(v for v, i in self.saved.items() if x[i] > 0.5)
        value = float(result.fun) * self._scale + self.offset
        bound = getattr(result, "mip_dual_bound", None)
        bound = value if bound is None else bound * self._scale + self.offset
        return Answer(saved, value, bound, x)
