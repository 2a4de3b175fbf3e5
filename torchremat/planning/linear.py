"""Linear and integer programs in variables between 0 and 1, through SciPy's HiGHS.

least        cost @ x
so that      coefficients of a row @ x <= its bound,  0 <= x <= 1
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

try:
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, linprog, milp
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "planning under a memory budget solves linear programs through SciPy, which is not "
        "installed: pip install scipy"
    ) from error

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Answer:
    """What a program answers.

    Attributes:
        x: the variables, `None` if none were found.
        value: their cost.
        bound: no variables cost less; infinite if there are none.
    """

    x: Floats | None = field(repr=False)
    value: float
    bound: float


@dataclass(frozen=True)
class Relaxation:
    """The answer of a linear program, with the cost of a unit more of each variable at a bound."""

    answer: Answer
    reduced_costs: Floats = field(repr=False)


@dataclass(frozen=True)
class Fixing:
    """Values of some variables."""

    variables: NDArray[np.int64]
    values: Floats


class LinearProgram:
    """A program to which variables and rows are added.

    >>> program = LinearProgram()
    >>> a, b = program.variable(2.0), program.variable(3.0)
    >>> program.at_least([(a, 1.0), (b, 1.0)], 1.0)
    >>> program.solve(seconds=1.0).value
    2.0
    """

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._upper: list[float] = []
        self._integral: list[bool] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._data: list[float] = []
        self._bounds: list[float] = []
        self.offset = 0.0

    @property
    def num_variables(self) -> int:
        """How many variables there are."""
        return len(self._costs)

    def variable(self, cost: float = 0.0, *, integral: bool = False) -> int:
        """The number of a new variable."""
        self._costs.append(cost)
        self._upper.append(1.0)
        self._integral.append(integral)
        return len(self._costs) - 1

    def forbid(self, variable: int) -> None:
        """Let `variable` be zero."""
        self._upper[variable] = 0.0

    def at_most(self, terms: Iterable[tuple[int, float]], bound: float) -> None:
        """Add the row `sum of coefficient * variable <= bound`."""
        row = len(self._bounds)
        self._bounds.append(bound)
        for variable, coefficient in terms:
            self._rows.append(row)
            self._columns.append(variable)
            self._data.append(coefficient)

    def at_least(self, terms: Iterable[tuple[int, float]], bound: float) -> None:
        """Add the row `sum of coefficient * variable >= bound`."""
        self.at_most([(variable, -c) for variable, c in terms], -bound)

    def relaxed(self, *, seconds: float) -> Relaxation:
        """Solve it without regard to integers."""
        matrix, bounds, costs, scale = self._arrays()
        upper = np.array(self._upper)
        with silence():
            result = linprog(
                costs,
                A_ub=matrix,
                b_ub=bounds,
                bounds=np.stack([np.zeros_like(upper), upper], 1),
                method="highs-ipm",
                options={"time_limit": max(seconds, 0.05)},
            )
        if result.status == 2:
            return Relaxation(Answer(None, np.inf, np.inf), np.zeros(0))
        if result.status != 0 or result.x is None:
            return Relaxation(Answer(None, np.inf, 0.0), np.zeros(0))
        value = float(result.fun) * scale + self.offset
        reduced = (result.lower.marginals + result.upper.marginals) * scale
        return Relaxation(Answer(result.x, value, value), reduced)

    def solve(self, *, seconds: float, gap: float = 0.0, fixed: Fixing | None = None) -> Answer:
        """Solve it within `seconds`, to within `gap` of the optimum, some variables `fixed`."""
        matrix, bounds, costs, scale = self._arrays()
        lower, upper = np.zeros(self.num_variables), np.array(self._upper)
        if fixed is not None:
            lower[fixed.variables] = fixed.values
            upper[fixed.variables] = fixed.values
        with silence():
            result = milp(
                costs,
                constraints=LinearConstraint(matrix, ub=bounds),
                bounds=Bounds(lower, upper),
                integrality=np.array(self._integral, dtype=np.int64),
                options={"time_limit": max(seconds, 0.05), "mip_rel_gap": gap},
            )
        dual = getattr(result, "mip_dual_bound", None)
        bound = 0.0 if dual is None or not np.isfinite(dual) else dual * scale + self.offset
        if result.x is None:
            return Answer(None, np.inf, np.inf if result.status == 2 else bound)
        return Answer(result.x, float(result.fun) * scale + self.offset, bound)

    def fixing(self, relaxation: Relaxation, free: int) -> Fixing | None:
        """Values for all integers but the `free` ones of which `relaxation` is least sure."""
        x = relaxation.answer.x
        integral = np.flatnonzero(np.array(self._integral))
        if x is None or len(integral) <= free:
            return None
        chosen = x[integral]
        away = np.abs(chosen - np.round(chosen))
        sure = np.where(away > 1e-6, -away, np.abs(relaxation.reduced_costs[integral]))
        fixed = integral[np.argsort(sure, kind="stable")[free:]]
        return Fixing(fixed, np.round(x[fixed]))

    def _arrays(self) -> tuple[sparse.csr_matrix, Floats, Floats, float]:
        """The rows, each of them and the costs scaled to coefficients of at most 1."""
        shape = (len(self._bounds), self.num_variables)
        matrix = sparse.csr_matrix((self._data, (self._rows, self._columns)), shape=shape)
        largest = np.maximum(abs(matrix).max(axis=1).toarray().ravel(), 1e-30)
        costs = np.array(self._costs)
        scale = float(costs.max(initial=0.0)) or 1.0
        return (
            sparse.diags(1 / largest) @ matrix,
            np.array(self._bounds) / largest,
            costs / scale,
            scale,
        )


@contextmanager
def silence() -> Iterator[None]:
    """Keep what C++ writes to the standard output out of it: HiGHS prints stray lines."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(nowhere)
        os.close(kept)
