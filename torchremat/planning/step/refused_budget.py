"""The words of errors on budgets that cannot be met: where the peak is, and what takes it."""

from torch import fx

from torchremat.core.formatting import human_bytes
from torchremat.errors import BudgetError
from torchremat.graph.nodes import base_of, call_of, is_forward, nodes_read_by
from torchremat.graph.notes import notes_of
from torchremat.planning.problem.problem import Problem, Schedule
from torchremat.planning.problem.schedule_costs import costs_of
from torchremat.planning.step.problem_builder import NumericStep

# The part of the least peak from which an error says what takes it; chosen by hand.
_MUCH = 0.1


def describe_peak(step: NumericStep, lowest: Schedule | None) -> str:
    """Name the operator that runs at the peak of the schedule of least peak."""
    if lowest is None:
        return ""
    live = costs_of(step.problem, lowest).live
    order = (*lowest.forward, *lowest.backward)
    call = step.calls[order[max(range(len(live)), key=live.__getitem__)]]
    return "" if call is None else f"At that peak runs {_describe_call(call)}. "


def build_saved_error(saved: int | None, asked: str, *, nbytes: int, excess: int) -> BudgetError:
    assert saved is not None
    return BudgetError(
        f"{asked}: no schedule was found that saves at most {human_bytes(saved)} at a peak of "
        f"{human_bytes(nbytes)}; values that must not be recomputed have to be saved. Let "
        f"{excess} bytes more be saved, and the peak be as much higher",
        nbytes + excess,
    )


def describe_gradients(problem: Problem, least: int) -> str:
    """Say what gradients take, which no plan changes, where it is much of the least peak."""
    nbytes = sum(problem.nbytes[v] for v in problem.gradients)
    if nbytes < _MUCH * least:
        return ""
    return (
        f"Gradients take {human_bytes(nbytes)} by the end of the step, whatever is saved; where a "
        "whole model is wrapped, optim.step_in_backward consumes those of parameters before. "
    )


def _describe_call(call: fx.Node) -> str:
    if is_forward(call):
        return f"{call.target} from {notes_of(call).source}"
    for node in nodes_read_by(call):
        made_by = call_of(base_of(node))
        if is_forward(made_by) and notes_of(made_by).source:
            return f"{call.target}, for what {notes_of(made_by).source} computes"
    return str(call.target)
