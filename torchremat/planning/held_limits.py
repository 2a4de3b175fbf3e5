"""A limit on what the forward pass hands to the backward pass, as an operator between the two.

    forward     a  b  c          backward     wait  dc  db  da

While `wait` runs, whatever is saved is alive, and nothing that the backward pass makes. If it needs
so many bytes that the limit is all that is left of the budget, schedules within the budget are
those that keep within the limit as well. It stands for what the rest of a model does between the
two passes of one layer.
"""

from dataclasses import replace

from torchremat.planning.problem import Operator, Part, Problem, Schedule


def with_limit(problem: Problem, room: int, limit: int) -> Problem:
    """`problem` so that what keeps within `room` saves no more than `limit` bytes, outputs apart.

    Numbers of operators and values stay; `without_wait` takes the new one out of a schedule.

    >>> sine = Operator((), (0,), 1.0, Part.FORWARD)
    >>> cosine = Operator((0,), (1,), 1.0, Part.BACKWARD)
    >>> limited = with_limit(Problem((sine, cosine), (4, 4)), 100, 6)
    >>> limited.nbytes, limited.backward
    ((4, 4, 94), (2, 1))
    """
    always = problem.constant + problem.backward_constant
    always += sum(problem.nbytes[v] for v in problem.outputs)
    taken = room - always - limit
    if taken <= 0:  # the budget is the narrower
        return problem
    wait = Operator((), (len(problem.nbytes),), 0.0, Part.BACKWARD, repeatable=False)
    return replace(
        problem,
        operators=(*problem.operators, wait),
        nbytes=(*problem.nbytes, taken),
        backward_order=(len(problem.operators), *problem.backward),
    )


def without_wait(problem: Problem, schedule: Schedule) -> Schedule:
    """`schedule`, of `problem` with a limit, as one of `problem`."""
    end = len(problem.operators)
    return replace(schedule, backward=tuple(o for o in schedule.backward if o < end))
