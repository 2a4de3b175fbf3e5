"""`fit`: what makes a step fit into the memory of a device, and the largest size that fits."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from torchremat.core.formatting import ShownInNotebook, human_bytes, human_seconds, percent, table
from torchremat.core.progress import show_progress
from torchremat.core.source import name_of
from torchremat.errors import ArgumentTypeError, BudgetError
from torchremat.nn.wrap import wrap
from torchremat.planning.api import PlannedFunction
from torchremat.planning.budget import Budget
from torchremat.planning.budget_policy import memory_budget
from torchremat.planning.cost_model import CostModel
from torchremat.planning.fitting.dimension import Dimension
from torchremat.planning.fitting.largest_size import LargestSize, SizeSearch
from torchremat.planning.fitting.sized_steps import (
    FitOptions,
    SizedSteps,
    TracedCall,
    first_line_of,
    on_step,
)
from torchremat.planning.from_plan import from_plan
from torchremat.planning.memory.resident_bytes import OptimizerLike
from torchremat.planning.plan import Plan
from torchremat.planning.planner import Planner
from torchremat.planning.step.planned_step import PlannedStep
from torchremat.policies.policy import Policy
from torchremat.remat.tracing.input_labels import refuse_misspelt


@dataclass(frozen=True)
class Fit(ShownInNotebook):
    """The result of `fit`: a step that fits, with its plan, and what that costs.

    All bytes are those of the whole device: parameters, buffers, arguments, the optimizer's state,
    and the peak of the step with its gradients.

    Attributes:
        memory: the bytes to fit into.
        peak_bytes: the most bytes that the step takes.
        resident_bytes: those of them that are there before the step.
        plain_bytes: the bytes that the step would take without a plan.
        plan: the cheapest plan; `None` if the step fits without one.
        seconds: the time of the step without a plan, by the cost model.
        added_seconds: the time that the plan adds.
        device: the cost model of the times, as text.
        maximize: the dimension whose size was sought, if there was one.
        size: the largest size that fits.
        plain_size: the largest size that fits without a plan; 0 if none does.
        most_size: the largest size that a lower bound of the peak allows, where memory grows with
            the size. No plan was found for sizes above `size`.
        unit: sizes are multiples of it, since the function refuses others.
        next_bytes: the least memory that was found for the next size, or a lower bound where that
            is above `memory` or no time was left. `None`: the function refuses that size.
        num_traces: how many times the function was traced.
        notes: what to know besides, a sentence each.
        applied: whether the model was wrapped.
    """

    memory: int
    peak_bytes: int
    resident_bytes: int
    plain_bytes: int
    plan: Plan | None
    seconds: float
    added_seconds: float
    device: str
    maximize: str | None = None
    size: int | None = None
    plain_size: int | None = None
    most_size: int | None = None
    unit: int = 1
    next_bytes: int | None = None
    num_traces: int = 1
    notes: tuple[str, ...] = field(default=(), repr=False)
    applied: bool = False

    @property
    def fits(self) -> bool:
        """Whether the step takes no more than `memory`."""
        return self.peak_bytes <= self.memory

    @property
    def added_percent(self) -> float:
        """The time that the plan adds, in percent of the step's time without a plan."""
        return 100 * self.added_seconds / self.seconds if self.seconds else 0.0

    @property
    def policy(self) -> Policy | None:
        """The policy for `nn.wrap` or `checkpoint`; `None` if the step fits without one.

        It is a budget of all the memory, so that it also holds for smaller steps. A plan with
        updates in the backward pass is itself the policy.
        """
        if self.plan is None:
            return None
        if self.plan.updates_in_backward:
            return from_plan(self.plan)
        return memory_budget(self.memory, resident=self.resident_bytes)

    def __repr__(self) -> str:
        size = "" if self.maximize is None else f"{self.maximize} {self.size}, "
        takes = f"{human_bytes(self.peak_bytes)} of {human_bytes(self.memory)}"
        added = percent(self.added_seconds, self.seconds)
        cost = "without a plan" if self.plan is None else f"{added} of the time added"
        return f"Fit({size}{takes}, {cost})"

    def __str__(self) -> str:
        added = percent(self.added_seconds, self.seconds)
        step = human_bytes(self.peak_bytes - self.resident_bytes)
        rows = [
            *self._size_rows(),
            ("memory", human_bytes(self.peak_bytes), f"of {human_bytes(self.memory)}"),
            ("  there before the step", human_bytes(self.resident_bytes),
             "parameters, buffers, arguments, optimizer state"),
            ("  peak of the step", step, "values and gradients"),
            ("without a plan", human_bytes(self.plain_bytes), ""),
            ("added time", human_seconds(self.added_seconds),
             f"{added} of the step's {human_seconds(self.seconds)}"),
            ("plan", self._describe_plan(), ""),
        ]  # fmt: skip
        head = f"fits into {human_bytes(self.memory)}, times of {self.device}"
        return "\n".join([head, *table(rows, numeric=()), *self.notes])

    def _size_rows(self) -> list[tuple[str, str, str]]:
        if self.maximize is None:
            return []
        rows = [(f"largest {self.maximize}", str(self.size), f"{self.plain_size} without a plan")]
        if self.next_bytes is not None and self.size is not None:
            is_found = self.size != self.most_size and self.next_bytes > self.memory
            what = "the least that was found" if is_found else "a lower bound"
            following = f"  {self.maximize} {self.size + self.unit}"
            rows.append((following, human_bytes(self.next_bytes), what))
        if self.most_size != self.size:
            rows.append(("  lower bound allows", str(self.most_size), "no plan was found for it"))
        return rows

    def _describe_plan(self) -> str:
        if self.plan is None:
            return "none is needed"
        decisions = list(self.plan.decisions.values())
        counts = ((what, decisions.count(what)) for what in ("saved", "recomputed"))
        return ", ".join(f"{n} {what}" for what, n in counts)


def fit(
    fun_or_module: Callable[..., Any],
    *args: Any,
    memory: int | str,
    optimizer: OptimizerLike = None,
    maximize: str | None = None,
    apply: bool = False,
    cost_model: CostModel | None = None,
    device: str | torch.device | None = None,
    seconds: float | None = None,
    **kwargs: Any,
) -> Fit:
    """Fit a training step into the memory of a device: the cheapest plan, or the largest size.

    Without `maximize` it finds the plan that adds the least time, or none where plain PyTorch fits.
    With it, the largest size of a dimension of the arguments for which there is such a plan.
    Nothing runs, and nothing the size of the model is allocated: it may be on the meta device.
    Where the function can be traced with a symbol for the size, one such trace serves all sizes.
    The size that was found is then traced by itself, and planned. Without `maximize`, a step that
    fits in no other way has updates in the backward pass, as `plan` has them. With `maximize` they
    count if `optimizer` steps there already (`optim.step_in_backward`).

    What depends on values is not seen: an index out of range is not a refusal of a size.

    All bytes count: parameters, buffers, arguments, the optimizer's state, and the step with its
    gradients. What an optimizer allocates while it updates, and workspaces of kernels, do not.

    Args:
        fun_or_module: a function of trees of tensors, or an `nn.Module`.
        *args: its arguments, an example batch; only shapes, dtypes and devices matter.
        memory: the bytes of the device (an `int`, or text such as `"24GiB"`).
        optimizer: an optimizer or its class; the bytes of its state are counted.
        maximize: `"batch"`, the leading dimension of the tensor arguments; `"length"`, their
            second; or dimensions of arguments by number, `"tokens.1"` or `"tokens.1, mask.2"`,
            which vary together. By name, those vary that are as large as that of the first
            argument. Sizes that the function refuses do not count: if it takes only multiples of
            4, say, one of those is found.
        apply: whether to wrap the model, in place, with `Fit.policy`. A model that fits without a
            plan stays as it is.
        cost_model: see `plan`.
        device: where the step is to run (`"cuda"`, `"h100"`); by default where the tensors are.
        seconds: the time of the search for the largest size, roughly; by default about six times
            that of a plan. If it is over, `Fit.notes` say from which size on not all were tried.
        **kwargs: keyword arguments of `fun_or_module`.

    Returns:
        The `Fit`: `print` shows it as a table.

    Raises:
        BudgetError: (a `RuntimeError`) with the least memory that would do, if nothing fits.
        TypeError: if `memory` is not a number of bytes, `maximize` is not text, or `apply` is given
            for a function; and where `plan` raises it.
        ValueError: if there is no such dimension, with the nearest names, or if the dimensions of
            `maximize` differ in size; and where `plan` raises it.

    >>> import torch
    >>> layers = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8))
    >>> model = torch.nn.Sequential(*layers).to("meta")
    >>> x = torch.empty(32, 64, device="meta")
    >>> found = fit(model, x, memory="2MiB", optimizer=torch.optim.AdamW, maximize="batch")
    >>> found.fits, found.size > found.plain_size > 32
    (True, True)
    """
    refuse_misspelt(fit, fun_or_module, kwargs)
    nbytes = Budget.of(memory).nbytes
    if nbytes is None:
        raise ArgumentTypeError(f"fit(memory={memory!r}): memory is bytes, or text such as '24GiB'")
    if apply and not isinstance(fun_or_module, nn.Module):
        raise ArgumentTypeError(
            f"fit(apply=True) wraps an nn.Module, and {name_of(fun_or_module)} is a function. "
            "Leave out apply, and write checkpoint(fun, policy=fit(...).policy)"
        )
    call = TracedCall(fun_or_module, args, kwargs, FitOptions(optimizer, cost_model, device))
    with show_progress(f"fitting into {human_bytes(nbytes)}") as tell:
        if maximize is None:
            found = _fit_given(call, nbytes)
        else:
            dimension = Dimension.of(maximize, fun_or_module, args, kwargs)
            found = _fit_largest(SizedSteps(call, dimension), nbytes, tell, seconds)
    if apply and found.policy is not None:
        assert isinstance(fun_or_module, nn.Module)
        wrap(fun_or_module, found.policy)
        found = replace(found, applied=True)
    return found


def _fit_given(call: TracedCall, memory: int) -> Fit:
    made = call.plan_of(call.trace(None, 0, symbolic=False))
    try:
        return _fit_of(made, memory)
    except BudgetError as error:
        updated, least = made.with_updates(call.options.optimizer), error.least_bytes
    if updated.updates:
        try:
            return _fit_of(updated, memory)
        except BudgetError as error:
            least = error.least_bytes
    raise _too_small(made.planner, memory, least, "the step")


def _fit_largest(
    steps: SizedSteps, memory: int, tell: Callable[[float], None], seconds: float | None
) -> Fit:
    found = SizeSearch(steps, memory, tell, seconds).run()
    fitted = _fit_found(steps, found, memory)
    if found.size and fitted is None:
        steps.distrust_symbols("a trace with a symbol for the size takes other bytes")
        found = SizeSearch(steps, memory, tell, seconds).run()
        fitted = _fit_found(steps, found, memory)
    if not found.size or fitted is None:
        smallest = steps.at(found.smallest)
        if smallest is None:
            raise steps.refused[found.smallest]
        least = smallest.peak_of(smallest.search(Budget(nbytes=memory)).planned)
        raise _too_small(smallest, memory, least, steps.dimension.describe(found.smallest))
    return replace(
        fitted,
        maximize=steps.dimension.name,
        size=found.size,
        plain_size=found.plain,
        most_size=found.most,
        unit=found.unit,
        next_bytes=found.next_bytes,
        num_traces=steps.num_traces,
        notes=_notes_of(steps, found),
    )


def _fit_found(steps: SizedSteps, found: LargestSize, memory: int) -> Fit | None:
    """The fit by a trace at the size; `None` if it takes other bytes than one with a symbol."""
    planner = steps.at(found.size) if found.size else None
    if planner is None:
        return None
    made = steps.trace_at(found.size)
    if planner.peak_of(planner.plain) != made.planner.peak_of(made.planner.plain):
        return None
    try:
        return _fit_of(made, memory, found.lowest)
    except BudgetError:  # its graph has other operators, and no plan for it was found
        return None


def _fit_of(made: PlannedFunction, memory: int, near: PlannedStep | None = None) -> Fit:
    planner, plan = made.planner, None
    if made.updates or planner.peak_of(planner.plain) > memory:
        schedule = None if near is None else on_step(planner, near).schedule
        plan = made.plan(Budget(nbytes=memory), f"fit(memory={memory})", schedule)
    baseline = made.baseline
    return Fit(
        memory=memory,
        peak_bytes=baseline.peak_bytes if plan is None else plan.peak_bytes,
        resident_bytes=made.resident,
        plain_bytes=baseline.peak_bytes,
        plan=plan,
        seconds=baseline.seconds,
        added_seconds=0.0 if plan is None else plan.recompute_seconds,
        device=repr(made.model),
    )


def _notes_of(steps: SizedSteps, found: LargestSize) -> tuple[str, ...]:
    notes, describe = [], steps.dimension.describe
    if steps.why_each:
        notes.append(f"Each size was traced by itself, since {steps.why_each}.")
    if found.unit > 1:
        notes.append(f"Only multiples of {found.unit} were tried: the function takes no others.")
    size = found.size + found.unit
    refusal = steps.refused.get(size)
    if refusal is not None:
        notes.append(f"{describe(size)} raises {type(refusal).__name__}: {first_line_of(refusal)}")
    if found.untried is not None:
        notes.append(
            f"The time of the search was over: from {describe(found.untried)} on, not all sizes "
            "were tried. Give more, seconds=600 say."
        )
    return tuple(notes)


def _too_small(planner: Planner, memory: int, least: int, what: str) -> BudgetError:
    plain = planner.peak_of(planner.plain)
    return BudgetError(
        f"fit(memory={human_bytes(memory)!r}): {what} does not fit. The least that was found is "
        f"{human_bytes(least)} ({least} bytes, {human_bytes(planner.resident)} of it parameters, "
        f"buffers, arguments and optimizer state), of {human_bytes(plain)} without a plan. Give "
        f"memory of at least {least}, a smaller batch, or an optimizer with less state",
        least,
    )
