"""The orders in which a step's operators may run, beside the given one, where they need less.

    h = [f(x, i) for i in range(8)]     given order         f f f f f f f f g g g g g g g g
    y = [g(h) for h in h]               with less memory    f g f g f g f g f g f g f g f g

Only independent operators change places, so no value has other bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchremat.planning.problem.backward_order import floor_of, reorder_backward, with_backward
from torchremat.planning.problem.fixed_bytes import ForwardBytes
from torchremat.planning.problem.pass_tasks import PassTasks
from torchremat.planning.problem.problem import Part, Problem, Schedule
from torchremat.planning.problem.replay import Decisions, replay_of
from torchremat.planning.problem.schedule_costs import costs_unchecked
from torchremat.planning.problem.task_order import find_task_order

# Of the peak, what another order has to spare to be worth a search of its own. Chosen by hand.
_LEAST_SPARED = 0.02


def orders_of(problem: Problem, *, may_move_forward: bool = True) -> tuple[Problem, ...]:
    """`problem` in each order that is worth a search: first that of `reorder_backward`.

    The given order is another where that differs. Orders that need less memory at some decisions
    come last, with their operators renumbered: `renumber_back` has the numbers of `problem`.
    There are none of these unless the forward pass may have another order.
    """
    first = reorder_backward(problem)
    known = [first] if first.backward == problem.backward else [first, problem]
    if not may_move_forward:
        return tuple(known)
    needs = [_needs_of(p) for p in known]
    for other in _find_others(problem, first):
        need = _needs_of(other)
        least = (min(n[i] for n in needs) for i in range(len(need)))
        if any(a < (1 - _LEAST_SPARED) * b for a, b in zip(need, least, strict=True)):
            known.append(other)
            needs.append(need)
    return tuple(known)


def _needs_of(problem: Problem) -> tuple[int, int]:
    """The least peak that the order may have, and the peak if nothing is recomputed."""
    schedule = replay_of(problem, Decisions(find_plain_saved(problem))).schedule
    return find_lowest_need(problem), costs_unchecked(problem, schedule).peak


def find_lowest_need(problem: Problem) -> int:
    """Bytes that every schedule in this order needs: an operator of either pass does."""
    return max((floor_of(problem), *ForwardBytes.of(problem).live))


def find_plain_saved(problem: Problem) -> frozenset[int]:
    """The values of the forward pass that operators after it read."""
    made = {v for o in problem.forward for v in problem.operators[o].writes}
    late = (op for op in problem.operators if op.part is not Part.FORWARD)
    return frozenset(made.intersection(v for op in late for v in op.reads))


def _find_others(problem: Problem, first: Problem) -> Iterator[Problem]:
    for saved in (frozenset[int](), find_plain_saved(problem)):
        ahead = find_task_order(PassTasks.of_forward(problem, saved))
        forward = [problem.forward[t] for t in ahead]
        behind = find_task_order(PassTasks.of_backward(problem, saved))
        backward = [problem.backward[t] for t in behind]
        other = with_backward(problem, backward)
        if floor_of(other) >= floor_of(first):
            backward = list(first.backward)
        if tuple(forward) != problem.forward or tuple(backward) not in (
            problem.backward,
            first.backward,
        ):
            yield renumber(with_backward(problem, backward), forward)


def renumber(problem: Problem, forward: Sequence[int]) -> Problem:
    """`problem` with the forward pass in this order, which is then that of recomputation too."""
    others = (o for o, op in enumerate(problem.operators) if op.part is not Part.FORWARD)
    order = [*forward, *others]
    numbers = {o: i for i, o in enumerate(order)}
    return replace(
        problem,
        operators=tuple(problem.operators[o] for o in order),
        backward_order=tuple(numbers[o] for o in problem.backward),
        numbers=tuple(order),
    )


def renumber_back(problem: Problem, schedule: Schedule) -> Schedule:
    """A schedule of `problem` with the numbers that its operators had before `renumber`.

    >>> from torchremat.planning.problem.problem import Operator
    >>> f, g = (Operator((), (v,), 1.0, Part.FORWARD) for v in (0, 1))
    >>> swapped = renumber(Problem((f, g), (4, 4)), [1, 0])
    >>> swapped.operators == (g, f)
    True
    >>> renumber_back(swapped, Schedule((), swapped.forward, ())).forward
    (1, 0)
    """
    if problem.numbers is None:
        return schedule
    numbers = dict(enumerate(problem.numbers))  # an operator that was added since has its own
    return replace(
        schedule,
        forward=tuple(numbers.get(o, o) for o in schedule.forward),
        backward=tuple(numbers.get(o, o) for o in schedule.backward),
    )
