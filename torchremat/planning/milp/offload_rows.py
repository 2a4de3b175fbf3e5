"""Rows of offloading in the integer program: for each value v, each interval j, and the link,

    o_v      v is offloaded                    l_vj     v is fetched in interval j
    z_out, z_in                                how long each pass waits for copies

    so that  s_v + o_v           <= 1
             sum of l_vj         <= o_v
             z_out + seconds of the forward pass   >= sum of o_v bytes_v / rate
             z_in + seconds of the backward pass   >= sum of o_v bytes_v / rate

A value that is fetched in an interval counts as if it had been computed in it. A value that a step
reads first is alive while the operator of the step before runs. Where that is the moment at which
an interval begins, the value is not fetched in this interval.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchremat.planning.milp.intervals import PeakPoint
from torchremat.planning.milp.linear_program import LinearProgram
from torchremat.planning.problem.problem import Problem

Terms = list[tuple[int, float]]


@dataclass(frozen=True)
class HostRows:
    """The variables of what is offloaded; none without a link.

    Attributes:
        offloaded: the variable o_v of each value that may be offloaded.
        loads: the variables l_vj.
        first: the first interval in which each value may be fetched.
        outer: the first interval stands for all before it.
    """

    moments: Sequence[PeakPoint]
    offloaded: Mapping[int, int]
    loads: Mapping[tuple[int, int], int]
    first: Mapping[int, int]
    outer: bool

    @classmethod
    def of(
        cls,
        problem: Problem,
        linear: LinearProgram,
        moments: Sequence[PeakPoint],
        saved: Mapping[int, int],
        spans: Mapping[int, tuple[int, int]],
        *,
        outer: bool,
    ) -> "HostRows":
        """Add them to `linear`; `saved` are the s_v, `spans` first and last intervals."""
        values = sorted(problem.offloadable & spans.keys())
        offloaded = {v: linear.variable(integral=True) for v in values}
        loads: dict[tuple[int, int], int] = {}
        for v in values:
            first, last = spans[v]
            for j in range(first, last + 1):
                loads[v, j] = linear.variable()
            fetched = [(loads[v, j], 1.0) for j in range(first, last + 1)]
            linear.at_most([*fetched, (offloaded[v], -1.0)], 0.0)
            linear.at_most([(saved[v], 1.0), (offloaded[v], 1.0)], 1.0)
        return cls(moments, offloaded, loads, {v: spans[v][0] for v in values}, outer)

    def build_offload_terms(self, v: int) -> Terms:
        return [(self.offloaded[v], 1.0)] if v in self.offloaded else []

    def build_fetch_terms(self, v: int, interval: int, step: int | None = None) -> Terms:
        """Whether `v` is fetched in an interval, so that `step` may be the first to read it."""
        if v not in self.offloaded:
            return []
        stands_for_all = self.outer and interval <= self.first[v]
        if stands_for_all:
            interval = self.first[v]
        elif step is not None and interval and PeakPoint(step - 1) <= self.moments[interval - 1]:
            return []
        variable = self.loads.get((v, interval))
        return [] if variable is None else [(variable, 1.0)]

    def build_fetch_terms_from(self, v: int, interval: int) -> Terms:
        if v not in self.offloaded:
            return []
        later = range(max(interval, self.first[v]), len(self.moments) + 1)
        return [(self.loads[v, j], 1.0) for j in later if (v, j) in self.loads]

    def add_waiting(
        self, problem: Problem, linear: LinearProgram, passes: Iterable[tuple[float, Terms]]
    ) -> None:
        """Rows for the link: of each pass the seconds that it takes anyway, and besides."""
        if not self.offloaded:
            return
        copies = [(i, problem.copy_seconds((v,))) for v, i in self.offloaded.items()]
        for seconds, more in passes:
            most = sum(c for _, c in copies) - seconds
            if most > 0:
                waiting = (linear.variable(most), most)
                linear.at_least([waiting, *more, *((i, -c) for i, c in copies)], -seconds)
