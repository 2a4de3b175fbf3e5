"""The cut of AOTAutograd's joint graph into a forward and a backward graph: a policy decides.

PyTorch's partitioner cuts the joint graph, and obeys marks on its nodes: save this, recompute that.
A policy decides as in eager mode, about the operators that a user wrote, and before a compiler
decomposes them. Its decisions become such marks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchremat import _torch
from torchremat.autodiff.joint import Joint
from torchremat.autodiff.partial_eval import Residuals
from torchremat.autodiff.replay_rules import reason_not_replayable
from torchremat.compile.dynamo.inductor_decompositions import decompose_for_inductor
from torchremat.compile.dynamo.input_copies import (
    copy_written_inputs,
    drop_copies,
    find_written_inputs,
    writes_input,
)
from torchremat.compile.dynamo.scheduled_joint import erase_marks, schedule_joint
from torchremat.graph.codegen import compile_graph
from torchremat.graph.nodes import ancestors, call_of, is_forward, results_of
from torchremat.graph.notes import note, notes_of
from torchremat.policies.checkpoint_name import name_p
from torchremat.policies.policy import Policy
from torchremat.remat.program.decisions import PolicyDecisions
from torchremat.tracing.functional.functionalize import drop_running_statistics
from torchremat.tracing.modules.dynamo_stack import module_name, source_of

Halves = tuple[fx.GraphModule, fx.GraphModule]
"""The forward and the backward graph."""

_BACKWARD_TAGS = ("is_backward", "must_be_in_backward")


def build_joint(module: fx.GraphModule, num_forward_outputs: int) -> Joint:
    """Read the joint graph `module`, and note the phase, module and line of each node."""
    inputs: list[fx.Node] = []
    cotangents: list[fx.Node] = []
    for node in module.graph.find_nodes(op="placeholder"):
        (cotangents if "tangents" in str(node.target) else inputs).append(node)
    _note_phases(module.graph, cotangents)
    for node in module.graph.nodes:
        if node.op != "placeholder":
            note(node, module=module_name(node.meta), source=source_of(node.meta))
    results = results_of(module)
    written = _torch.find_written_inputs(module)
    mutations = [(node, results[i]) for i, node in written.items()]
    mutations += [node.args[:2] for node in module.graph.nodes if writes_input(node)]
    return Joint(
        module,
        tuple(inputs),
        tuple(r for i, r in enumerate(results[:num_forward_outputs]) if i not in written),
        tuple((inputs.index(node), value) for node, value in mutations),
        tuple(cotangents),
        tuple(results[num_forward_outputs:]),
        by_compiler=True,
    )


def _note_phases(graph: fx.Graph, cotangents: Sequence[fx.Node]) -> None:
    """Note the pass that traced each node; without such a tag, a reader of cotangents is late."""
    late = set(cotangents)
    for node in graph.nodes:
        is_late = node.meta.get("partitioner_tag") in _BACKWARD_TAGS
        if is_late or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        if node.op != "placeholder":
            note(node, phase="backward" if node in late else "forward")


@dataclass(frozen=True)
class Partition:
    """A joint graph cut in two, and why it was cut so.

    Attributes:
        joint: the graph, names of values still in it.
        residuals: the values that the backward graph needs by these decisions.
        saved: those of them that the forward graph returns.
        replayed_random: the first value of each operator that the backward graph runs from the
            state of the generator, which the forward graph returns.
    """

    joint: Joint
    decisions: PolicyDecisions
    residuals: Residuals
    saved: frozenset[fx.Node]
    replayed_random: frozenset[fx.Node]


def decide(
    module: fx.GraphModule, num_forward_outputs: int, policy: Policy, *, fuses: bool
) -> Partition:
    """Apply `policy` to the joint graph `module`.

    `fuses`: inductor runs it. Without it random operators may be in the backward graph, for PyTorch
    to give them the state that they drew from.
    """
    joint, copies = _read_joint(module, num_forward_outputs)
    if policy.wants_tiles:
        policy = policy.begin_job()  # the number of tiles is for the schedule below
        joint = policy.prepare_joint(joint, None, fuses=fuses)
    schedule = policy.schedule(joint, fuses=fuses, sizes=None) if policy.is_whole_graph else None
    decisions = PolicyDecisions(joint, policy, schedule=schedule)
    decisions.warn_of_unmatched()
    decisions.warn_of_places(is_compiled=True)
    residuals = _add_needed_copies(decisions.residuals(joint), copies)
    draws: set[fx.Node] = set()
    if not fuses:
        draws = {
            node for node in decisions.forced.intersection(residuals.values) if _may_draw(node)
        }
    saved = frozenset(residuals.values) - draws
    first = {call_of(node): node for node in reversed(residuals.values) if node in draws}
    return Partition(joint, decisions, residuals, saved, frozenset(first.values()))


def _read_joint(
    module: fx.GraphModule, num_forward_outputs: int
) -> tuple[Joint, Sequence[fx.Node]]:
    """The joint graph, and the copies in it of inputs that it writes to."""
    drop_copies(module.graph)
    drop_running_statistics(module.graph)
    module.graph.eliminate_dead_code()
    copies = copy_written_inputs(module)
    return build_joint(module, num_forward_outputs), copies


class _JointTracedError(Exception):
    """Ends AOTAutograd once it has traced."""


def trace_joint(module: fx.GraphModule, inputs: Sequence[Any]) -> Joint | None:
    """The joint graph of a graph that Dynamo captured.

    There is none where AOTAutograd finds nothing to differentiate: all outputs are views of inputs.
    """
    found: list[Joint] = []

    def take(module: fx.GraphModule, inputs: Sequence[object], **options: Any) -> Halves:
        found.append(_read_joint(module, options["num_fwd_outputs"])[0])
        raise _JointTracedError

    with suppress(_JointTracedError):
        _torch.aot_autograd(module, inputs, compiler=compile_graph, partition=take)
    return found[0] if found else None


def _add_needed_copies(residuals: Residuals, copies: Sequence[fx.Node]) -> Residuals:
    needed = [copy for copy in copies if copy in residuals.recomputed]
    written = {copy.args[0] for copy in needed}
    inputs = tuple(node for node in residuals.inputs if node not in written)
    return Residuals((*needed, *residuals.values), inputs, residuals.recomputed - {*needed})


def partition_as_autograd_does(
    module: fx.GraphModule, inputs: Sequence[object], **options: Any
) -> Halves:
    """Cut with PyTorch's partitioner that saves what autograd saves, but for checkpoints inside."""
    copy_written_inputs(module)
    return _torch.default_partition(module, inputs, **options)


def partition_as_pytorch_does(
    module: fx.GraphModule, inputs: Sequence[object], **options: Any
) -> Halves:
    """Cut a graph in inductor's operators with PyTorch's minimum cut, where no mark says more.

    Recomputed operators read inputs as they were before the function wrote to them. (Without the
    copies, PyTorch 2.13 reads what is there when the backward pass runs.)
    """
    copy_written_inputs(module)
    return _torch.min_cut_partition(module, inputs, **options)


def cut_joint(partition: Partition, inputs: Sequence[object], **options: Any) -> Halves:
    """Cut exactly as the policy decides; `options` are those of AOTAutograd for a partitioner."""
    module = partition.joint.module
    _move_forward(module.graph, partition.saved)
    for node in module.graph.nodes:
        if node.op != "placeholder" and is_forward(node) and not writes_input(node):
            is_saved = node in partition.saved
            _mark(node, _torch.MUST_SAVE if is_saved else _torch.MUST_RECOMPUTE)
    erase_names(module.graph)
    return _cut_by_need(module, inputs, **options)


def _cut_by_need(module: fx.GraphModule, inputs: Sequence[object], **options: Any) -> Halves:
    with _hide_drawless(module.graph) as restore:
        forward, backward = _torch.default_partition(module, inputs, **options)
        restore(forward.graph)
        restore(backward.graph)
    return forward, backward


def cut_for_fusion(partition: Partition, inputs: Sequence[object], **options: Any) -> Halves:
    """Cut for inductor, which fuses: only the values that the policy recomputes are marked.

    For the rest PyTorch's minimum cut saves the fewest bytes. It may save offsets in place of
    indices of eight bytes, or an input of pointwise operators in place of several outputs.
    """
    module = partition.joint.module
    _move_forward(module.graph, partition.saved)
    for node in module.graph.nodes:
        is_recomputed = node in partition.residuals.recomputed
        _mark(node, _torch.MUST_RECOMPUTE if is_recomputed else None)
    erase_names(module.graph)
    return partition_as_pytorch_does(decompose_for_inductor(module), inputs, **options)


def cut_as_scheduled(
    partition: Partition, inputs: Sequence[object], *, fuses: bool, **options: Any
) -> Halves | None:
    """Cut in the order of a plan; `None` where the joint graph cannot be reordered."""
    schedule = partition.decisions.schedule
    if schedule is None:
        return None
    written = find_written_inputs(partition.joint.module)
    once = {user for node in written for user in node.users if user in partition.saved}
    once |= partition.decisions.forced
    module = schedule_joint(partition.joint, schedule, options["num_fwd_outputs"], once)
    if module is None:
        return None
    erase_names(module.graph)
    if not fuses:
        erase_marks(module.graph)
        return _cut_by_need(module, inputs, **options)
    decomposed = decompose_for_inductor(module)
    return partition_as_pytorch_does(decomposed, inputs, merges=False, **options)


def _move_forward(graph: fx.Graph, saved: Iterable[fx.Node]) -> None:
    """Move saved values that only the backward traced, a cosine say, to the forward pass."""
    wanted = [node for node in saved if not is_forward(node)]
    found = ancestors(wanted, stop=lambda node: notes_of(node).phase != "backward")
    moved = [node for node in graph.nodes if node in found]
    last = next(
        node
        for node in reversed(graph.nodes)
        if node.op == "placeholder" or (is_forward(node) and not writes_input(node))
    )
    for node in moved:
        note(node, phase="forward")
        node.meta["partitioner_tag"] = "is_forward"
        last.append(node)
        last = node


def _mark(node: fx.Node, mark: Any) -> None:
    # marks of a checkpoint inside: the policy around it has looked inside and decided
    node.meta.pop("ac_graph_id", None)
    node.meta.pop("has_backward_hook", None)
    node.meta.pop("recompute", None)
    if mark is not None:
        node.meta["recompute"] = mark


def erase_names(graph: fx.Graph) -> None:
    """Take out the operators that name values: the policy has read them, and no compiler can."""
    for node in graph.find_nodes(op="call_function", target=name_p):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _may_draw(node: fx.Node) -> bool:
    """Whether the operator draws random numbers for some arguments, if not for a dropout of 0."""
    target = call_of(node).target
    return isinstance(target, _torch.OpOverload) and (
        torch.Tag.nondeterministic_seeded in target.tags
    )


class _Drawless:
    """A stand-in for an operator of a random kind that draws nothing with these arguments."""

    def __init__(self, op: _torch.OpOverload) -> None:
        self.op = op
        self.__name__ = op.name()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


@contextmanager
def _hide_drawless(graph: fx.Graph) -> Iterator[Callable[[fx.Graph], None]]:
    """Hide attention without dropout from the partitioner, which would save a generator's state.

    Yields a function that puts the operators back into a copy of the graph.
    """
    for node in graph.nodes:
        if node.op == "call_function" and _may_draw(node) and reason_not_replayable(node) is None:
            node.target = _Drawless(node.target)

    def restore(copy: fx.Graph) -> None:
        for node in copy.nodes:
            if isinstance(node.target, _Drawless):
                node.target = node.target.op

    yield restore
    restore(graph)
