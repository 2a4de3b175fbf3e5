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
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torchremat.planning.problem.flat_step import FlatStep


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
    def flat(self) -> FlatStep:
        """The operators and values in arrays."""
        return FlatStep.of(
            [op.reads for op in self.operators],
            [op.writes for op in self.operators],
            [op.nbytes_inside for op in self.operators],
            self.nbytes,
            self.outputs | self.gradients,
        )

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
    def known_reads(self) -> tuple[tuple[int, ...], ...]:
        """The known values that each operator reads."""
        return tuple(tuple(v for v in op.reads if v in self.known) for op in self.operators)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The operators that read each value."""
        found: list[list[int]] = [[] for _ in self.nbytes]
        for o, op in enumerate(self.operators):
            for v in op.reads:
                found[v].append(o)
        return tuple(map(tuple, found))

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

    @cached_property
    def early_gradients(self) -> frozenset[int]:
        """The gradients that the forward pass makes, as tiles of a loss do.

        The last operator reads them. A schedule may free and recompute them, but that rarely pays:
        all that leads to them is then recomputed at the end of the step.
        """
        last = self.operators[self.backward[-1]] if self.backward else None
        if last is None or last.writes:
            return frozenset()
        made = self.operators
        return frozenset(v for v in last.reads if made[self.producers[v]].part is Part.FORWARD)

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
