"""`estimate`: what a step would take, before it is run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torchremat.autodiff.joint import Joint
from torchremat.autodiff.tiles.tile_joint import Tiling, tile_joint
from torchremat.core.formatting import ShownInNotebook, human_bytes, human_seconds, table
from torchremat.errors import ArgumentTypeError
from torchremat.planning.budget import Budget
from torchremat.planning.budget_policy import MemoryBudget
from torchremat.planning.cost_model import CostModel, StepDevice
from torchremat.planning.costs.workspace_bytes import allow_workspace
from torchremat.planning.memory.resident_bytes import (
    OptimizerLike,
    input_tensors,
    parameter_nbytes,
    state_tensors,
)
from torchremat.planning.memory.timeline import Timeline
from torchremat.planning.memory.update_bytes import find_updates, steps_already
from torchremat.planning.step.traced_step import NO_UPDATES, graphs_of, region_of, timeline_of
from torchremat.policies.builtin import plain_autograd
from torchremat.policies.module_selection import Select
from torchremat.policies.policy import Policy, PolicyLike, as_policy
from torchremat.remat.module_policies import under_policy
from torchremat.remat.offload.copies import COPIES
from torchremat.remat.program.decisions import PolicyDecisions
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.program.region import Region
from torchremat.remat.tracing.input_labels import refuse_misspelt

# Finer tiles spare little more of most models. Chosen by hand.
_NUM_TILES = 16


@dataclass(frozen=True)
class Estimate(ShownInNotebook):
    """Bytes and seconds of a step. All are bytes, but `seconds`.

    Attributes:
        peak_bytes: the most that is alive at one time of what the step makes: values, outputs and
            gradients.
        saved_bytes: the bytes that the forward pass saves for the backward pass.
        offloaded_bytes: those that it copies to the host for it.
        parameter_bytes: the tensors that get a gradient.
        gradient_bytes: their gradients, which are part of the peak if no update consumes them.
        optimizer_bytes: the optimizer's state.
        input_bytes: all other inputs: arguments, buffers, what is frozen.
        seconds: the time by the cost model.
        reserved_bytes: what PyTorch's caching allocator would take from a GPU for `total_bytes`.
        workspace_bytes: what to allow beside those for workspaces of cuBLAS, cuDNN and kernels of
            attention; 0 without a GPU.
    """

    peak_bytes: int
    saved_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    input_bytes: int
    seconds: float
    offloaded_bytes: int = 0
    reserved_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The bytes that the device needs: the peak, all inputs, and the optimizer's state."""
        return self.peak_bytes + self.parameter_bytes + self.input_bytes + self.optimizer_bytes

    def fits(self, memory: int | str) -> bool:
        """Whether `total_bytes` and `workspace_bytes` fit into `memory` (bytes, or `"24GiB"`)."""
        nbytes = Budget.of(memory).nbytes
        if nbytes is None:
            raise ArgumentTypeError(f"fits({memory!r}): memory is bytes, or text such as '24GiB'")
        return self.total_bytes + self.workspace_bytes <= nbytes

    def __str__(self) -> str:
        rows = [
            ("parameters", human_bytes(self.parameter_bytes)),
            ("optimizer", human_bytes(self.optimizer_bytes)),
            ("other inputs", human_bytes(self.input_bytes)),
            ("peak of the step", human_bytes(self.peak_bytes)),
            ("  of it gradients", human_bytes(self.gradient_bytes)),
            ("  saved at its middle", human_bytes(self.saved_bytes)),
            ("in all", human_bytes(self.total_bytes)),
            ("  reserved on a GPU", human_bytes(self.reserved_bytes)),
            ("time", human_seconds(self.seconds)),
        ]
        if self.workspace_bytes:
            rows.insert(-1, ("  workspaces beside", human_bytes(self.workspace_bytes)))
        if self.offloaded_bytes:
            rows.insert(-1, ("on the host", human_bytes(self.offloaded_bytes)))
        return "\n".join(table(rows, numeric=(1,), indent=""))


def estimate(
    fun_or_module: Callable[..., Any],
    *args: Any,
    policy: PolicyLike | None = None,
    select: Select | None = None,
    optimizer: OptimizerLike = None,
    cost_model: CostModel | None = None,
    device: str | torch.device | None = None,
    tile: bool = False,
    **kwargs: Any,
) -> Estimate:
    """Estimate a forward and a backward pass under a policy, without running them.

    Args:
        fun_or_module: a function of trees of tensors, or an `nn.Module`; on any device, the meta
            device too.
        *args: its arguments; only their shapes, dtypes and devices matter.
        policy: what may be saved, see `checkpoint`. With `None` the checkpoints inside decide.
        select: puts the policy on these modules of the model, as `nn.wrap` does, in place of the
            whole; the model stays as it is. `policy=None` then saves nothing but their inputs.
        optimizer: an optimizer or its class; the bytes of its state are counted. If it steps in the
            backward pass (`optim.step_in_backward`), gradients count until it consumes them.
        cost_model: what operators cost in seconds; by default a roofline of `device`.
        device: where the step is to run (`"cuda"`, `"h100"`); by default where the tensors are, or
            this machine if they are on the meta device. Those take the kernels of that device.
        tile: whether large values that are independent along rows are cut, into 16 tiles each, as a
            plan with `tile=True` may do. A policy decides on the others.
        **kwargs: keyword arguments of `fun_or_module`.

    Returns:
        The `Estimate`; `.fits("24GiB")` says whether a device of so much memory holds it.

    Raises:
        TypeError: if `fun_or_module` is not callable, if there is nothing to differentiate, or if
            there is a `select` and it is no `nn.Module`.
        ValueError: where `nn.wrap` raises it: `NoMatchError` if `select` matches nothing.

    >>> import torch
    >>> model = torch.nn.Linear(1024, 1024, device="meta")
    >>> found = estimate(model, torch.ones(8, 1024, device="meta"), optimizer=torch.optim.AdamW)
    >>> found.parameter_bytes == found.gradient_bytes == 4 * (1024 * 1024 + 1024)
    True
    >>> found.fits("32MiB"), found.fits("8MiB")
    (True, False)
    """
    refuse_misspelt(estimate, fun_or_module, kwargs)
    if select is not None:
        fun_or_module, policy = under_policy(fun_or_module, policy, select), None
    chosen = plain_autograd if policy is None else as_policy(policy)
    place = StepDevice.of(fun_or_module, args, kwargs, cost_model, device)
    region = region_of(fun_or_module, args, kwargs, chosen, gpu=place.gpu)
    if tile and isinstance(chosen, MemoryBudget):
        chosen, tile = replace(chosen, tile=True), False
    cut = _in_tiles(region, chosen) if tile else None
    program = FunctionProgram(region, chosen.begin_job(), chosen=cut)
    program.warn_of_policy()
    updates = find_updates(region, optimizer) if steps_already(optimizer) else NO_UPDATES
    timeline = timeline_of(program, updates)
    graphs = graphs_of(program)
    parameters, states = parameter_nbytes(region), state_tensors(region, optimizer)
    inputs = input_tensors(region)
    gradients: Any = graphs[1].module.graph.output_node().args[0]
    return Estimate(
        peak_bytes=timeline.peak,
        saved_bytes=timeline.saved_bytes,
        parameter_bytes=parameters,
        gradient_bytes=sum(_nbytes(value) for value in gradients if value is not None),
        optimizer_bytes=sum(states),
        input_bytes=sum(inputs) - parameters,
        seconds=sum(_seconds(half.module, timeline, place.model_of(region)) for half in graphs),
        workspace_bytes=allow_workspace(graphs, place.model_of(region).rates),
        offloaded_bytes=timeline.offloaded_bytes,
        reserved_bytes=timeline.count_reserved_bytes([*inputs, *states]),
    )


def _in_tiles(region: Region, policy: Policy) -> tuple[Joint, PolicyDecisions] | None:
    """The joint graph with tiles and the decisions of a policy on it; `None` if there are none."""
    if policy.is_whole_graph:
        raise ArgumentTypeError(
            f"estimate(policy={policy}, tile=True): a plan has its own tiles, or none. Leave out "
            "tile, or make the plan with tr.plan(..., tile=True)"
        )
    joint = tile_joint(region.joint, Tiling(_NUM_TILES))
    return None if joint is None else (joint, PolicyDecisions(joint, policy))


def _seconds(module: fx.GraphModule, timeline: Timeline, model: CostModel) -> float:
    """The time of a pass: of its operators, or of its copies beside them if these take longer."""
    calls = (node for node in module.graph.nodes if node.op == "call_function")
    seconds = sum(model.seconds(node) for node in calls if node.target not in COPIES)
    return max(seconds, model.transfer_seconds(timeline.offloaded_bytes) or 0.0)


def _nbytes(node: Any) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())
