"""A training step as numbers, and what a schedule of it costs. No tensors, no graphs.

A step is a list of operators that read and write *values*: storages of so many bytes. Some
operators run forward; some run backward and need cotangents; and some, between them, run backward
and need none (the cosine for the derivative of a sine), and so might as well run forward. What is
there before the step and after it, inputs and parameters, is no value.

    operators   0 forward   reads -    writes 0        y = mm(x, w)
                1 forward   reads 0    writes 1        z = sin(y)       1 is an output
                2 known     reads 0    writes 2        c = cos(y)
                3 backward  reads 2    writes 3        g = mul(ct, c)
                4 backward  reads 3    writes 4        dw = mm(x.T, g)  4 is a gradient

A schedule says which values are kept from the forward pass, and in which order operators run
backward: those of the backward pass once, the others as often as it takes.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


class Part(enum.Enum):
    """When an operator runs: forward, backward, or backward though it needs no cotangent."""

    FORWARD = "forward"
    KNOWN = "known"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator as numbers.

    Attributes:
        reads: the values that it reads, each once.
        writes: the values that it writes, in memory of their own.
        seconds: the time that it takes.
        part: when it runs.
        repeatable: whether it may run a second time.
        draws: whether it draws random numbers, again if it must from the state of the generator;
            its values, once drawn in the backward pass, are kept to their last use.
        nbytes_inside: bytes that it needs while it runs, besides what it reads and writes.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    seconds: float
    part: Part
    repeatable: bool = True
    draws: bool = False
    nbytes_inside: int = 0


@dataclass(frozen=True)
class Problem:
    """A step: operators in the order in which they run without rematerialisation.

    Attributes:
        operators: first those of the forward pass, then the others.
        nbytes: of each value.
        outputs: values that the caller holds from when they are made to the end of the step.
        gradients: likewise, of the backward pass.
        written: values held to the end of the forward pass: they are written back to inputs then.
        constant: bytes that are held in the forward and the backward pass, whatever is decided.
        backward_constant: those held in the backward pass besides: cotangents.
        backward_order: the operators that need cotangents in the order in which they are to run, if
            not that of `operators`.
    """

    operators: tuple[Operator, ...]
    nbytes: tuple[int, ...]
    outputs: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()
    constant: int = 0
    backward_constant: int = 0
    backward_order: tuple[int, ...] | None = None

    @cached_property
    def producers(self) -> tuple[int, ...]:
        """The operator that writes each value."""
        found = [-1] * len(self.nbytes)
        for o, operator in enumerate(self.operators):
            for v in operator.writes:
                found[v] = o
        return tuple(found)

    @cached_property
    def forward(self) -> tuple[int, ...]:
        """The operators of the forward pass."""
        return tuple(o for o, op in enumerate(self.operators) if op.part is Part.FORWARD)

    @cached_property
    def backward(self) -> tuple[int, ...]:
        """The operators of the backward pass that need cotangents, in order."""
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

    def seconds_of(self, operators: Iterable[int]) -> float:
        """The time that `operators` take together."""
        return sum(self.operators[o].seconds for o in operators)


@dataclass(frozen=True)
class Schedule:
    """What is kept from the forward pass, and the operators of both passes in order."""

    saved: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Costs:
    """What a schedule costs.

    Attributes:
        live: bytes alive while each operator runs, forward and then backward.
        added_seconds: the time of the operators that run more often than without
            rematerialisation.
    """

    live: tuple[int, ...]
    added_seconds: float

    @property
    def peak(self) -> int:
        """The most bytes alive at one time."""
        return max(self.live, default=0)


class ScheduleError(ValueError):
    """A schedule in which an operator reads a value that is not there."""


def costs_of(problem: Problem, schedule: Schedule) -> Costs:
    """The bytes alive at each operator of `schedule`, and the time that it adds.

    A value is alive from when it is written to the last operator that reads it, or that it is
    saved for; one that is written again is another from then on. Raises `ScheduleError` if a value
    is read that is not there.
    """
    check_schedule(problem, schedule)
    return costs_unchecked(problem, schedule)


def costs_unchecked(problem: Problem, schedule: Schedule) -> Costs:
    """`costs_of` a schedule that is known to be right."""
    num_forward = len(schedule.forward)
    order = (*schedule.forward, *schedule.backward)
    saved = frozenset(schedule.saved)
    held = problem.outputs | problem.gradients
    live = [0] * len(order)
    wanted: set[int] = set()  # values that are read later
    nbytes = problem.nbytes
    total = 0
    for i in range(len(order) - 1, -1, -1):
        if i == num_forward - 1:
            for v in problem.written | saved:
                if v not in wanted and v not in held:
                    wanted.add(v)
                    total += nbytes[v]
        op = problem.operators[order[i]]
        for v in op.reads:
            if v not in wanted and v not in held:
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
    # what is held until the end counts from when it is first written
    made = problem.constant
    first: set[int] = set()
    for i, o in enumerate(order):
        if i == num_forward:
            made += problem.backward_constant
        for v in problem.operators[o].writes:
            if v in held and v not in first:
                first.add(v)
                live[i] -= nbytes[v]
                made += nbytes[v]
        live[i] += made
    counts = [0] * len(problem.operators)
    for o in order:
        counts[o] += 1
    added = sum(
        (count - 1) * op.seconds
        for count, op in zip(counts, problem.operators, strict=True)
        if count
    )
    return Costs(tuple(live), added)


def check_schedule(problem: Problem, schedule: Schedule) -> None:
    """Raise `ScheduleError` unless operators find what they read, and all that must run does."""
    there: set[int] = set()
    for o in schedule.forward:
        _run(problem, o, there)
    missing = set(schedule.saved) - there
    if missing:
        raise ScheduleError(f"saved, but not made by the forward pass: values {sorted(missing)}")
    there &= problem.outputs | set(schedule.saved)
    for o in schedule.backward:
        _run(problem, o, there)
    for part, ran in ((problem.forward, schedule.forward), (problem.backward, schedule.backward)):
        lacking = set(part) - set(ran)
        if lacking:
            raise ScheduleError(f"operators {sorted(lacking)} do not run")


def _run(problem: Problem, o: int, there: set[int]) -> None:
    op = problem.operators[o]
    for v in op.reads:
        if v not in there:
            raise ScheduleError(f"operator {o} reads value {v}, which is not there")
    there.update(op.writes)


def plain_schedule(problem: Problem) -> Schedule:
    """The schedule without rematerialisation: what the backward pass reads is saved."""
    late = [o for o, op in enumerate(problem.operators) if op.part is not Part.FORWARD]
    made = {v for o in problem.forward for v in problem.operators[o].writes}
    read = {v for o in late for v in problem.operators[o].reads}
    return Schedule(tuple(sorted(made & read)), problem.forward, tuple(late))
