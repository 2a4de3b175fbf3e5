"""Pictures as data: the values of a step, the kind of each, and the bytes alive over time."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torchremat.planning.memory.timeline import Timeline

KINDS: Mapping[str, str] = {
    "saved": "saved in the forward pass for the backward pass",
    "offloaded": "saved on the host for the backward pass",
    "recomputed": "computed once more in the backward pass",
    "temporary": "freed once it is read",
    "output": "what the step gives",
    "gradient": "a gradient that the step gives",
    "input": "an argument or a buffer",
    "parameter": "a parameter",
    "constant": "a number or a tensor of the program",
    "view": "in the memory of another value: no bytes of its own",
}
"""The kinds of values, each with its meaning."""


@dataclass(frozen=True, slots=True)
class DrawnValue:
    """A node of a graph: a value, or the call of an operator that gives several.

    Attributes:
        label: what people call it: an argument's or a parameter's name, else its operator.
        op: the operator (`aten.mm.default`), `''` for what none computes.
        phase: `"forward"` or `"backward"`: the graph that computes it first.
        kind: one of `KINDS`.
        module: the qualified name of the module that ran the operator; of a backward operator, the
            module whose derivative it is part of.
        source: the user's line, `''` if unknown.
        aval: shape and dtype, as in `f32[8,16]`.
        nbytes: the bytes of its storage; 0 for a view.
        seconds: the time of the operator by a cost model, if there is one.
        reason: why it is saved, recomputed or offloaded.
        reads: the positions of the values that it reads.
    """

    name: str
    label: str
    op: str
    phase: str
    kind: str
    module: str
    source: str
    aval: str
    nbytes: int
    seconds: float | None
    reason: str
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Picture:
    """The values of a step, in the order in which they are computed, forward pass first.

    Attributes:
        figures: its numbers, each with what it is.
        timeline: the bytes alive at each operator, if known.
        resident: bytes that are there all the time, beside those of the timeline: parameters and
            inputs.
        resident_counts: whether the peak and the budget are with these.
        levels: bytes to mark in the timeline (a budget, the peak without rematerialisation).
    """

    title: str
    figures: tuple[tuple[str, str], ...]
    values: tuple[DrawnValue, ...]
    timeline: Timeline | None = None
    resident: tuple[tuple[str, int], ...] = ()
    resident_counts: bool = False
    levels: tuple[tuple[str, int], ...] = ()

    @cached_property
    def positions(self) -> dict[str, int]:
        return {value.name: i for i, value in enumerate(self.values)}

    def position_of(self, name: str) -> int | None:
        """The position of the value that a timeline calls `name`.

        What the timeline tells of the inside of a call (`call/node`), or of an output that nobody
        takes (`call[1]`), is that call's.
        """
        for known in (name, name.partition("/")[0], name.partition("[")[0]):
            if known in self.positions:
                return self.positions[known]
        return None

    def totals(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for kind in KINDS:
            values = [value.nbytes for value in self.values if value.kind == kind]
            if values:
                found[kind] = sum(values)
        return found
