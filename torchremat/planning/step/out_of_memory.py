"""The note for a user whose step, though planned, runs out of memory."""

from collections.abc import Mapping

from torch import fx

from torchremat.core.formatting import human_bytes
from torchremat.graph.nodes import call_of
from torchremat.graph.notes import notes_of
from torchremat.planning.memory.timeline import LiveValue, Timeline
from torchremat.planning.step.traced_step import graphs_of, timeline_of
from torchremat.policies.failed_operator import FailedOperator
from torchremat.remat.program.function_program import FunctionProgram

# Values that the message names, the largest first; the rest is one line.
_SHOWN = 5


def describe_plan(
    program: FunctionProgram, failed: FailedOperator, asked: str, resident: int = 0
) -> str:
    """Name the plan's peak, what was alive, and a cure.

    `asked` is the policy as written, whose budget counts `resident` bytes beside the step.
    """
    timeline = timeline_of(program)
    forward, backward = graphs_of(program)
    nodes = {n.name: n for module in (backward.module, forward.module) for n in module.graph.nodes}
    point = timeline.points[timeline.live.index(timeline.peak)]
    where = _position(timeline, failed)
    ran = f" at {_describe_failure(failed.node)}" if failed.node is not None else ""
    lines = [
        f"torchremat: memory ran out in the {failed.phase} pass of a step under {asked}{ran}.",
        f"  By the plan the peak is {human_bytes(timeline.peak)}, at {point.name} "
        f"({point.phase}), of what the step makes.",
    ]
    alive = timeline.peak
    if where is not None:
        alive = timeline.live[where]
        lines.append(
            f"  Here, at operator {where + 1} of {len(timeline)}, {human_bytes(alive)} are alive:"
        )
        lines += _alive(timeline, where, nodes)
    beside = f" The budget counts {human_bytes(resident)} of that." if resident else ""
    lower = _suggest_budget(alive, resident)
    option = f", resident={resident}" if resident else ""
    spelled = f"memory_budget('{lower}'{option})" if resident else f"'budget:{lower}'"
    lines += [
        "  Not in these figures are parameters, gradients and states of an optimizer that were "
        f"there before, and what else is on the device.{beside}",
        f"  Give a budget below {human_bytes(alive + resident)} ({spelled}), or a smaller batch. "
        "torchremat.plan(model, *args, budget=...) shows beforehand which "
        "budgets can be met, and its timeline() what is alive at each moment.",
    ]
    return "\n".join(lines)


def _position(timeline: Timeline, failed: FailedOperator) -> int | None:
    if failed.node is None:
        return None
    name = call_of(failed.node).name
    for i, point in enumerate(timeline.points):
        if point.phase == failed.phase and point.name in (name, failed.node.name):
            return i
    return None


def _alive(timeline: Timeline, where: int, nodes: Mapping[str, fx.Node]) -> list[str]:
    found = [t.value for t in timeline.lifetimes if t.first <= where <= t.last and t.value.nbytes]
    found.sort(key=lambda value: -value.nbytes)
    lines = [f"    {value}{_from(value, nodes)}" for value in found[:_SHOWN]]
    if rest := found[_SHOWN:]:
        lines.append(f"    {human_bytes(sum(v.nbytes for v in rest))} in {len(rest)} more")
    return lines


def _from(value: LiveValue, nodes: Mapping[str, fx.Node]) -> str:
    node = nodes.get(value.name)
    source = None if node is None else notes_of(node).source
    return f" from {source}" if source is not None else ""


def _describe_failure(node: fx.Node) -> str:
    call = call_of(node)
    source = notes_of(call).source
    return f"{call.target}" + (f" from {source}" if source is not None else "")


def _suggest_budget(alive: int, resident: int) -> str:
    lower = max(1, alive * 9 // 10) + resident
    return f"{lower >> 20}MiB" if alive >> 20 else f"{lower}B"
