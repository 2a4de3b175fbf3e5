"""The step of a function at given arguments: traced, not run."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.api_util import StaticArguments
from torchremat.autodiff.bodies import FunctionBody
from torchremat.autodiff.joint import Joint
from torchremat.errors import TraceError
from torchremat.graph.hand_outs import Consumption
from torchremat.graph.nodes import is_item, is_view
from torchremat.graph.notes import note, note_graph
from torchremat.graph.schedule import GraphSchedule
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.planning.memory.simulate import simulate
from torchremat.planning.memory.timeline import Timeline
from torchremat.policies.builtin import everything_saveable
from torchremat.policies.policy import Policy
from torchremat.remat.checkpointed import Checkpointed
from torchremat.remat.program.compiled_graph import CompiledGraph
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.program.region import Region
from torchremat.remat.tracing.calls import flatten_call
from torchremat.remat.tracing.input_labels import BoundCall
from torchremat.tracing.ambient_state import meta_as_cpu
from torchremat.tracing.dynamic_inputs import DynamicInputs
from torchremat.tracing.input_spec import InputSpec

Updates = Mapping[int, int]
"""By the number of an input: the bytes that the update which consumes its gradient needs."""

NO_UPDATES: Updates = MappingProxyType({})
"""Without an optimizer that steps in the backward pass."""


class WholeGraphPolicy(Policy):
    """A policy that decides on all values at once.

    For one operator alone it lets nothing be saved. Checkpoints inside are opened: it decides on
    their values as well.
    """

    @property
    def is_whole_graph(self) -> bool:
        return True

    def __call__(self, op: object, /, *avals: Any, **params: Any) -> bool:
        """Whether the outputs of a call of `op` may be saved: nobody knows from that alone."""
        return False


class FixedSchedule(WholeGraphPolicy):
    def __init__(
        self,
        schedule: GraphSchedule,
        joint: Joint | None = None,
        *,
        updates: Updates = NO_UPDATES,
    ) -> None:
        self._schedule = schedule
        self._joint = joint
        self.updates = updates

    def prepare_joint(self, joint: Joint, sizes: Sizes | None, *, fuses: bool = False) -> Joint:
        """The joint graph of the schedule, if it is another."""
        return self._joint or joint

    def schedule(
        self, joint: Joint, *, fuses: bool = False, sizes: Sizes | None = None
    ) -> GraphSchedule:
        return self._schedule


def differentiates(joint: Joint) -> bool:
    """Whether there is a backward pass: a call under `no_grad` has none, and nothing to plan."""
    return any(gradient is not None for gradient in joint.gradients)


def forward_only(joint: Joint) -> GraphSchedule:
    calls = (n for n in joint.forward_nodes if n.op == "call_function")
    order = tuple(n for n in calls if not is_item(n) and not is_view(n))
    return GraphSchedule(frozenset(), order, ())


ChooseInputs = Callable[[Sequence[Tensor]], tuple[tuple[InputSpec, ...], DynamicInputs | None]]
"""From the tensors of a call to inputs of other sizes, or with symbols for sizes."""


def region_of(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy = everything_saveable,
    choose_inputs: ChooseInputs | None = None,
    gpu: _torch.Gpu | None = None,
) -> Region:
    """Trace `fun` at these arguments for such a policy; nothing runs on their values.

    With `choose_inputs` the trace is of the inputs that it gives, and with a `gpu` its operators
    take the kernels of that. Differentiated are the tensors that require a gradient, else all
    floating arguments. Raises `TypeError` if `fun` is not callable, and `TraceError` (a
    `TypeError`) if there is nothing to differentiate.
    """
    bound = BoundCall(fun, args, kwargs)
    with meta_as_cpu(gpu), torch.enable_grad():
        region = _trace_region(fun, args, kwargs, policy, choose_inputs)
        if not region.wrt:
            args, kwargs = _torch.tree_map(_mark_differentiated, (args, dict(kwargs)))
            region = _trace_region(fun, args, kwargs, policy, choose_inputs)
    if not region.wrt or not region.differentiable:
        raise TraceError(
            f"{bound.name} has nothing to differentiate: no floating-point argument, and nothing "
            "that it closes over, leads to an output with a gradient. Pass such a tensor, or call "
            "requires_grad_() on the one that it closes over."
        )
    _label_inputs(region, BoundCall(fun, args, kwargs))
    return region


def _label_inputs(region: Region, bound: BoundCall) -> None:
    body = region.body
    captured = body.captured() if isinstance(body, FunctionBody) and body.captured else ()
    labels = [*bound.labels, *bound.labels_of_captured(captured, region.paths)]
    for joint in (region.joint, region.joint_for(region.usual_outputs)):
        if len(labels) == len(joint.inputs):  # else a tensor is passed twice
            for node, label in zip(joint.inputs, labels, strict=True):
                note(node, label=label)


def _trace_region(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    choose_inputs: ChooseInputs | None,
) -> Region:
    checkpointed = Checkpointed(fun, policy, True, StaticArguments(fun, (), ()), lenient=True)
    call = flatten_call(args, kwargs, checkpointed.statics, lenient=True)
    specs, dynamic = (None, None) if choose_inputs is None else choose_inputs(call.tensors)
    return checkpointed.trace_usual(call, specs, dynamic).region


def _mark_differentiated(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
        return leaf.detach().requires_grad_()
    return leaf


def graphs_of(program: FunctionProgram) -> tuple[CompiledGraph, CompiledGraph]:
    given = program.region.usual_outputs
    needed = tuple(spec.requires_grad for spec in program.region.specs)
    return program.runtime_forward, program.backward(given, needed, with_states=True)


def note_updates(program: FunctionProgram, updates: Updates) -> None:
    """Note on the backward graph which gradients updates consume as soon as it hands them out."""
    if not updates or not program.stages:
        return
    slots = program.gradient_slots or tuple(range(program.num_inputs))
    nbytes = {k: updates[i] for k, i in enumerate(slots) if i in updates}
    found = Consumption(program.stages, program.gradient_targets, nbytes)
    note_graph(graphs_of(program)[1].module, consumption=found)


def timeline_of(program: FunctionProgram, updates: Updates = NO_UPDATES) -> Timeline:
    """The timeline of a step; `updates` consume gradients where the policy knows of none."""
    note_updates(program, program.policy.updates or updates)
    forward, backward = graphs_of(program)
    return simulate(forward.module, backward.module)
