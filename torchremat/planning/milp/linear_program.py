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

from torchremat.planning.problem.trial import Floats
from torchremat.planning.search.clock import CpuTimer

try:
    from scipy import sparse  # type: ignore[import-untyped]
    from scipy.optimize import (  # type: ignore[import-untyped]
        Bounds,
        LinearConstraint,
        linprog,
        milp,
    )
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "planning under a memory budget solves linear programs through SciPy, which is not "
        "installed: pip install scipy"
    ) from error

# Seconds of a solver at the least: less than that would end it before it begins.
_LEAST_SECONDS = 0.05
# Of all that is summed, what may be lost in rounding: 2^-53 for each of up to 4,000 additions.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Answer:
    """The answer of a program.

    Attributes:
        x: the variables, `None` if none were found.
        bound: no variables cost less; infinite if there are none.
        is_late: whether a limit ended the search for better ones.
    """

    x: Floats | None = field(repr=False)
    value: float
    bound: float
    is_late: bool = False


@dataclass(frozen=True)
class Relaxation:
    """The answer of a linear program, with the cost of a unit more of each variable at a bound."""

    answer: Answer
    reduced_costs: Floats = field(repr=False)


@dataclass(frozen=True)
class Fixing:
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

    def __init__(self, timer: CpuTimer | None = None) -> None:
        self.timer = timer
        self._costs: list[float] = []
        self._upper: list[float] = []
        self._integral: list[bool] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._data: list[float] = []
        self._bounds: list[float] = []
        self.offset = 0.0
        self._built: _Arrays | None = None

    @property
    def slowdown(self) -> float:
        return 1.0 if self.timer is None else self.timer.slowdown

    @property
    def num_variables(self) -> int:
        return len(self._costs)

    def variable(self, cost: float = 0.0, *, integral: bool = False) -> int:
        self._built = None
        self._costs.append(cost)
        self._upper.append(1.0)
        self._integral.append(integral)
        return len(self._costs) - 1

    def at_most(self, terms: Iterable[tuple[int, float]], bound: float) -> None:
        """Add the row `sum of coefficient * variable <= bound`."""
        self._built = None
        row = len(self._bounds)
        self._bounds.append(bound)
        for variable, coefficient in terms:
            self._rows.append(row)
            self._columns.append(variable)
            self._data.append(coefficient)

    def at_least(self, terms: Iterable[tuple[int, float]], bound: float) -> None:
        self.at_most([(variable, -c) for variable, c in terms], -bound)

    def relax(self, *, seconds: float | None = None) -> Relaxation:
        """Solve it in fractions, within so many seconds if they are given.

        The bound is proved by itself: `_prove_bound` needs no solver that is right.

        >>> program = LinearProgram()
        >>> a, b = program.variable(2.0), program.variable(3.0)
        >>> program.at_least([(a, 2.0), (b, 1.0)], 1.0)
        >>> f"{program.relax().answer.bound:.6f}"
        '1.000000'
        """
        arrays = self._arrays()
        upper = np.array(self._upper)
        with silence():
            result = linprog(
                arrays.costs,
                A_ub=arrays.matrix,
                b_ub=arrays.bounds,
                bounds=np.stack([np.zeros_like(upper), upper], 1),
                method="highs-ipm",
                options=self._limit(seconds),
            )
        if result.status == 2:
            return Relaxation(Answer(None, np.inf, np.inf), np.zeros(0))
        if result.status != 0 or result.x is None:
            return Relaxation(Answer(None, np.inf, 0.0), np.zeros(0))
        value = float(result.fun) * arrays.scale + self.offset
        reduced = (result.lower.marginals + result.upper.marginals) * arrays.scale
        bound = self._prove_bound(-result.ineqlin.marginals)
        return Relaxation(Answer(result.x, value, bound), reduced)

    def _prove_bound(self, prices: Floats) -> float:
        """The cost that no answer is below, proved by a price of each row.

        For an answer x and prices y >= 0, rows A x <= b make y (A x - b) <= 0. So c x >= c x +
        y (A x - b) = -y b + (c + y A) x. As each x is from 0 to its upper bound u, that is at least
        -y b + sum of min(0, (c + y A) u). Sums of floating-point numbers round: a part in 10^12 of
        all that was added comes off, which is more than they lose.
        """
        arrays = self._arrays()
        prices = np.maximum(prices, 0.0)
        upper = np.array(self._upper)
        paid = prices @ arrays.matrix
        saved = np.minimum(arrays.costs + paid, 0.0) * upper
        added = np.abs(arrays.costs) + prices @ abs(arrays.matrix)
        rounded = float((added * upper).sum() + np.abs(prices * arrays.bounds).sum())
        bound = float(saved.sum() - prices @ arrays.bounds) - _ROUNDING * rounded
        return bound * arrays.scale + self.offset

    def _limit(self, seconds: float | None) -> dict[str, float]:
        if seconds is None:
            return {}
        return {"time_limit": max(seconds, _LEAST_SECONDS) * self.slowdown}

    def solve(
        self,
        *,
        seconds: float | None = None,
        gap: float = 0.0,
        fixed: Fixing | None = None,
        nodes: int | None = None,
    ) -> Answer:
        """Solve to within `gap` of the optimum, in at most `nodes` of the search tree."""
        arrays = self._arrays()
        lower, upper = np.zeros(self.num_variables), np.array(self._upper)
        if fixed is not None:
            lower[fixed.variables] = fixed.values
            upper[fixed.variables] = fixed.values
        with silence():
            result = milp(
                arrays.costs,
                constraints=LinearConstraint(arrays.matrix, ub=arrays.bounds),
                bounds=Bounds(lower, upper),
                integrality=np.array(self._integral, dtype=np.int64),
                options={
                    **self._limit(seconds),
                    "mip_rel_gap": gap,
                    **({} if nodes is None else {"node_limit": nodes}),
                },
            )
        dual = getattr(result, "mip_dual_bound", None)
        bound = 0.0 if dual is None or not np.isfinite(dual) else dual * arrays.scale + self.offset
        is_late = result.status == 1
        if result.x is None:
            return Answer(None, np.inf, np.inf if result.status == 2 else bound, is_late)
        return Answer(result.x, float(result.fun) * arrays.scale + self.offset, bound, is_late)

    @property
    def integral(self) -> NDArray[np.int64]:
        return np.flatnonzero(np.array(self._integral)).astype(np.int64)

    def _arrays(self) -> "_Arrays":
        if self._built is None:
            self._built = _Arrays.of(self)
        return self._built


@dataclass(frozen=True)
class _Arrays:
    """A program as arrays, each row and the costs scaled to coefficients of at most 1."""

    matrix: sparse.csr_matrix
    bounds: Floats
    costs: Floats
    scale: float

    @classmethod
    def of(cls, program: LinearProgram) -> "_Arrays":
        shape = (len(program._bounds), program.num_variables)
        where = (program._rows, program._columns)
        matrix = sparse.csr_matrix((program._data, where), shape=shape)
        largest = np.maximum(abs(matrix).max(axis=1).toarray().ravel(), 1e-30)
        costs = np.array(program._costs)
        scale = float(costs.max(initial=0.0)) or 1.0
        bounds = np.array(program._bounds, dtype=float) / largest
        return cls(sparse.diags(1 / largest) @ matrix, bounds, costs / scale, scale)


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
