"""A step at many sizes of one dimension, from as few traces as can be.

A trace with a symbol for the size serves all sizes for which what it assumed is true. Where the
function needs the very size, each size has a trace of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchremat import _torch
from torchremat.core.interrupts import hold_interrupts
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.planning.api import PlannedFunction
from torchremat.planning.budget_job import MadePlan
from torchremat.planning.cost_model import CostModel, StepDevice
from torchremat.planning.fitting.dimension import Dimension
from torchremat.planning.memory.resident_bytes import (
    OptimizerLike,
    Resident,
    input_tensors,
    state_tensors,
)
from torchremat.planning.memory.update_bytes import steps_already
from torchremat.planning.planner import Planner
from torchremat.planning.step.planned_step import PlannedStep
from torchremat.planning.step.traced_step import WholeGraphPolicy, region_of
from torchremat.remat.program.region import Region

# The largest size that is looked at. More elements than that have no device.
MOST_SIZE = 2**30
# Traces with symbols after which each further size has a trace of its own: a function that branches
# on sizes has few branches, or needs every size. Chosen by hand.
_MOST_SYMBOLIC = 3


@dataclass(frozen=True)
class FitOptions:
    """The options of `fit` that make a planner."""

    optimizer: OptimizerLike = None
    cost_model: CostModel | None = None
    device: str | torch.device | None = None


@dataclass(frozen=True, eq=False)
class TracedCall:
    """A function with its arguments, of which each trace is of other sizes."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    options: FitOptions

    def trace(self, dimension: Dimension | None, size: int, *, symbolic: bool) -> Region:
        args, kwargs = self.args, dict(self.kwargs)
        choose = None
        if dimension is not None:
            args, kwargs = dimension.resize(args, kwargs, size)
            choose = dimension.inputs_at(size, symbolic=symbolic)
        gpu = self._step_device().gpu
        return region_of(self.fun, args, kwargs, WholeGraphPolicy(), choose, gpu)

    def _step_device(self) -> StepDevice:
        options = self.options
        return StepDevice.of(self.fun, self.args, self.kwargs, options.cost_model, options.device)

    def plan_of(self, region: Region) -> PlannedFunction:
        options = self.options
        model = self._step_device().model_of(region)
        optimizer = options.optimizer
        resident = Resident.of(region, optimizer) if optimizer else Resident(input_tensors(region))
        made = PlannedFunction(region, model, "auto", resident, offload=False)
        return made.with_updates(optimizer) if steps_already(optimizer) else made


@dataclass(frozen=True, eq=False)
class _Symbolic:
    """A trace with a symbol for the size in each place."""

    region: Region
    planned: PlannedFunction

    def sizes(self, size: int) -> Sizes:
        assert self.region.dynamic is not None
        return dict.fromkeys(self.region.dynamic.traced_sizes, size)

    def holds(self, size: int) -> bool:
        return self.region.holds(self.sizes(size))

    def planner(self, size: int, optimizer: OptimizerLike) -> Planner:
        sizes = self.sizes(size)
        with _torch.assume_sizes(sizes):
            resident = sum(input_tensors(self.region)) + sum(state_tensors(self.region, optimizer))
        return self.planned.planner.at(sizes, resident)


class SizedSteps:
    """The step of a call at sizes of a dimension; each is traced when it is first needed.

    Attributes:
        num_traces: how many traces there were.
        why_each: why sizes have traces of their own, if they have.
        refused: what the function, or PyTorch, raised at sizes that it does not take.
    """

    def __init__(self, call: TracedCall, dimension: Dimension) -> None:
        self.call = call
        self.dimension = dimension
        self.num_traces = 0
        self.why_each = ""
        self.refused: dict[int, Exception] = {}
        self._symbolic: list[_Symbolic] = []
        self._planners: dict[int, Planner] = {}
        self._traced: dict[int, PlannedFunction] = {}

    def at(self, size: int) -> Planner | None:
        """The planner of the step at this size; `None` if the function does not take it."""
        if size not in self._planners and size not in self.refused:
            with hold_interrupts():  # around `except`, which would take one for a refusal
                try:
                    self._planners[size] = self._find(size)
                except Exception as error:
                    if size == self.dimension.size:
                        raise
                    self.refused[size] = error
        return self._planners.get(size)

    def trace_at(self, size: int) -> PlannedFunction:
        """The step at this size from a trace of its own, whose plan holds for the function."""
        if size not in self._traced:
            self.num_traces += 1
            region = self.call.trace(self.dimension, size, symbolic=False)
            self._traced[size] = self.call.plan_of(region)
        return self._traced[size]

    def branch_after(self, size: int) -> int | None:
        """The first larger size for which the trace at `size` does not hold; `None` if all hold."""
        trace = next((trace for trace in self._symbolic if trace.holds(size)), None)
        if trace is None:
            return None
        low, high = size, 2 * size
        while trace.holds(high):
            if high > MOST_SIZE:
                return None
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if trace.holds(middle) else (low, middle)
        return high

    def distrust_symbols(self, why: str) -> None:
        """Trace each size by itself from now on."""
        self.why_each = why
        self._symbolic.clear()
        self._planners = {size: made.planner for size, made in self._traced.items()}

    def _find(self, size: int) -> Planner:
        known = next((trace for trace in self._symbolic if trace.holds(size)), None)
        why = ""
        if known is None and size > 1 and self._may_trace_symbols:
            known, why = self._trace_symbolic(size)
        if known is not None:
            return known.planner(size, self.call.options.optimizer)
        planner = self.trace_at(size).planner  # if that raises, no symbol is at fault
        self.why_each = self.why_each or why
        return planner

    @property
    def _may_trace_symbols(self) -> bool:
        return not self.why_each and len(self._symbolic) < _MOST_SYMBOLIC

    def _trace_symbolic(self, size: int) -> tuple[_Symbolic | None, str]:
        """A trace with a symbol that serves `size`, or why there is none."""
        self.num_traces += 1
        with hold_interrupts():  # as above
            try:
                region = self.call.trace(self.dimension, size, symbolic=True)
                made = _Symbolic(region, self.call.plan_of(region))
            except Exception as error:  # an operator that knows no symbols, or the user's fault
                kind = type(error).__name__
                return None, f"a trace with a symbol raised {kind}: {first_line_of(error)}"
        if region.dynamic is None or region.dynamic.fixed or not made.holds(size):
            return None, "the function needs the very size, as int(x.shape[0]) does"
        self._symbolic.append(made)
        return made, ""


def first_line_of(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def on_step(planner: Planner, found: PlannedStep) -> PlannedStep:
    """The costs at one size of a schedule that was found at another."""
    return planner.evaluate(MadePlan(found.step, found.schedule).on(planner.step))
