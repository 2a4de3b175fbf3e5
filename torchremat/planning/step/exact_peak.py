"""The peak of a schedule whose graphs write in place, which the numbers of a problem count twice.

r = slice_scatter(b, y)     in numbers: b and r are alive together
as it runs: r lies in the memory of b
"""

from collections.abc import Callable

import torch
from torch import fx

from torchremat import _torch
from torchremat.autodiff.joint import Joint
from torchremat.autodiff.replay_rules import draws_in_forward
from torchremat.graph.notes import note_graph, note_roles, notes_of
from torchremat.graph.schedule import GraphSchedule, build_scheduled_graph
from torchremat.graph.slicing import prune_bodies, simplify
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.graph.write_forms import part_of
from torchremat.graph.write_order import (
    is_outcome,
    move_checks_before_writes,
    move_views_before_writes,
)
from torchremat.planning.memory.simulate import simulate
from torchremat.planning.problem.problem import Schedule
from torchremat.planning.step.traced_step import FixedSchedule
from torchremat.remat.program.compiled_graph import (
    BackwardInputs,
    compile_backward,
    copy_inputs_among_last,
)
from torchremat.remat.program.decisions import PolicyDecisions
from torchremat.remat.program.written_outputs import find_written_outputs, find_written_residuals


def writes_in_place(joint: Joint) -> bool:
    """Whether an operator of the step may run in place."""
    nodes = joint.module.graph.nodes
    return any(notes_of(n).written_by is not None or part_of(n) is not None for n in nodes)


class ExactPeaks:
    """The peaks of schedules of `joint`, where it writes in place.

    `sizes` has the values of its symbols, if they are not those that it was traced with.
    """

    def __init__(
        self, joint: Joint, sizes: Sizes | None = None, *, has_updates: bool = False
    ) -> None:
        self.joint = joint
        self.sizes = sizes
        # the graph that is simulated here has no updates
        self.are_needed = not has_updates and writes_in_place(joint)
        """Whether a problem only has an upper bound."""
        self._peaks: dict[Schedule, int | None] = {}

    def of(self, schedule: Schedule, in_nodes: Callable[[], GraphSchedule]) -> int | None:
        """The peak of a schedule of numbers, which is `in_nodes` of the graph."""
        if not self.are_needed:
            return None
        if schedule not in self._peaks:
            with _torch.assume_sizes(self.sizes):
                self._peaks[schedule] = exact_peak_of(self.joint, in_nodes())
        return self._peaks[schedule]


def exact_peak_of(joint: Joint, schedule: GraphSchedule) -> int | None:
    """The simulated peak of a schedule; `None` if more than operators decides on it.

    That is so where values are offloaded or drawn again, and where gradients are added up. It is so
    where a compiler has sizes as nodes, too: its halves return them as they do tensors.
    """
    if joint.by_compiler and any(map(_is_size, joint.module.graph.nodes)):
        return None
    decisions = PolicyDecisions(joint, FixedSchedule(schedule))
    if schedule.offloaded or decisions.replayable or joint.parts:
        return None
    found = decisions.residuals(joint)
    written = {joint.inputs[i] for i, _ in joint.mutations}
    copied = [node for node in found.inputs if node in written]
    saved = [node for node in found.inputs if node not in written]
    residuals = [*found.values, *copied]
    in_inputs = {r.position for r in find_written_residuals(residuals, joint.mutations)}
    forward = _forward_graph(joint, schedule, residuals, len(copied), in_inputs)
    roles = ["input" if i in in_inputs else "residual" for i, _ in enumerate(residuals)]
    cotangents = [ct for ct in joint.cotangents if ct is not None]
    form = BackwardInputs((*["input"] * len(saved), *roles, *["cotangent"] * len(cotangents)))
    inputs = [*saved, *residuals, *cotangents]
    backward = compile_backward(joint, inputs, joint.gradients, None, form=form, schedule=schedule)
    return simulate(forward, backward.module).peak


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _forward_graph(
    joint: Joint,
    schedule: GraphSchedule,
    residuals: list[fx.Node],
    num_copies: int,
    in_inputs: set[int],
) -> fx.GraphModule:
    outputs = [o for o in joint.outputs if isinstance(o, fx.Node)]
    results = [*outputs, *(value for _, value in joint.mutations), *residuals]
    module = build_scheduled_graph(
        joint.module, joint.inputs, results, schedule.forward, always_run=draws_in_forward
    )
    prune_bodies(module, always_run=draws_in_forward)
    inputs = module.graph.find_nodes(op="placeholder")
    move_checks_before_writes(module.graph, [inputs[i] for i, _ in joint.mutations])
    copy_inputs_among_last(module.graph, num_copies)
    simplify(module.graph)
    move_views_before_writes(module.graph)
    written = {output.position for output in find_written_outputs(outputs, joint.mutations)}
    written.update(i for i, output in enumerate(outputs) if is_outcome(output))
    roles = ["write" if i in written else "output" for i, _ in enumerate(outputs)]
    roles += ["write"] * len(joint.mutations)
    roles += ["write" if i in in_inputs else "residual" for i, _ in enumerate(residuals)]
    note_roles(module, roles)
    positions = {i: len(outputs) + r for r, (i, _) in enumerate(joint.mutations)}
    note_graph(module, new_values=positions)
    return module
