"""A dynamic program over the values that each step finds in memory, from the last step back.

After the last step no value is needed. Before a step the needed values are those needed after it,
and those that it reads. Each of them is alive already, or is recomputed for the step: then the
inputs of its operator are needed in its place. The values needed before the first step are saved.

    steps           dz          dy, reads y         dx, reads x
    needed before   -, or x     y, or x, or -       x, or -         from right to left

Of two suffixes from one set of values the cheaper stays. A set that needs more than another, and
costs more, is left out. If no other set was left out, the best schedule is the optimum. Where
nothing is left, no schedule keeps within the budget. Schedules are those of Checkmate (Jain et al.,
MLSys 2020): each step recomputes in the order of the forward pass, each operator at most once.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from torchremat.planning.problem.fixed_bytes import BackwardBytes
from torchremat.planning.problem.problem import Part, Problem, Schedule
from torchremat.planning.problem.recomputation import Recomputation
from torchremat.planning.problem.replay import Decisions
from torchremat.planning.search.clock import NEVER, Deadline

ValueSet: TypeAlias = int
"""A set of values: bit i is `BackwardSearch.values[i]`."""

# Classes by bytes, from each of which the cheapest sets stay, so that large and small ones do.
_SIZES = 16
# Nominal seconds to branch one set: measured, at about 3 GHz.
_SECONDS_OF_SET = 1e-5
# The same to compare a pair of sets.
_SECONDS_OF_PAIR = 5e-8
# Sets up to which all pairs are compared to drop the worse: the comparisons grow as the square.
_MOST_COMPARED = 3000


@dataclass(frozen=True)
class Suffix:
    """The end of a schedule: from a set of values to the end of the backward pass.

    Attributes:
        step: for which it recomputes `operator` first.
        operator: `None` at the end.
    """

    seconds: float
    step: int = 0
    operator: int | None = None
    rest: "Suffix | None" = None


@dataclass(frozen=True)
class Limits:
    """Limits of a search. The first two decide its result, unless it runs out of time.

    Attributes:
        width: how many sets it goes on with from one operator to the next, roughly.
        states: how many it looks at; if it has not ended by then, it finds nothing.
        prompt: no value is recomputed before the step that wants it.
        free: the time that is added does not count.
    """

    width: int = 1 << 60
    states: int = 1 << 60
    deadline: Deadline = NEVER
    prompt: bool = False
    free: bool = False


@dataclass(frozen=True)
class BackwardFrontier:
    """The result of a search.

    Attributes:
        suffixes: by the values that must be saved for them.
        is_cut: whether sets were left out.
        is_through: whether it came to the first step, or to one before which no set is left.
        is_proof: whether it proved that no schedule fits.
    """

    suffixes: Mapping[ValueSet, Suffix]
    states: int
    is_cut: bool
    is_through: bool
    is_proof: bool


class BackwardSearch:
    """A search among the schedules of `problem`; values of up to `small` bytes take no memory.

    >>> from torchremat.planning.problem.problem import Operator, Part, Problem
    >>> a = Operator((), (0,), 1.0, Part.FORWARD)
    >>> b = Operator((0,), (1,), 1.0, Part.FORWARD)
    >>> db = Operator((1,), (2,), 1.0, Part.BACKWARD)
    >>> da = Operator((0, 2), (3,), 1.0, Part.BACKWARD)
    >>> search = BackwardSearch(Problem((a, b, db, da), (4, 4, 4, 4), gradients=frozenset({3})))
    >>> search.run(11, Limits()).is_proof       # da needs 12 bytes
    True
    >>> found = search.run(12, Limits())
    >>> [sorted(decisions.saved) for decisions in search.decisions(found)]     # the cheapest first
    [[0, 1], [0], [1], []]
    """

    def __init__(self, problem: Problem, small: int = 0) -> None:
        self.problem = problem
        self.bytes_of_steps = BackwardBytes.of(problem)
        operators, nbytes = problem.operators, problem.nbytes
        known = problem.known - problem.outputs
        self.values = sorted(
            (v for v in known if nbytes[v] > small), key=lambda v: (problem.producers[v], v)
        )
        self.makers = [problem.producers[v] for v in self.values]
        self._bits = {v: 1 << i for i, v in enumerate(self.values)}
        self._sizes = [nbytes[v] for v in self.values]
        self._nbytes: dict[ValueSet, int] = {0: 0}
        self.reads = [self._set_of(op.reads) for op in operators]
        self.writes = [self._set_of(op.writes) for op in operators]
        self.inside = [
            op.nbytes_inside + sum(nbytes[v] for v in op.writes if v in problem.outputs)
            for op in operators
        ]
        self.last_step_of = self._find_last_steps()

    @property
    def size(self) -> int:
        return len(self.values) * len(self.problem.backward)

    def _set_of(self, values: Iterable[int]) -> ValueSet:
        return sum(self._bits[v] for v in set(values) if v in self._bits)

    def values_of(self, chosen: ValueSet) -> set[int]:
        return {v for v, bit in self._bits.items() if bit & chosen}

    def nbytes_of(self, chosen: ValueSet) -> int:
        """The bytes of a set: those of its first value and, remembered, of the rest."""
        found = self._nbytes.get(chosen)
        if found is None:
            first = chosen & -chosen
            found = self._sizes[first.bit_length() - 1] + self.nbytes_of(chosen ^ first)
            self._nbytes[chosen] = found
        return found

    def _find_last_steps(self) -> list[int]:
        """The last step for which each operator may run again; -1 if for none."""
        operators, num = self.problem.operators, len(self.problem.backward)
        first = dict.fromkeys(range(len(operators)), num)
        for step, b in reversed(list(enumerate(self.problem.backward))):
            first.update((self.problem.producers[v], step) for v in operators[b].reads)
        for o in range(len(operators) - 1, -1, -1):
            if operators[o].part is not Part.BACKWARD:
                for u in operators[o].reads:
                    maker = self.problem.producers[u]
                    first[maker] = min(first[maker], first[o])
        last_steps: list[int] = []
        for o, op in enumerate(operators):
            free = op.repeatable and not op.draws
            once = op.repeatable or op.part is Part.EITHER_PASS
            last_steps.append(num if free else first[o] if once else -1)
        return last_steps

    def run(self, budget: int, limits: Limits, near: Schedule | None = None) -> BackwardFrontier:
        """Search for schedules within `budget` bytes.

        If sets must be left out, half of the places go to sets that the schedule `near` could reach
        for the least time. Its own sets stay in any case.
        """
        layer: dict[ValueSet, Suffix] = {0: Suffix(0.0)}
        guide = None if near is None else _Guide(self, near)
        search = _Search(self, budget, limits, guide)
        for step in range(len(self.problem.backward) - 1, -1, -1):
            layer = search.before(step, layer)
            if search.is_over or not layer:
                break
        is_through = not search.is_over
        all_seen = is_through and not search.is_cut and not limits.prompt and not self._is_partial
        return BackwardFrontier(
            layer, search.num_states, search.is_cut, is_through, all_seen and not layer
        )

    @property
    def _is_partial(self) -> bool:
        """Whether some schedules are left out: an operator that may run once has one last step."""
        return any(0 <= last < len(self.problem.backward) for last in self.last_step_of)

    @cached_property
    def again(self) -> Recomputation:
        return Recomputation(self.problem)

    def seconds_of(self, saved: ValueSet, suffix: Suffix) -> float:
        """The time of a suffix, and of operators of either pass that run forward to save for it."""
        operators = self.problem.operators
        late = self.again.missing(self.values_of(saved), ())
        return suffix.seconds + self.problem.seconds_of(
            o for o in late if operators[o].part is Part.EITHER_PASS
        )

    def decisions(self, found: BackwardFrontier) -> Iterator[Decisions]:
        """Decisions of the suffixes that were found, the least added time first."""
        suffixes = sorted(
            found.suffixes.items(), key=lambda item: (self.seconds_of(*item), item[0])
        )
        for saved, suffix in suffixes:
            yield self._decisions(saved, suffix)

    def _decisions(self, saved: ValueSet, suffix: Suffix) -> Decisions:
        problem, again = self.problem, self.again
        runs: dict[int, list[int]] = {}
        at: Suffix | None = suffix
        while at is not None and at.operator is not None:
            runs.setdefault(at.step, []).append(at.operator)
            at = at.rest
        later = [0] * (len(problem.backward) + 1)  # the values recomputed from each step on
        needed = [0] * (len(problem.backward) + 1)
        for step in range(len(problem.backward) - 1, -1, -1):
            needed[step] = needed[step + 1] | self.reads[problem.backward[step]]
            later[step] = later[step + 1]
            for o in sorted(runs.get(step, ()), reverse=True):
                needed[step] = needed[step] & ~self.writes[o] | self.reads[o]
                later[step] |= self.writes[o]
        drops: dict[int, frozenset[int]] = {}
        early: dict[int, frozenset[int]] = {}
        for step, b in enumerate(problem.backward):
            there = needed[step]
            run = runs.get(step, ())
            wanted = again.missing(again.reads[b], self.values_of(there))
            if set(run) - set(wanted):
                early[step] = frozenset(run) - frozenset(wanted)
            for o in run:
                there |= self.writes[o]
            gone = there & later[step + 1] & ~needed[step + 1]
            if gone:
                drops[step] = frozenset(self.values_of(gone))
        return Decisions(frozenset(self.values_of(saved)), drops, early)


State: TypeAlias = tuple[ValueSet, ValueSet]
"""The values needed after an operator of a step, and those that may yet be recomputed for it."""


class _Guide:
    """The seconds that separate other sets from those of one schedule."""

    def __init__(self, search: BackwardSearch, schedule: Schedule) -> None:
        self.search = search
        needed, step = 0, len(search.problem.backward)
        self.before = [0] * (step + 1)
        """The values that the schedule needs before each step."""
        self.passed = [{0} for _ in self.before]
        """Likewise, after each operator that it recomputes for a step."""
        self.seconds: list[dict[ValueSet, float]] = [{} for _ in self.before]
        for o in reversed(schedule.backward):
            if search.problem.operators[o].part is Part.BACKWARD:
                self.before[step] = needed
                step -= 1
                needed |= search.reads[o]
            else:
                needed = needed & ~search.writes[o] | search.reads[o]
            self.passed[step].add(needed)
        self.before[0] = needed

    def seconds_to(self, step: int, needed: ValueSet) -> float:
        known = self.seconds[step]
        total, lacking = 0.0, needed & ~self.before[step]
        while lacking:
            first = lacking & -lacking
            lacking ^= first
            if first not in known:
                v = self.search.values[first.bit_length() - 1]
                there = self.search.values_of(self.before[step])
                known[first] = self.search.again.seconds_again(v, there)
            total += known[first]
        return total


class _Search:
    def __init__(
        self, search: BackwardSearch, budget: int, limits: Limits, guide: _Guide | None
    ) -> None:
        self.search = search
        self.budget = budget
        self.limits = limits
        self.guide = guide
        operators = search.problem.operators
        self.seconds = [0.0 if limits.free else op.seconds for op in operators]
        self.num_states = 0
        self.is_cut = False
        self.is_over = False

    def before(self, step: int, after: Mapping[ValueSet, Suffix]) -> dict[ValueSet, Suffix]:
        search = self.search
        reads = search.reads[search.problem.backward[step]]
        room = self.budget - search.bytes_of_steps.at[step]
        waiting: dict[
            int, dict[State, Suffix]
        ] = {}  # by the last operator that may still be computed
        for needed, suffix in after.items():
            if search.nbytes_of(needed & ~reads) <= room:
                there = needed | reads
                self._put(waiting, there, reads if self.limits.prompt else there, suffix)
        room = self.budget - search.bytes_of_steps.before[step]
        while any(o >= 0 for o in waiting):
            o = max(waiting)
            states = self._cut(step, waiting.pop(o), room)
            self.num_states += len(states)
            self.limits.deadline.charge(_SECONDS_OF_SET * len(states))
            self._compute(waiting, step, o, states, room)
            late = self.limits.deadline.is_over
            if late or self.num_states > self.limits.states:
                self.is_over = True
                return {}
        done = {
            state: suffix
            for state, suffix in waiting.get(-1, {}).items()
            if search.nbytes_of(state[0]) <= room
        }
        left = _drop_worse(done)
        self.limits.deadline.charge(_SECONDS_OF_PAIR * len(done) * len(left))
        kept = self._cut(step, left, room)
        return {needed: suffix for (needed, _), suffix in kept.items()}

    def _compute(
        self,
        waiting: dict[int, dict[State, Suffix]],
        step: int,
        o: int,
        states: Mapping[State, Suffix],
        room: int,
    ) -> None:
        """Branch: the values of `o` are alive before the step, or `o` runs for it."""
        search = self.search
        writes, reads = search.writes[o], search.reads[o]
        may_run = step <= search.last_step_of[o]
        for (needed, open_), suffix in states.items():
            left = open_ & ~writes
            self._put(waiting, needed, left, suffix)
            if may_run and search.nbytes_of(needed | writes | reads) + search.inside[o] <= room:
                seconds = suffix.seconds + self.seconds[o]
                self._put(
                    waiting,
                    needed & ~writes | reads,
                    left | reads,
                    Suffix(seconds, step, o, suffix),
                )

    def _put(
        self,
        waiting: dict[int, dict[State, Suffix]],
        needed: ValueSet,
        open_: ValueSet,
        suffix: Suffix,
    ) -> None:
        o = self.search.makers[open_.bit_length() - 1] if open_ else -1
        states = waiting.setdefault(o, {})
        old = states.get((needed, open_))
        if old is None or suffix.seconds < old.seconds:
            states[needed, open_] = suffix

    def _cut(self, step: int, states: dict[State, Suffix], room: int) -> dict[State, Suffix]:
        """The cheapest states of each size, and the nearest to the guide, if there are too many."""
        width, guide = self.limits.width, self.guide
        if len(states) <= width:
            return states
        self.is_cut = True
        chosen: list[State] = []
        if guide is not None:
            width //= 2
            passed = guide.passed[step]
            chosen = [state for state in states if state[0] in passed]

            def seconds(state: State) -> tuple[float, State]:
                return states[state].seconds + guide.seconds_to(step, state[0]), state

            chosen += sorted(states, key=seconds)[:width]
        by_bytes: dict[int, list[State]] = {}
        for state in states:
            share = self.search.nbytes_of(state[0]) * _SIZES // (room + 1)
            by_bytes.setdefault(share, []).append(state)
        most = max(1, width // len(by_bytes))
        for alike in by_bytes.values():
            chosen += sorted(alike, key=lambda state: (states[state].seconds, state))[:most]
        return {state: states[state] for state in chosen}


def _drop_worse(states: dict[State, Suffix]) -> dict[State, Suffix]:
    """`states` without the dominated: those that cost as much as another, and need all it needs."""
    if len(states) > _MOST_COMPARED:
        return states
    ordered = sorted(states, key=lambda s: (states[s].seconds, s[0].bit_count(), s))
    kept: list[State] = []
    for state in ordered:
        other = ~state[0]
        if all(needed & other for needed, _ in kept):
            kept.append(state)
    return {state: states[state] for state in kept}
