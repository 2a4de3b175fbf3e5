#!/usr/bin/env python
"""Plans of whole models: how far from the proved bound, and in how many seconds.

The models are shaped like Llama 3 8B, with more and fewer layers, on the meta device: nothing is
computed. Budgets are fractions of the range from the least peak to the plain one.

    python scripts/bench_whole_models.py                     8 to 80 layers, four minutes
    python scripts/bench_whole_models.py --layers 8 16       some of them
    python scripts/bench_whole_models.py --docs              docs/measured/whole-models.md
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.planning.llama import NUM_TOKENS, llama_problem
from tests.planning.schedules import plain_schedule
from torchremat.planning.problem.orders import orders_of
from torchremat.planning.problem.problem import Problem
from torchremat.planning.problem.schedule_costs import costs_of
from torchremat.planning.search.solver_options import SolverOptions
from torchremat.planning.solver import solve_orders

PAGE = Path(__file__).resolve().parents[1] / "docs" / "measured" / "whole-models.md"
FRACTIONS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
GIB = 1 << 30
TITLE = "# Plans of whole models\n"
HEAD = "| layers | operators | of range | budget (GiB) | added (ms) | bound (ms) | gap | plan (s) |"
HOW_MEASURED = f"""
## How it was measured

    python scripts/bench_whole_models.py --docs

The steps are of models shaped like Llama 3 8B with its loss, of {NUM_TOKENS:,} tokens in
bfloat16, on the meta device. Times of operators are those of an H100 by its data sheet. Seconds are
of one core, without the trace. *Of range*: 0 is the least peak that was found and 1 the plain one.
*Bound*: no plan adds less, proved by a linear program. The growth is
the slope of seconds over operators, both in logarithms, by least squares.
"""


@dataclass(frozen=True)
class Row:
    layers: int
    operators: int
    fraction: float
    budget: int
    added: float
    bound: float
    seconds: float

    @property
    def gap(self) -> float:
        return 1 - self.bound / self.added if self.added else 0.0

    def __str__(self) -> str:
        return (
            f"| {self.layers} | {self.operators:,} | {self.fraction:.1f} | {self.budget / GIB:.1f} "
            f"| {1e3 * self.added:.2f} | {1e3 * self.bound:.2f} | {100 * self.gap:.1f} % "
            f"| {self.seconds:.1f} |"
        )


def plan_model(layers: int, fractions: Sequence[float]) -> Iterator[Row]:
    problem: Problem = llama_problem(layers)
    plain = costs_of(problem, plain_schedule(problem)).peak
    orders = orders_of(problem)
    least = solve_orders(orders, 1, SolverOptions()).least_peak
    for fraction in fractions:
        budget = int(least + fraction * (plain - least))
        start = time.process_time()
        found = solve_orders(orders, budget, SolverOptions())
        seconds = time.process_time() - start
        bound = found.lower_bound_seconds
        yield Row(
            layers, len(problem.operators), fraction, budget, found.added_seconds, bound, seconds
        )


def fit_growth(rows: Sequence[Row]) -> float:
    """The exponent of the seconds as a power of the number of operators."""
    points = [(math.log(row.operators), math.log(row.seconds)) for row in rows]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def describe(rows: Sequence[Row]) -> str:
    gaps = [1 / (1 - row.gap) for row in rows]
    slowest = max(rows, key=lambda row: row.seconds)
    text = (
        f"Plans of {min(row.layers for row in rows)} to {max(row.layers for row in rows)} layers "
        f"are {100 * (statistics.geometric_mean(gaps) - 1):.1f} % above the proved bound "
        f"(geometric mean; {100 * (max(gaps) - 1):.1f} % at worst).\n"
        f"The longest took {slowest.seconds:.1f} s, for {slowest.operators:,} operators. "
    )
    if len({row.operators for row in rows}) > 1:
        text += f"Seconds grow with the power {fit_growth(rows):.2f} of the number of operators.\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32, 80])
    parser.add_argument("--fractions", type=float, nargs="+", default=list(FRACTIONS))
    parser.add_argument("--docs", action="store_true", help="write docs/measured/whole-models.md")
    options = parser.parse_args()
    print(HEAD, "|" + "---:|" * 8, sep="\n", flush=True)
    rows = []
    for layers in options.layers:
        for row in plan_model(layers, options.fractions):
            rows.append(row)
            print(row, flush=True)
    print(f"\n{describe(rows)}")
    if options.docs:
        table = "\n".join([HEAD, "|" + "---:|" * 8, *map(str, rows)])
        PAGE.write_text(f"{TITLE}\n{describe(rows)}\n{table}\n{HOW_MEASURED}")


if __name__ == "__main__":
    main()
