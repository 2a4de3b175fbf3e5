"""Steps that are chains of stages: the forward pass, cut where few bytes pass from part to part.

    step of an LSTM     h, c -> gates, tanh(c), ... -> h, c      h and c pass, all else is inside

What passes a cut takes the place of a value in the game of pebbles on a chain: a stage of the
backward pass needs what passes the cut before it. Its own values are recomputed when it begins. The
optimum of that game is a start for a search, not a bound: values may be saved that pass no cut.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from torchremat.planning.chains.chain import Chain, Demand
from torchremat.planning.chains.chain_optimum import ChainOptimum, decide
from torchremat.planning.chains.spare_room import fill_room
from torchremat.planning.problem.fixed_bytes import BackwardBytes, ForwardBytes
from torchremat.planning.problem.problem import Part, Problem
from torchremat.planning.problem.recomputation import Recomputation
from torchremat.planning.problem.trial import Evaluated, Evaluator
from torchremat.planning.search.clock import NEVER, Deadline
from torchremat.planning.search.incumbent import Incumbent

Ints = NDArray[np.int64]

# Cuts at most: the tables of 96 take 0.1 s. Chosen by hand.
_MOST_CUTS = 120
# Cuts that are a chain at least.
_LEAST_CUTS = 4
# Of the cuts where fewest bytes pass, the shares that are taken as stages. Chosen by hand.
_SHARES = (0.1, 0.3, 1.0)
# A value that passes a larger share of the cuts, in one of the passes, is saved. Chosen by hand.
_LONG = 0.25
# Of the budget, what the chain gets. The bytes inside of stages are estimated, and what is left is
# filled with their values. Chosen by hand.
_FRACTIONS = (1.0, 0.93, 0.86, 0.78, 0.7)
# Nominal seconds to cut the stages, for each operator: measured, of a core of about 3 GHz.
_SECONDS_OF_OPERATOR = 1e-5
# How many of them are tried where an answer of a program says what is saved besides.
_FEW = 2
# Where a chain needs more than the budget, room for one value that passes a cut is tried, then for
# two, and so on up to this number. Few are enough to recompute each stage often. By hand.
_MOST_ABOVE = 8


def try_stages(
    evaluator: Evaluator,
    incumbent: Incumbent,
    deadline: Deadline = NEVER,
    saved: frozenset[int] = frozenset(),
) -> None:
    """Note the decisions of the optima of chains of stages, in which `saved` is saved anyway.

    Nothing is offloaded in them. After `deadline` no further chain is tried.
    """
    problem = evaluator.problem
    for cuts in find_cuts(problem):
        if deadline.is_over:
            break
        stages = Stages(problem, cuts, saved)
        deadline.charge(_SECONDS_OF_OPERATOR * len(problem.operators))
        if len(stages.chain.demands) >= _LEAST_CUTS:
            _try_optima(stages, evaluator, incumbent, deadline)


def _try_optima(
    stages: "Stages", evaluator: Evaluator, incumbent: Incumbent, deadline: Deadline
) -> None:
    for fraction in _FRACTIONS[: _FEW if stages.saved else None]:
        if deadline.is_over:
            break
        optimum = ChainOptimum(stages.chain, int(fraction * evaluator.budget))
        deadline.charge(optimum.nominal_seconds)
        if optimum.seconds == float("inf"):
            if fraction == _FRACTIONS[0]:
                _try_above(stages, evaluator, incumbent, deadline)
            break
        _try_optimum(stages, optimum, evaluator, incumbent, deadline)


def _try_above(
    stages: "Stages", evaluator: Evaluator, incumbent: Incumbent, deadline: Deadline
) -> None:
    """Note optima of the least room by the estimate, and of more while they fit.

    That room is above the budget. But the estimate takes the widest stage for all, so a schedule
    may need less.
    """
    chain = stages.chain
    least = max(chain.constant, *(max(d.bytes_at, d.bytes_before) for d in chain.demands))
    for count in range(1, _MOST_ABOVE + 1):
        if deadline.is_over:
            break
        optimum = ChainOptimum(chain, least + count * chain.unit)
        deadline.charge(optimum.nominal_seconds)
        if optimum.seconds == float("inf"):
            continue
        if not _try_optimum(stages, optimum, evaluator, incumbent, deadline).fits:
            break


def _try_optimum(
    stages: "Stages",
    optimum: ChainOptimum,
    evaluator: Evaluator,
    incumbent: Incumbent,
    deadline: Deadline,
) -> Evaluated:
    fixed = evaluator.fixed | stages.always
    decisions = decide(stages.problem, stages.chain, optimum.pebbles(), fixed, stages.passing)
    trial = evaluator(decisions)
    if trial.fits:
        fill_room(evaluator, incumbent, incumbent.note(trial), deadline)
    elif trial.is_allowed:
        incumbent.note_lowest(trial)
    return trial


def find_cuts(problem: Problem) -> Iterator[tuple[int, ...]]:
    """The cuts of the forward pass, in more and in fewer stages: none where none are narrow.

    Every second one of them is tried, too. A layer of a transformer has a narrow cut in its middle,
    and at a low budget it may be better to recompute it whole.
    """
    passing = _count_passing(problem)
    inner = range(1, len(passing) - 1)
    narrow = [p for p in inner if passing[p - 1] > passing[p] <= passing[p + 1] and passing[p]]
    narrow.sort(key=lambda p: (passing[p], p))
    before: tuple[int, ...] = ()
    for share in _SHARES:
        few = narrow[: max(_LEAST_CUTS, int(share * len(narrow)))]
        chosen = sorted(p for p in narrow if few and passing[p] <= passing[few[-1]])
        chosen = chosen[:: -(-len(chosen) // _MOST_CUTS)] if chosen else []
        if len(chosen) >= _LEAST_CUTS and tuple(chosen) != before:
            before = tuple(chosen)
            yield from (before, before[::2], before[1::2])


def _find_spans(problem: Problem) -> tuple[dict[int, int], dict[int, int]]:
    """The position of the operator of the forward pass that makes each value, and its last reader.

    Outputs are always there, and are not among them.
    """
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for p, o in enumerate(problem.forward):
        op = problem.operators[o]
        made.update((v, p) for v in op.writes if v not in problem.outputs)
        last.update((v, p) for v in op.reads if v in made)
    return made, last


def _count_passing(problem: Problem) -> Ints:
    """The bytes that later operators of the forward pass read, after each of them."""
    made, last = _find_spans(problem)
    change = np.zeros(len(problem.forward) + 1, dtype=np.int64)
    for v, end in last.items():
        change[made[v]] += problem.nbytes[v]
        change[end] -= problem.nbytes[v]
    return np.cumsum(change[:-1])


@dataclass(frozen=True)
class Stages:
    """The stages between `cuts`, positions of operators in the forward pass that stages end with.

    The value of a demand is the number of a cut, from 0; stage i lies before cut i. `saved` are
    values that are saved whatever the optimum says.
    """

    problem: Problem
    cuts: tuple[int, ...]
    saved: frozenset[int] = frozenset()

    @cached_property
    def _spans(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        return _find_spans(self.problem)

    @cached_property
    def stage_of(self) -> Mapping[int, int]:
        """The stage that makes each known value."""
        cuts = np.array(self.cuts)
        made = self._spans[0]
        places = np.searchsorted(cuts, np.fromiter(made.values(), dtype=np.int64, count=len(made)))
        found = dict(zip(made, map(int, places), strict=True))
        for op in self.problem.operators:
            if op.part is Part.EITHER_PASS:
                stage = max((found[v] for v in op.reads if v in found), default=0)
                found.update((v, stage) for v in op.writes if v not in self.problem.outputs)
        return found

    @cached_property
    def long(self) -> frozenset[int]:
        """The values that pass many cuts, which are saved."""
        made, last = self._spans
        most = _LONG * len(self.cuts)
        found = frozenset(v for v in last if self._count_cuts(made[v], last[v]) > most)
        return found | self._find_read_late(found, most)

    def _find_read_late(self, apart: frozenset[int], most: float) -> frozenset[int]:
        """The values that are read when the backward pass is more than `most` stages further down.

        Such as a gradient that tiles of the forward pass made: it is there to the end of the step.
        """
        last = Recomputation(self.problem).last
        first: dict[int, int] = {}
        for step, b in enumerate(self.problem.backward):
            for v in self.problem.operators[b].reads:
                if v in self.stage_of and v not in apart:
                    first.setdefault(self.stage_of[v], step)
        found = set()
        for v, stage in self.stage_of.items():
            lower = (t for t, step in first.items() if t < stage and step < last.get(v, -1))
            if sum(1 for _ in lower) > most:
                found.add(v)
        return frozenset(found)

    @cached_property
    def always(self) -> frozenset[int]:
        """All values that are saved whatever the optimum says."""
        return self.long | self.saved

    def _count_cuts(self, start: int, end: int) -> int:
        cuts = np.array(self.cuts)
        return int(np.searchsorted(cuts, end) - np.searchsorted(cuts, start))

    @cached_property
    def passing(self) -> Mapping[int, frozenset[int]]:
        """By the numbers of cuts, the values that pass them."""
        made, last = self._spans
        found: list[set[int]] = [set() for _ in self.cuts]
        for v, end in last.items():
            if v not in self.always:
                first = int(np.searchsorted(np.array(self.cuts), made[v]))
                for i in range(first, first + self._count_cuts(made[v], end)):
                    found[i].add(v)
        return {i: frozenset(values) for i, values in enumerate(found)}

    @cached_property
    def unit(self) -> int:
        """The bytes that pass a cut, where they are most."""
        nbytes = self.problem.nbytes
        return max(1, *(sum(nbytes[v] for v in values) for values in self.passing.values()))

    @cached_property
    def chain(self) -> Chain:
        """The stages as a chain; what passes a cut is a value of it."""
        problem = self.problem
        ends = [0.0, *np.cumsum([self._count_seconds(o) for o in problem.forward])]
        inside = self._find_most_inside()
        at = self._find_bytes_at()
        saved = self._find_saved_bytes()
        before = [a + b for a, b in zip(BackwardBytes.of(problem).before, saved, strict=True)]
        demands = []
        for stage, (first, last) in self._find_windows():
            if stage:  # the first stage needs no cut
                cut = stage - 1
                seconds = float(ends[self.cuts[cut] + 1])
                room = before[first] + inside
                demands.append(
                    Demand(cut, cut + 1, seconds, first, last, max(at[first : last + 1]), room)
                )
        constant = problem.constant + inside + max(saved, default=0)
        return Chain(self.unit, len(self.cuts), tuple(demands), constant)

    def _count_seconds(self, o: int) -> float:
        op = self.problem.operators[o]
        return 0.0 if self.always.issuperset(op.writes) else op.seconds

    def _find_saved_bytes(self) -> list[int]:
        """The bytes of what is saved anyway, and wanted at each step or later."""
        last = Recomputation(self.problem).last
        found = np.zeros(len(self.problem.backward) + 1, dtype=np.int64)
        for v in self.always:
            found[0] += self.problem.nbytes[v]
            found[last.get(v, -1) + 1] -= self.problem.nbytes[v]
        return [int(n) for n in np.cumsum(found)[:-1]]

    def _find_windows(self) -> Sequence[tuple[int, tuple[int, int]]]:
        """The stages from the last on, each with the first and last step for which it is there."""
        ends: dict[int, int] = {}
        for step, stage in enumerate(self._find_highest()):
            if stage is not None:
                ends[stage] = step
        windows = []
        start = 0
        for stage in sorted(ends, reverse=True):
            if ends[stage] >= start:
                windows.append((stage, (start, ends[stage])))
                start = ends[stage] + 1
        return windows

    def _find_highest(self) -> Iterator[int | None]:
        """The highest stage whose values each step reads, if any; those of `long` do not count."""
        for b in self.problem.backward:
            reads = self.problem.operators[b].reads
            stages = (self.stage_of[v] for v in reads if v in self.stage_of and v not in self.long)
            yield max(stages, default=None)

    def _find_bytes_at(self) -> list[int]:
        """The bytes at each step, with the values of its stage that later steps read."""
        problem = self.problem
        fixed = BackwardBytes.of(problem)
        found = [a + b for a, b in zip(fixed.at, self._find_saved_bytes(), strict=True)]
        for stage, (first, last) in self._find_windows():
            wanted: set[int] = set()
            nbytes = 0
            for step in range(last, first - 1, -1):
                reads = {
                    v
                    for v in problem.operators[problem.backward[step]].reads
                    if self.stage_of.get(v) == stage and v not in self.always
                }
                found[step] += nbytes - sum(problem.nbytes[v] for v in reads & wanted)
                nbytes += sum(problem.nbytes[v] for v in reads - wanted)
                wanted |= reads
        return found

    def _find_most_inside(self) -> int:
        """The most bytes that a stage needs in the forward pass beside what passes its cuts."""
        live = np.array(ForwardBytes.of(self.problem).live) - self.problem.constant
        long = sum(self.problem.nbytes[v] for v in self.long)
        return max(0, int(live.max(initial=0)) - self.unit - long)
