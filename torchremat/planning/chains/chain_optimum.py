"""The optimum of a chain: what every schedule adds at least, and decisions that add no more.

Written for chains of equal steps by Griewank and Walther (Algorithm 799: revolve, 2000). Here moves
may differ in time, and the room in the backward pass may change from step to step.

    x1 -> x2 -> ... -> x8, three pebbles     x5 is saved; x8, x7, x6 follow from it, with two;
                                             x4 to x1 follow from the start, with three

Why no schedule does better. Call what is computed from one computation of x1 its offspring.

1.  Each computation of x1 serves demands in a row, and the next one serves those after them. Else
    a later one would meet offspring of an earlier one on its way up the chain. It could have begun
    there.
2.  The second may begin when the first has served its last demand, xm. There is as much room then
    as at that demand, whose operator needs bytes of its own, and xm is alive no more.
3.  The offspring of the first serve xm and what is above it, never what is below. So each of them
    below xm may stand at xm instead: xm is computed once, and alive until its demand.

So an optimum first computes some xm, and serves all above from there with one pebble less. Then it
serves all below. A table over bases, demands and pebbles has all of these.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from torchremat.planning.chains.chain import Chain, find_chains
from torchremat.planning.problem.problem import Problem
from torchremat.planning.problem.recomputation import Recomputation
from torchremat.planning.problem.replay import Decisions, find_missing
from torchremat.planning.problem.trial import Evaluator
from torchremat.planning.search.incumbent import Incumbent

Floats = NDArray[np.float64]

# Numbers that the tables of a chain may compare, as 460 demands need: 5 s at most. Chosen by hand.
_MOST_WORK = 2e9
# Bases that are looked at in one array. More of them compare more numbers in vain. By hand.
_BASES_AT_ONCE = 64
# Nominal seconds for one of them: measured, of a core of about 3 GHz.
_SECONDS_OF_ONE = 2.3e-9
# The same for a demand and a number of pebbles, however few are compared.
_SECONDS_OF_COLUMN = 4e-6


def try_chains(evaluator: Evaluator, incumbent: Incumbent) -> None:
    """Prove the bound of the longest chains, and note the decisions of their optima."""
    problem = evaluator.problem
    if problem.offloadable:  # a value on the host takes no room
        return
    for chain in find_chains(problem):
        optimum = ChainOptimum(chain, evaluator.budget)
        if optimum.work > _MOST_WORK:
            continue
        incumbent.clock.timer.charge(optimum.nominal_seconds)
        incumbent.prove(optimum.seconds)
        if optimum.seconds < float("inf"):
            alone = {demand.value: frozenset({demand.value}) for demand in chain.demands}
            decisions = decide(problem, chain, optimum.pebbles(), evaluator.fixed, alone)
            incumbent.note(evaluator(decisions))


@dataclass(frozen=True)
class Pebble:
    """A pebble that stays to its demand, and the demand before which it is made.

    Both count from the start of the chain, from 1. `made` of `None` is the forward pass.
    """

    demand: int
    made: int | None


class ChainOptimum:
    """The least seconds that serve the demands of `chain` within `budget` bytes.

    Demands count from the start of the chain, from 1: the backward pass goes down. Base 0 is the
    start of the chain, which is always there.
    """

    def __init__(self, chain: Chain, budget: int) -> None:
        demands = chain.demands[::-1]
        self.num_demands = len(demands)
        self._moves = np.array([0, *(d.moves for d in demands)])
        self._seconds = np.array([0.0, *(d.seconds for d in demands)])
        self._room_at = [0, *((budget - d.bytes_at) // chain.unit for d in demands)]
        self._room_before = [0, *((budget - d.bytes_before) // chain.unit for d in demands)]
        self._all_moves = chain.moves
        self._room_forward = (budget - chain.constant) // chain.unit
        room = max(*self._room_before, *self._room_at, self._room_forward)
        self.num_pebbles = max(0, min(room, self.num_demands + 1))

    @property
    def work(self) -> float:
        """How many numbers the tables compare: a base of number b may have b pebbles at most."""
        left = max(0, self.num_demands - self.num_pebbles)
        return (self.num_demands**4 - left**4) / 24

    @property
    def nominal_seconds(self) -> float:
        """The seconds that the tables take, as a rule."""
        columns = self.num_demands * self.num_pebbles
        return _SECONDS_OF_ONE * self.work + _SECONDS_OF_COLUMN * columns

    @property
    def seconds(self) -> float:
        """The seconds added; infinite if there is not room enough."""
        return float(self._first_tables[0][0])

    @cached_property
    def _tables(self) -> list[Floats]:
        """By pebbles: `[base, demand]`, the seconds to serve all between."""
        size = self.num_demands + 1
        tables = [np.full((size, size), np.inf)]
        for count in range(self.num_pebbles, -1, -1):
            tables.append(self._build_table(count, tables[-1]))
        return tables[::-1]

    def _build_table(self, count: int, more: Floats) -> Floats:
        """The table of `count` pebbles, from that of one more. Base 0 has none."""
        table = np.full_like(more, np.inf)
        table[0, 0] = 0.0
        for j in range(1, self.num_demands + 1):
            if count <= self._room_at[j]:
                table[j, j] = 0.0
            if count < self._room_before[j]:
                end = j if count else 1
                for low in range(count, end, _BASES_AT_ONCE):
                    high = min(low + _BASES_AT_ONCE, end)
                    choices = self._choices(count, range(low, high), j, more, table)
                    table[low:high, j] = choices.min(axis=1) - self._seconds[low:high]
        return table

    def _choices(self, count: int, bases: range, j: int, more: Floats, table: Floats) -> Floats:
        """The seconds from `bases` to demand `j`, by the demand whose value is computed next.

        They count from the start of the chain: those as far as a base are the same for all.
        """
        rows, chosen = slice(bases.start, bases.stop), slice(bases.start + 1, j + 1)
        above = more[chosen, j] + self._seconds[chosen]
        choices: Floats = table[rows, bases.start : j] + above
        if count + 2 > self._room_before[j]:  # only one move: a second needs two pebbles more
            choices[self._moves[chosen] - self._moves[rows, None] > 1] = np.inf
        return choices

    @cached_property
    def _first_tables(self) -> list[Floats]:
        """By pebbles: from each base, the seconds after the forward pass is there."""
        last = self.num_demands
        columns = [np.full(last + 1, np.inf)]
        for count in range(self.num_pebbles, -1, -1):
            column = np.full(last + 1, np.inf)
            for low in range(min(count, last), last + 1, _BASES_AT_ONCE):
                bases = range(low, min(low + _BASES_AT_ONCE, last + 1))
                choices = self._first_choices(count, bases, columns[-1])
                column[low : bases.stop] = choices.min(axis=1)
            columns.append(column)
        return columns[::-1]

    def _first_choices(self, count: int, bases: range, more: Floats) -> Floats:
        """The seconds by the demand whose value is saved next, and if no further one is saved.

        The demands begin after the first of `bases`. Those up to a base itself cost infinitely.
        """
        low, moves = bases.start, self._moves
        table = self._tables[count][low : bases.stop, low:]
        choices: Floats = table + np.append(more[low + 1 :], 0.0)
        moves_on = np.append(moves[low + 1 :], self._all_moves) - moves[low : bases.stop, None]
        choices[count + np.minimum(moves_on, 2) > self._room_forward] = np.inf
        return choices

    def pebbles(self) -> Iterator[Pebble]:
        """The pebbles of an optimum, each with its demand."""
        base, count = 0, 0
        stack: list[tuple[int, int, int]] = []  # bases, demands, and pebbles
        while True:
            choices = self._first_choices(
                count, range(base, base + 1), self._first_tables[count + 1]
            )
            found = int(choices.argmin()) + base + 1
            if found > self.num_demands:
                stack.append((base, self.num_demands, count))
                break
            yield Pebble(found, None)
            stack.append((base, found - 1, count))
            base, count = found, count + 1
        while stack:
            base, j, count = stack.pop()
            if base < j:
                more, table = self._tables[count + 1], self._tables[count]
                choices = self._choices(count, range(base, base + 1), j, more, table)
                found = int(choices.argmin()) + base + 1
                yield Pebble(found, j)
                stack += [(base, found - 1, count), (found, j, count + 1)]


def decide(
    problem: Problem,
    chain: Chain,
    pebbles: Iterator[Pebble],
    fixed: frozenset[int],
    values: Mapping[int, frozenset[int]],
) -> Decisions:
    """The decisions that have `pebbles` alive, save `fixed`, and drop all else after a demand.

    `values` are those of the problem that a value of the chain stands for.
    """
    demands = chain.demands[::-1]
    alive = [(values[demands[pebble.demand - 1].value], pebble) for pebble in pebbles]
    saved = fixed.union(*(group for group, pebble in alive if pebble.made is None))
    there = set(saved | (problem.outputs & problem.known))
    lasting = Recomputation(problem).lasting | problem.outputs | fixed
    ends = {demand.last: number for number, demand in enumerate(demands, 1)}
    drops: dict[int, frozenset[int]] = {}
    for step, b in enumerate(problem.backward):
        reads = problem.operators[b].reads
        find_missing(problem, [v for v in reads if v in problem.known - there], there)
        if step in ends:
            j = ends[step]
            keep = {
                v
                for group, pebble in alive
                if pebble.demand < j and (pebble.made or j) >= j
                for v in group
            }
            until = demands[j - 2].first if j > 1 else len(problem.backward)
            for later in problem.backward[step + 1 : until]:
                keep.update(problem.operators[later].reads)
            drops[step] = frozenset(there - keep - lasting)
            there -= drops[step]
    return Decisions(saved, drops)
