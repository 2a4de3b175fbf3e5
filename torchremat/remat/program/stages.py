"""The stages of a backward pass: which gradients it hands out together, and in which order.

    order of operators    dw3  db3   d.. d..   dw2  db2   d.. d..   dw1  db1   dx
    stages                {w3, b3}             {w2, b2}             {w1, b1, x}

Only parameters, the leaves of autograd's graph, get theirs before the end: whatever waits for the
gradient of another value was made before, and so runs after all stages.

There are no stages where an argument gets a gradient, too. Such a checkpoint is a layer of a
model: its gradients come soon after one another. A pipeline may also ask for that gradient alone,
and for those of parameters later.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from torchremat.autodiff.joint import Joint
from torchremat.graph.hand_outs import Groups
from torchremat.graph.nodes import base_of, call_of, is_forward, is_view, nodes_read_by
from torchremat.graph.schedule import GraphSchedule
from torchremat.remat.program.region import Region


@dataclass(frozen=True)
class Closeness:
    """How often gradients are handed out.

    Attributes:
        between: the operators of the backward pass that are at least between the ends of stages.
        largest: gradients in a stage: autograd changes the order of more that a node hands out.
        shortest: operators of the shortest backward pass that has stages.
        are_updates: whoever is given a gradient writes to the input, and so waits until no operator
            reads it; the stages are in that order.
    """

    between: int
    largest: int
    shortest: int
    are_updates: bool = False


# Chosen by hand. A stage costs 15 us, an operator 3 us and more.
USUAL = Closeness(between=6, largest=2, shortest=12)
# For updates that consume gradients: two gradients in a stage are alive together.
ONE_BY_ONE = Closeness(between=0, largest=1, shortest=0, are_updates=True)
_LONG = 96
"""Operators of a backward pass that has stages also if nobody is seen to wait for gradients."""


def find_stages(
    region: Region,
    joint: Joint,
    schedule: GraphSchedule | None,
    slots: tuple[int, ...],
    closeness: Closeness = USUAL,
) -> Groups:
    """The stages as positions among `slots`: those of inputs, or one for each input.

    Values that are no leaves are in the last. Empty if one stage would do.
    """
    order = _order_of(joint, schedule)
    if len(order) < closeness.shortest or region.argument_has_gradient:
        return ()
    stages: list[list[int]] = []
    begin = -closeness.between
    leaves = _sort_leaves(region, joint, order)
    if closeness.are_updates:
        leaves = _sort_updates(joint, schedule, leaves)
    for place, i in leaves:
        if place >= len(order) - closeness.between:
            break
        if place < begin + closeness.between and len(stages[-1]) < closeness.largest:
            stages[-1].append(i)
        else:
            begin = place
            stages.append([i])
    rest = [i for _, i in leaves[sum(map(len, stages)) :]]
    stages = [[slots.index(i) if slots else i for i in stage] for stage in (*stages, rest)]
    others = {i for i in region.wrt if not region.specs[i].is_leaf}
    stages[-1] += [k for k, i in enumerate(slots or range(len(region.specs))) if i in others]
    found = tuple([tuple(stage) for stage in stages if stage])
    return found if len(found) > 1 else ()


def is_long(joint: Joint, schedule: GraphSchedule | None) -> bool:
    return len(_order_of(joint, schedule)) >= _LONG


def _sort_leaves(region: Region, joint: Joint, order: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """The leaves, after the place in `order` of the operator that computes the gradient of each.

    Where operators run as they were traced, gradients come as autograd has them, which is the order
    of the nodes that are the gradients: `t(mm(...))` after `sum(...)`.
    """
    place = {call: i for i, call in enumerate(order)}
    traced = {node: i for i, node in enumerate(joint.module.graph.nodes)}
    calls = sorted(order, key=traced.__getitem__)
    is_as_traced = all(a is b for a, b in zip(order, calls, strict=True))
    found = []
    for i in region.wrt:
        gradient = joint.gradients[i] if i < len(joint.gradients) else None
        if gradient is not None and region.specs[i].is_leaf:
            at = place.get(call_of(base_of(gradient)), 0)
            found.append((traced[gradient] if is_as_traced else at, traced[gradient], at, i))
    return [(at, i) for *_, at, i in sorted(found)]


def _sort_updates(
    joint: Joint, schedule: GraphSchedule | None, leaves: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The leaves by when each may be written to: when no operator reads it, or its gradient."""
    calls = schedule.backward if schedule is not None else joint.module.graph.nodes
    inputs = set(joint.inputs)
    made: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    for place, call in enumerate(calls):
        made[call] = place
        last.update((v, place) for v in inputs.intersection(map(base_of, nodes_read_by(call))))

    def find_place(leaf: tuple[int, int]) -> tuple[int, int]:
        gradient = joint.gradients[leaf[1]]
        assert gradient is not None
        # tiles make it in the forward pass, and much is alive when the backward pass begins
        at = made.get(call_of(base_of(gradient)), len(made))
        return max(at, last.get(joint.inputs[leaf[1]], 0)), leaf[0]

    return sorted(leaves, key=find_place)


def _order_of(joint: Joint, schedule: GraphSchedule | None) -> list[fx.Node]:
    """The operators of the backward pass, without what it recomputes."""
    if schedule is not None and schedule.backward:
        return [call for call in schedule.backward if not is_forward(call)]
    nodes = joint.module.graph.nodes
    return [n for n in nodes if n.op == "call_function" and not is_forward(n) and not is_view(n)]
