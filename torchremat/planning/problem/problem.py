"""A training step as numbers, and what a schedule of it costs. No tensors, no graphs.

A step is a list of operators that read and write *values*: storages of so many bytes. Some
operators run forward; some run backward and need cotangents. Others, between them, run backward and
need none, as the cosine for the derivative of a sine: these may run in either pass. Inputs and
parameters, which live longer than the step, are no values.

    operators   0 forward   reads -    writes 0        y = mm(x, w)
                1 forward   reads 0    writes 1        z = sin(y)       1 is an output
                2 either    reads 0    writes 2        c = cos(y)
                3 backward  reads 2    writes 3        g = mul(ct, c)
                4 backward  reads 3    writes 4        dw = mm(x.T, g)  4 is a gradient

A schedule says which values the forward pass saves, and in which order operators run backward:
those of the backward pass once, the others as often as needed.

Where there is a link to a host, values may be offloaded: copied to the host when they are made, and
back before they are read again, while operators run.

    forward     a = f(x)    b = g(a)     c = h(b)       a is alive until b and its copy are made
    backward    dc          db           da, reads a    a is fetched while db runs
"""

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


class Part(enum.Enum):
    """When an operator runs: forward, backward, or backward though it needs no cotangent."""

    FORWARD = "forward"
    EITHER_PASS = "either pass"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator as numbers.

    Attributes:
        reads: the values that it reads, each once.
        writes: the values that it writes, in memory of their own.
        draws: whether it draws random numbers. It may draw them a second time, from the state of
            the generator; values drawn in the backward pass are alive to their last use.
        nbytes_inside: bytes that it needs while it runs, besides what it reads and writes.
        in_order: whether it may not change places with others that have this: it draws random
            numbers, or communicates.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    seconds: float
    part: Part
    repeatable: bool = True
    draws: bool = False
    nbytes_inside: int = 0
    in_order: bool = False


@dataclass(frozen=True)
class Problem:
    """A step: operators in the order in which they run without rematerialisation.

    Attributes:
        operators: first those of the forward pass, then the others.
        nbytes: of each value.
        outputs: values that the caller has from when they are made to the end of the step.
        gradients: likewise, of the backward pass.
        written: values alive to the end of the forward pass, where they are written to inputs.
        constant: bytes that are alive in the forward and the backward pass, whatever is decided.
        backward_constant: those alive in the backward pass besides: cotangents.
        backward_order: the order in which the operators run that need cotangents, if not that of
            `operators`.
        numbers: those that the operators have in the step, if they are in another order here.
        host_bytes_per_second: of the link to the host, each way; without one nothing is offloaded.
        least_offload: bytes of the smallest value that is worth a copy.
    """

    operators: tuple[Operator, ...]
    nbytes: tuple[int, ...]
    outputs: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()
    constant: int = 0
    backward_constant: int = 0
    backward_order: tuple[int, ...] | None = None
    numbers: tuple[int, ...] | None = None
    host_bytes_per_second: float | None = None
    least_offload: int = 0

    @cached_property
    def producers(self) -> tuple[int, ...]:
        found = [-1] * len(self.nbytes)
        for o, operator in enumerate(self.operators):
            for v in operator.writes:
                found[v] = o
        return tuple(found)

    @cached_property
    def forward(self) -> tuple[int, ...]:
        return tuple(o for o, op in enumerate(self.operators) if op.part is Part.FORWARD)

    @cached_property
    def backward(self) -> tuple[int, ...]:
        if self.backward_order is not None:
            return self.backward_order
        return tuple(o for o, op in enumerate(self.operators) if op.part is Part.BACKWARD)

    @cached_property
    def known(self) -> frozenset[int]:
        """The values that need no cotangent."""
        return frozenset(
            v for op in self.operators if op.part is not Part.BACKWARD for v in op.writes
        )

    @cached_property
    def needed(self) -> frozenset[int]:
        """The known values that operators of the backward pass read."""
        return self.known.intersection(v for o in self.backward for v in self.operators[o].reads)

    @cached_property
    def offloadable(self) -> frozenset[int]:
        """The values that may be offloaded: none without a link, no output, and no small one.

        They are of the forward pass: what only the backward pass reads stays where it is.
        """
        if self.host_bytes_per_second is None:
            return frozenset()
        made = {v for o in self.forward for v in self.operators[o].writes} - self.outputs
        return frozenset(v for v in made if self.nbytes[v] >= max(self.least_offload, 1))

    def seconds_of(self, operators: Iterable[int]) -> float:
        return sum(self.operators[o].seconds for o in operators)

    @cached_property
    def step_seconds(self) -> float:
        """The time of a step in which nothing is recomputed."""
        return self.seconds_of(range(len(self.operators)))

    def copy_seconds(self, values: Iterable[int]) -> float:
        assert self.host_bytes_per_second is not None
        return sum(self.nbytes[v] for v in values) / self.host_bytes_per_second


@dataclass(frozen=True)
class Schedule:
    """The values that the forward pass saves, and the operators of both passes in order."""

    saved: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    offloaded: tuple[int, ...] = ()


@dataclass(frozen=True)
class Costs:
    """Bytes and seconds of a schedule.

    Attributes:
        live: bytes alive while each operator runs, forward and then backward.
        added_seconds: the time of the operators that run more often than without
            rematerialisation, and that in which nothing runs but the link.
        link_seconds: the second of these.
    """

    live: tuple[int, ...]
    added_seconds: float
    link_seconds: float = 0.0

    @property
    def peak(self) -> int:
        return max(self.live, default=0)


class ScheduleError(ValueError):
    """A schedule in which an operator reads a value that is not there."""


def costs_of(problem: Problem, schedule: Schedule) -> Costs:
    """The bytes alive at each operator of `schedule`, and the time that it adds.

    A value is alive from when it is written to the last operator that reads it, or that it is
    saved for. If it is written a second time, it counts as another value from then on. Raises
    `ScheduleError` if a value is read that is not alive.

    An offloaded value is alive to its last operator in the forward pass. It is alive at least to
    the end of the next `Part.FORWARD` operator, by when its copy is done. In the backward pass it
    is fetched once, before it is first read: while the operator before runs that needs cotangents,
    or at the start if there is none. The link carries what is offloaded once each way, beside
    operators: each pass takes as long as its operators or its copies, whichever take longer.
    """
    check_schedule(problem, schedule)
    return costs_unchecked(problem, schedule)


def costs_unchecked(problem: Problem, schedule: Schedule) -> Costs:
    """`costs_of` a schedule that was checked, or made by `replay_of`."""
    live = count_live(problem, schedule)
    counts = Counter((*schedule.forward, *schedule.backward))
    added = sum((counts[o] - 1) * op.seconds for o, op in enumerate(problem.operators) if counts[o])
    link = _link_seconds(problem, schedule) if schedule.offloaded else 0.0
    return Costs(tuple(live), added + link, link)


def count_live(problem: Problem, schedule: Schedule) -> list[int]:
    """The bytes alive at each operator."""
    live = _count_passing(problem, schedule)
    _add_lasting(problem, schedule, live)
    return live


def _count_passing(problem: Problem, schedule: Schedule) -> list[int]:
    """The bytes alive at each operator, without outputs, gradients and constants."""
    num_forward = len(schedule.forward)
    order = (*schedule.forward, *schedule.backward)
    lasting = problem.outputs | problem.gradients
    live = [0] * len(order)
    wanted: set[int] = set()  # values that are read later
    nbytes = problem.nbytes
    total = 0
    ends, fetched = _schedule_copies(problem, schedule) if schedule.offloaded else ({}, {})
    ends[num_forward - 1] = [*ends.get(num_forward - 1, ()), *problem.written, *schedule.saved]
    for i in range(len(order) - 1, -1, -1):
        if i in ends:
            for v in ends[i]:
                if v not in wanted and v not in lasting:
                    wanted.add(v)
                    total += nbytes[v]
        op = problem.operators[order[i]]
        for v in op.reads:
            if v not in wanted and v not in lasting:
                wanted.add(v)
                total += nbytes[v]
        own = total + op.nbytes_inside
        for v in op.writes:
            if v in wanted:
                wanted.discard(v)
                total -= nbytes[v]
            else:
                own += nbytes[v]
        live[i] = own
        if i in fetched:
            wanted.difference_update(fetched[i])
            total -= sum(nbytes[v] for v in fetched[i])
    return live


def _add_lasting(problem: Problem, schedule: Schedule, live: list[int]) -> None:
    """Add what is alive until the end: it counts from when it is first written."""
    num_forward, nbytes = len(schedule.forward), problem.nbytes
    lasting = problem.outputs | problem.gradients
    made = problem.constant
    first: set[int] = set()
    for i, o in enumerate((*schedule.forward, *schedule.backward)):
        if i == num_forward:
            made += problem.backward_constant
        for v in problem.operators[o].writes:
            if v in lasting and v not in first:
                first.add(v)
                live[i] -= nbytes[v]
                made += nbytes[v]
        live[i] += made


Moments = dict[int, list[int]]
"""Values by positions in the order of both passes."""


def _schedule_copies(problem: Problem, schedule: Schedule) -> tuple[Moments, Moments]:
    operators, left = problem.operators, set(schedule.offloaded)
    copied: Moments = {}
    writing: list[int] = []
    for i, o in enumerate(schedule.forward):
        if operators[o].part is Part.FORWARD and writing:
            copied[i] = writing
            writing = []
        writing += left.intersection(operators[o].writes)
        left.difference_update(operators[o].writes)
    if writing:
        copied.setdefault(len(schedule.forward) - 1, []).extend(writing)
    fetched: Moments = {}
    left = set(schedule.offloaded)
    before = len(schedule.forward)  # where the last operator ran that needs cotangents
    for i, o in enumerate(schedule.backward, len(schedule.forward)):
        read = left.intersection(operators[o].reads)
        if read:
            fetched.setdefault(before, []).extend(read)
        left -= read
        left.difference_update(operators[o].writes)
        if operators[o].part is Part.BACKWARD:
            before = i
    return copied, fetched


def _link_seconds(problem: Problem, schedule: Schedule) -> float:
    copying = problem.copy_seconds(schedule.offloaded)
    passes = (schedule.forward, schedule.backward)
    return sum(max(0.0, copying - problem.seconds_of(operators)) for operators in passes)


def check_schedule(problem: Problem, schedule: Schedule) -> None:
    """Raise `ScheduleError` unless operators find what they read, and all that must run does."""
    there: set[int] = set()
    for o in schedule.forward:
        _check_reads(problem, o, there)
    missing = set(schedule.saved) - there
    if missing:
        raise ScheduleError(f"saved, but not made by the forward pass: values {sorted(missing)}")
    _check_offloaded(problem, schedule, there)
    there &= problem.outputs | {*schedule.saved, *schedule.offloaded}
    for o in schedule.backward:
        _check_reads(problem, o, there)
    for part, ran in ((problem.forward, schedule.forward), (problem.backward, schedule.backward)):
        lacking = set(part) - set(ran)
        if lacking:
            raise ScheduleError(f"operators {sorted(lacking)} do not run")


def _check_offloaded(problem: Problem, schedule: Schedule, there: set[int]) -> None:
    for wrong, what in (
        (set(schedule.offloaded) - problem.offloadable, "which may not be"),
        (set(schedule.offloaded) - there, "but not made by the forward pass"),
        (set(schedule.offloaded).intersection(schedule.saved), "and saved besides"),
    ):
        if wrong:
            raise ScheduleError(f"offloaded, {what}: values {sorted(wrong)}")


def _check_reads(problem: Problem, o: int, there: set[int]) -> None:
    op = problem.operators[o]
    for v in op.reads:
        if v not in there:
            raise ScheduleError(f"operator {o} reads value {v}, which is not there")
    there.update(op.writes)
