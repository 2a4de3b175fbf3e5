"""The problem of a step whose operators write in place, as one of which bounds hold.

    y = relu_(x)     in the problem      y lies beside x
                     as it runs          y lies in the memory of x, unless x is read again
                     discounted          y takes nothing while it is made

As it runs, a schedule needs at least the bytes that the discounted problem counts. So the time that
each schedule of that problem adds, within some bytes, is a bound for what runs within them.
"""

from dataclasses import replace

from torch import fx

from torchremat.graph.nodes import base_of
from torchremat.graph.notes import notes_of
from torchremat.graph.write_forms import part_of
from torchremat.planning.problem.problem import Problem, Schedule
from torchremat.planning.problem.schedule_costs import costs_unchecked
from torchremat.planning.step.problem_builder import NumericStep


def discount_writes(step: NumericStep, plain: Schedule, plain_bytes: int) -> Problem | None:
    """The problem in which results of writes in place take no memory beside what they write to.

    `None` where an operator writes to a part of a value, which may be alive for long before. So it
    is if the `plain` schedule needs more than the `plain_bytes` of the step as it runs: something
    else is counted twice.
    """
    problem = step.problem
    operators, nbytes = list(problem.operators), list(problem.nbytes)
    for o, call in enumerate(step.calls):
        if call is None:
            continue
        if part_of(call) is not None:
            return None
        if notes_of(call).written_by is None:
            continue
        target = call.args[0] if call.args else None
        if not isinstance(target, fx.Node):
            return None
        writes = operators[o].writes
        if base_of(target).op == "placeholder":  # alive for the whole step
            for v in writes:
                nbytes[v] = 0
        else:
            inside = operators[o].nbytes_inside - sum(problem.nbytes[v] for v in writes)
            operators[o] = replace(operators[o], nbytes_inside=inside)
    made = replace(problem, operators=tuple(operators), nbytes=tuple(nbytes))
    return made if costs_unchecked(made, plain).peak <= plain_bytes else None
