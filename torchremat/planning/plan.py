"""Plans: which values are saved and which recomputed, with the costs, and their JSON."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path

import torch
from torch import fx

from torchremat.autodiff.joint import Joint
from torchremat.autodiff.tiles.tile_joint import Tiling
from torchremat.core.formatting import ShownInNotebook, human_bytes, human_seconds, percent, table
from torchremat.errors import PlanError
from torchremat.graph.schedule import GraphSchedule
from torchremat.planning.cost_model import CostModel
from torchremat.planning.costs.device_rates import Rates
from torchremat.planning.memory.simulate import simulate
from torchremat.planning.memory.timeline import Timeline
from torchremat.planning.step.fingerprint import fingerprint_of
from torchremat.planning.step.order import Order, schedule_of
from torchremat.planning.step.plan_file import DECISIONS, FORMAT, VERSION, parse_plan


@dataclass(frozen=True)
class Figures:
    """Costs of a step: peak bytes, bytes saved for the backward pass, seconds, operations.

    Attributes:
        peak_bytes: the most bytes alive at one time.
        saved_bytes: the bytes that the forward pass saves for the backward pass.
        seconds: the time of the step by the cost model.
        flops: its floating-point operations.
        reserved_bytes: what PyTorch's caching allocator would take from a GPU for it.
    """

    peak_bytes: int
    saved_bytes: int
    seconds: float
    flops: int
    reserved_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Plan(ShownInNotebook):
    """The result of `plan`: which values are saved and which recomputed, with the costs.

    Attributes:
        budget: the limit of the peak, in bytes.
        peak_bytes: the most bytes alive at one time.
        saved_bytes: the bytes that the forward pass saves for the backward pass.
        recompute_seconds: the time that is added, by the cost model: of recomputation, and
            `link_seconds`.
        recompute_flops: the floating-point operations that are added.
        baseline: the same step without rematerialisation, a `Figures`.
        lower_bound_seconds: no schedule that keeps within the budget adds less, with the backward
            pass in this order and a forward pass that runs nothing twice.
        decisions: for each value of the forward pass that the backward pass needs, by the name of
            its node: `saved`, `recomputed` or `offloaded`; `tiled` for one that is never whole.
        device: the cost model of the times, as text.
        rates: the rates of that model; `None` in a plan that was saved before it had them.
        offloaded_bytes: the bytes that are copied to the host.
        link_seconds: the time in which the step waits for copies to the host and back.
        reserved_bytes: what PyTorch's caching allocator would take from a GPU for the peak; 0 in
            files of an earlier torchremat.
        workspace_bytes: what to allow beside the peak for workspaces of cuBLAS, cuDNN and kernels
            of attention; 0 without a GPU.
        gap_reason: why `gap` is large; empty up to 5 %.
        tiling: how many tiles there are, and segments of loops; `None` without any.
        updates_in_backward: how many parameters `optim.step_in_backward` updates in the backward
            pass, each as soon as its gradient is there; 0 if the budget needs none.
        state_on_host_bytes: what of the optimizer's state lies in the host's memory meanwhile, by
            `step_in_backward(optimizer, offload=True)`.
    """

    budget: int
    peak_bytes: int
    saved_bytes: int
    recompute_seconds: float
    recompute_flops: int
    baseline: Figures
    lower_bound_seconds: float
    decisions: Mapping[str, str] = field(repr=False)
    device: str
    order: Order = field(repr=False)
    graph: tuple[str, ...] = field(repr=False)
    """The joint graph, a line for each node."""
    offloaded_bytes: int = 0
    link_seconds: float = 0.0
    reserved_bytes: int = 0
    workspace_bytes: int = 0
    gap_reason: str = ""
    tiling: Tiling | None = None
    updates_in_backward: int = 0
    state_on_host_bytes: int = 0
    graphs: tuple[fx.GraphModule, fx.GraphModule] | None = field(default=None, repr=False)
    cost_model: CostModel | None = field(default=None, repr=False)
    """The model of the times; `None` for a plan that was loaded."""
    rates: Rates | None = field(default=None, repr=False)
    optimizer: Callable[[], torch.optim.Optimizer | None] | None = field(default=None, repr=False)
    """Gives the optimizer of those updates while it lives, if not only its class was given."""

    def __eq__(self, other: object) -> bool:
        """Plans are equal that are written alike: a loaded one is the one that was saved."""
        return isinstance(other, Plan) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @property
    def gap(self) -> float:
        """How much of the added time, at most, another schedule might spare: from 0 to 1."""
        if self.recompute_seconds <= 0:
            return 0.0
        return max(0.0, 1 - self.lower_bound_seconds / self.recompute_seconds)

    @cached_property
    def fingerprint(self) -> str:
        """Of the joint graph that the plan is for."""
        return fingerprint_of(self.graph)

    @property
    def forward_graph(self) -> fx.GraphModule:
        """From inputs to outputs, and what the backward graph reads."""
        return self._graphs()[0]

    @property
    def backward_graph(self) -> fx.GraphModule:
        """From inputs, what is saved, and cotangents, to gradients; names are the forward's."""
        return self._graphs()[1]

    def _graphs(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        if self.graphs is None:
            raise PlanError(
                "a plan that was loaded has no graphs: checkpoint(f, policy=from_plan(plan)) makes "
                "them of the function that it is given"
            )
        return self.graphs

    def timeline(self) -> Timeline:
        """The bytes alive at each operator of the step."""
        return self._timeline

    @cached_property
    def _timeline(self) -> Timeline:
        return simulate(*self._graphs())

    def summary(self) -> str:
        """A table of the figures beside those without rematerialisation."""
        base = self.baseline
        added = self.recompute_seconds
        rows = [
            ("", "plan", "without", ""),
            ("peak", human_bytes(self.peak_bytes), human_bytes(base.peak_bytes),
             f"budget {human_bytes(self.budget)}"),
            *self._of_the_allocator(),
            ("saved", human_bytes(self.saved_bytes), human_bytes(base.saved_bytes), ""),
            ("time", human_seconds(base.seconds + added), human_seconds(base.seconds),
             f"+{human_seconds(added)} ({percent(added, base.seconds)}); no schedule adds less "
             f"than {human_seconds(self.lower_bound_seconds)} (gap {100 * self.gap:.0f} %)"),
            *_list_link_rows(self),
            ("flops", f"{base.flops + self.recompute_flops:.4g}", f"{base.flops:.4g}", ""),
        ]  # fmt: skip
        counts = {what: 0 for what in DECISIONS}
        for decision in self.decisions.values():
            counts[decision] += 1
        said = ", ".join(f"{n} {what}" for what, n in counts.items() if n)
        head = f"plan on {self.device}: {said or 'nothing to decide'}"
        why = [f"gap {100 * self.gap:.0f} %: {self.gap_reason}"] if self.gap_reason else []
        if self.tiling is not None and self.tiling.num_segments:
            why.append(f"loops run in {self.tiling.num_segments} segments")
        if self.updates_in_backward:
            why.append(f"{self.updates_in_backward} parameters are updated in the backward pass")
        if self.state_on_host_bytes:
            state = human_bytes(self.state_on_host_bytes)
            waits = human_seconds(self.state_link_seconds)
            why.append(f"{state} of the optimizer's state are on the host, {waits} on the link")
        return "\n".join([head, *table(rows, numeric=(1, 2)), *why])

    @property
    def state_link_seconds(self) -> float:
        """How long the state on the host takes over the link, here and back; no part of `gap`.

        Copies run beside the step, so it waits for this long at most.
        """
        rate = None if self.rates is None else self.rates.host_bytes_per_second
        return 2 * self.state_on_host_bytes / rate if rate else 0.0

    def _of_the_allocator(self) -> list[tuple[str, str, str, str]]:
        if not self.reserved_bytes:
            return []
        base = human_bytes(self.baseline.reserved_bytes)
        rows = [("reserved", human_bytes(self.reserved_bytes), base, "by a GPU's allocator")]
        if self.workspace_bytes:
            space = human_bytes(self.workspace_bytes)
            rows.append(("workspace", space, space, "beside that, an allowance for libraries"))
        return rows

    def __repr__(self) -> str:
        peaks = f"peak {human_bytes(self.peak_bytes)} of {human_bytes(self.baseline.peak_bytes)}"
        added = percent(self.recompute_seconds, self.baseline.seconds)
        return f"Plan({peaks}, budget {human_bytes(self.budget)}, {added} of the time added)"

    def __str__(self) -> str:
        return self.summary()

    def to_html(self, path: "str | os.PathLike[str]") -> Path:
        """Draw the plan as a page: `torchremat.viz.graph_html(plan, path)`; return its path."""
        # by name: pictures are a layer above
        written: Path = import_module("torchremat.viz").graph_html(self, path)
        return written

    def to_json(self) -> str:
        """The plan as JSON, with its version and the graph that it is for; without graphs."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "budget": self.budget,
            "peak_bytes": self.peak_bytes,
            "saved_bytes": self.saved_bytes,
            "recompute_seconds": self.recompute_seconds,
            "recompute_flops": self.recompute_flops,
            "baseline": asdict(self.baseline),
            "lower_bound_seconds": self.lower_bound_seconds,
            "device": self.device,
            **{name: getattr(self, name) for name in _LATER_FIELDS},
            "rates": None if self.rates is None else asdict(self.rates),
            "tiling": None if self.tiling is None else asdict(self.tiling),
            "decisions": dict(self.decisions),
            "order": asdict(self.order),
            "graph": list(self.graph),
        }
        return json.dumps(content, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "the text") -> "Plan":
        """The plan that `to_json` wrote. Raises `PlanError` (a `ValueError`) for anything else."""
        content = parse_plan(text, where)
        return cls(
            baseline=Figures(**content["baseline"]),
            order=Order(**{k: tuple(v) for k, v in content["order"].items()}),
            graph=tuple(content["graph"]),
            **{name: content[name] for name in _PLAIN_FIELDS},
            **{name: content[name] for name in _LATER_FIELDS if name in content},
            rates=Rates(**content["rates"]) if content.get("rates") else None,
            tiling=Tiling(**content["tiling"]) if content.get("tiling") else None,
        )

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Write the plan to a file, as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_json())

    @classmethod
    def load(cls, path: "str | os.PathLike[str]") -> "Plan":
        """The plan in a file.

        Raises `PlanError` (a `ValueError`) if it is none, is truncated, or of another version, and
        `OSError` if there is no such file.
        """
        with open(path, encoding="utf-8") as file:
            return cls.from_json(file.read(), os.fspath(path))

    def graph_schedule(self, joint: Joint) -> GraphSchedule:
        """The plan in the nodes of `joint`, the graph that it is for, perhaps at other sizes.

        Raises `PlanError` if it is another graph.
        """
        return schedule_of(self.order, self.graph, self.decisions, joint)


def _list_link_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    if not plan.order.offloaded:
        return []
    waits = f"+{human_seconds(plan.link_seconds)} of the time, waiting for copies"
    return [("offloaded", human_bytes(plan.offloaded_bytes), human_bytes(0), waits)]


@dataclass(frozen=True)
class ParetoPoint:
    """Least time added at a budget.

    Attributes:
        budget: in bytes.
        plan: the plan for it.
    """

    budget: int
    plan: Plan

    @property
    def peak_bytes(self) -> int:
        """The peak of the plan."""
        return self.plan.peak_bytes

    @property
    def recompute_seconds(self) -> float:
        """The time that the plan adds."""
        return self.plan.recompute_seconds


@dataclass(frozen=True)
class Pareto(ShownInNotebook):
    """The least time added against peak memory: a `ParetoPoint` each, the largest budget first."""

    points: tuple[ParetoPoint, ...]
    least_bytes: int | None
    """The least budget that can be met, if a smaller one was given."""

    def __iter__(self) -> Iterator[ParetoPoint]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, i: int) -> ParetoPoint:
        return self.points[i]

    def __repr__(self) -> str:
        peaks = [human_bytes(point.peak_bytes) for point in self]
        return f"Pareto(peaks: {', '.join(peaks) or 'none'})"

    def __str__(self) -> str:
        rows = [("budget", "peak", "saved", "added", "at least")]
        for point in self.points:
            found = point.plan
            rows.append((
                human_bytes(point.budget), human_bytes(found.peak_bytes),
                human_bytes(found.saved_bytes), human_seconds(found.recompute_seconds),
                human_seconds(found.lower_bound_seconds),
            ))  # fmt: skip
        lines = table(rows, numeric=(0, 1, 2, 3, 4), indent="")
        if self.least_bytes is not None:
            lines.append(f"the least budget that can be met: {human_bytes(self.least_bytes)}")
        return "\n".join(lines)


_PLAIN_FIELDS = (
    "budget", "peak_bytes", "saved_bytes", "recompute_seconds", "recompute_flops",
    "lower_bound_seconds", "device", "decisions",
)  # fmt: skip


_LATER_FIELDS = (
    "offloaded_bytes",
    "link_seconds",
    "reserved_bytes",
    "workspace_bytes",
    "gap_reason",
    "updates_in_backward",
    "state_on_host_bytes",
)
"""They are not in the first files of this version."""
