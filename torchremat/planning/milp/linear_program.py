"""Linear and integer programs in variables between 0 and 1, through SciPy's HiGHS.

least        cost @ x
so that      coefficients of a row @ x <= its bound,  0 <= x <= 1
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchremat.planning.problem.trial import Floats
from torchremat.planning.search.clock import WorkTimer

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
# Nominal seconds of one coefficient of a program: to build and scale it, as was measured.
_SECONDS_OF_COEFFICIENT = 4e-6
# The same for each iteration in fractions.
_SECONDS_OF_ITERATION = 7e-7
# Iterations that are reckoned with before a program in fractions is solved: 20 to 60 were counted.
_USUAL_ITERATIONS = 50
# Nominal seconds of a program in integers that presolve leaves some of, whatever its size: cuts
# and heuristics take up to 4 s, and 0.03 s of most.
_SECONDS_OF_TREE = 0.1
# Those of one coefficient, at the root. Programs of 3,000 to 50,000 coefficients took a quarter to
# five times that.
_SECONDS_OF_ROOT = 5e-5
# The same at each other node of the search tree.
_SECONDS_OF_NODE = 1e-4
# Where variables are fixed, of each coefficient of another, at the root: few are left to solve.
_SECONDS_OF_FREE_ROOT = 3e-6
# The same at each other node.
_SECONDS_OF_FREE_NODE = 2e-5
# Statuses of `scipy.optimize.milp` that say that a limit ended it: the clock, or nodes.
_LIMITS = (1, 4)
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

    def __init__(self, timer: WorkTimer | None = None) -> None:
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
        """Solve it in fractions. If that takes longer than `seconds`, as a rule, it is not tried.

        The bound is proved by itself: `_prove_bound` needs no solver that is right.

        >>> program = LinearProgram()
        >>> a, b = program.variable(2.0), program.variable(3.0)
        >>> program.at_least([(a, 2.0), (b, 1.0)], 1.0)
        >>> f"{program.relax().answer.bound:.6f}"
        '1.000000'
        """
        arrays = self._arrays()
        usual = _SECONDS_OF_COEFFICIENT + _USUAL_ITERATIONS * _SECONDS_OF_ITERATION
        if seconds is not None and usual * arrays.matrix.nnz > seconds:
            return Relaxation(Answer(None, np.inf, 0.0, is_late=True), np.zeros(0))
        upper = np.array(self._upper)
        with silence():
            result = linprog(
                arrays.costs,
                A_ub=arrays.matrix,
                b_ub=arrays.bounds,
                bounds=np.stack([np.zeros_like(upper), upper], 1),
                method="highs-ipm",
                options={} if seconds is None else self._limit_by_clock(seconds),
            )
        iteration = _SECONDS_OF_ITERATION * int(result.nit)
        self._charge((_SECONDS_OF_COEFFICIENT + iteration) * arrays.matrix.nnz)
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

    def _limit_by_clock(self, seconds: float) -> dict[str, float]:
        """The option of a limit on the clock: only where the user gave one."""
        if self.timer is None or not self.timer.has_wall:
            return {}
        return {"time_limit": max(seconds, _LEAST_SECONDS)}

    def _charge(self, seconds: float) -> None:
        if self.timer is not None:
            self.timer.charge(seconds)

    def solve(
        self,
        *,
        seconds: float | None = None,
        gap: float = 0.0,
        fixed: Fixing | None = None,
        nodes: int | None = None,
    ) -> Answer:
        """Solve to within `gap` of the optimum, in at most `nodes` of the search tree.

        As many nodes are searched as take `seconds`, as a rule: these are the same on every
        machine. If the root alone takes twice as long, the program is not tried.
        """
        arrays = self._arrays()
        root, node = arrays.reckon_seconds(fixed)
        if seconds is not None:
            left = max(seconds, _LEAST_SECONDS) - root
            if left < -seconds:
                return Answer(None, np.inf, 0.0, is_late=True)
            most = max(1, int(left / node))
            nodes = most if nodes is None else min(most, nodes)
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
                    **({} if seconds is None else self._limit_by_clock(seconds)),
                    "mip_rel_gap": gap,
                    **({} if nodes is None else {"node_limit": nodes}),
                },
            )
        count = getattr(result, "mip_node_count", None) or 0
        tree = _SECONDS_OF_TREE + root + node * (count - 1) if count else 0.0
        self._charge(_SECONDS_OF_COEFFICIENT * arrays.matrix.nnz + tree)
        return self._read(result)

    def _read(self, result: Any) -> Answer:
        scale, dual = self._arrays().scale, getattr(result, "mip_dual_bound", None)
        bound = 0.0 if dual is None or not np.isfinite(dual) else dual * scale + self.offset
        is_late = result.status in _LIMITS
        if result.x is None:
            return Answer(None, np.inf, np.inf if result.status == 2 else bound, is_late)
        return Answer(result.x, float(result.fun) * scale + self.offset, bound, is_late)

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
    column_lengths: NDArray[np.int64]

    def reckon_seconds(self, fixed: Fixing | None) -> tuple[float, float]:
        """Nominal seconds of the root of the search tree, and of each other node."""
        num = int(self.matrix.nnz)
        if fixed is None:
            return _SECONDS_OF_ROOT * num, _SECONDS_OF_NODE * max(num, 1)
        num -= int(self.column_lengths[fixed.variables].sum())
        return _SECONDS_OF_FREE_ROOT * num, _SECONDS_OF_FREE_NODE * max(num, 1)

    @classmethod
    def of(cls, program: LinearProgram) -> "_Arrays":
        shape = (len(program._bounds), program.num_variables)
        where = (program._rows, program._columns)
        matrix = sparse.csr_matrix((program._data, where), shape=shape)
        largest = np.maximum(abs(matrix).max(axis=1).toarray().ravel(), 1e-30)
        costs = np.array(program._costs)
        scale = float(costs.max(initial=0.0)) or 1.0
        bounds = np.array(program._bounds, dtype=float) / largest
        lengths = np.bincount(matrix.indices, minlength=shape[1]).astype(np.int64)
        return cls(sparse.diags(1 / largest) @ matrix, bounds, costs / scale, scale, lengths)


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
