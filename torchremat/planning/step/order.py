"""The order of a plan: positions of nodes, which a file can have, and nodes of a graph again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from torchremat.autodiff.joint import Joint
from torchremat.errors import PlanError
from torchremat.graph.schedule import GraphSchedule, read_from_before
from torchremat.planning.step.fingerprint import (
    find_difference,
    have_one_structure,
    lines_of,
    match_saved_values,
)


@dataclass(frozen=True)
class Order:
    saved: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    offloaded: tuple[int, ...] = ()


def order_of(schedule: GraphSchedule, joint: Joint) -> Order:
    numbers = {node: i for i, node in enumerate(joint.module.graph.nodes)}
    return Order(
        tuple(sorted(numbers[node] for node in schedule.saved)),
        tuple(numbers[node] for node in schedule.forward),
        tuple(numbers[node] for node in schedule.backward),
        tuple(sorted(numbers[node] for node in schedule.offloaded)),
    )


def schedule_of(
    order: Order, lines: Sequence[str], decisions: Mapping[str, str], joint: Joint
) -> GraphSchedule:
    """The order in the nodes of `joint`, of which `lines` say what it was, perhaps at other sizes.

    Raises `PlanError` if it is another graph, or if the order cannot run or has other `decisions`.
    In a compiler's trace it says only what is saved: the compiler orders the operators.
    """
    found = lines_of(joint.module.graph)
    if joint.by_compiler and found != lines:
        kept = match_saved_values(lines, order.saved, joint)
        away = match_saved_values(lines, order.offloaded, joint)
        if kept is not None and away is not None:
            return GraphSchedule(frozenset(kept), (), (), frozenset(away))
    if not have_one_structure(lines, found):
        raise misfit(lines, found)
    nodes = list(joint.module.graph.nodes)
    schedule = GraphSchedule(
        frozenset(nodes[i] for i in order.saved),
        tuple(nodes[i] for i in order.forward),
        tuple(nodes[i] for i in order.backward),
        frozenset(nodes[i] for i in order.offloaded),
    )
    _check_decisions(decisions, joint, schedule)
    _check_runs(joint, schedule)
    return schedule


def misfit(lines: Sequence[str], found: Sequence[str]) -> PlanError:
    """The error that says where the graph `found` differs from that of the plan."""
    return PlanError(
        f"the plan is for another graph: {find_difference(lines, found)}. A plan holds for one "
        "function, with its dtypes and modes (train or eval, autocast, gradients), at its sizes "
        "and smaller ones. Make one for this call with tr.plan"
    )


def _check_decisions(decisions: Mapping[str, str], joint: Joint, schedule: GraphSchedule) -> None:
    """Raise where `decisions`, which people read, say something else than the order."""
    nodes = {node.name: node for node in joint.module.graph.nodes}
    for name, said in decisions.items():
        node = nodes.get(name)
        is_saved, is_away = node in schedule.saved, node in schedule.offloaded
        found = "saved" if is_saved else "offloaded" if is_away else "recomputed"
        if node is not None and said not in (found, "tiled"):
            raise PlanError(
                f"the plan was changed: decisions.{name} is {said!r}, and by its order it is "
                f"{found}. Make it again with tr.plan"
            )


def _check_runs(joint: Joint, schedule: GraphSchedule) -> None:
    """Raise where an order reads a value before it is made."""
    outputs = [o for o in joint.outputs if isinstance(o, fx.Node)]
    written = [value for _, value in joint.mutations]
    missing = {
        "forward": read_from_before(schedule.forward, [*outputs, *written, *schedule.kept]),
        "backward": read_from_before(schedule.backward, joint.returned_gradients) - schedule.kept,
    }
    for name, nodes in missing.items():
        for node in nodes:
            if node.op == "call_function":
                raise PlanError(
                    f"the plan was changed: order.{name} reads {node.name} before it is made. "
                    "Make it again with tr.plan"
                )
