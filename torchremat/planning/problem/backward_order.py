"""The order of the backward pass: what only makes gradients of inputs comes as early as it can.

autograd    dx = mm(dy, w.T);  dw = mm(dy.T, x)      dy, dx, x and dw are alive together
here        dw = mm(dy.T, x);  dx = mm(dy, w.T)      dy, dx, dw: x is freed before
"""

from collections.abc import Sequence
from dataclasses import replace

from torchremat.planning.problem.fixed_bytes import BackwardBytes
from torchremat.planning.problem.problem import Problem
from torchremat.planning.problem.replay import Decisions, replay_of
from torchremat.planning.problem.schedule_costs import costs_unchecked


def reorder_backward(problem: Problem) -> Problem:
    """`problem` with the order of the backward pass in which operators need the least memory.

    Where both orders need as much, it is the one that leaves more room for recomputation. With a
    link to a host it is then the first: values that come back an operator ahead have less room in
    the other.
    """
    early = with_backward(problem, _gradients_early(problem))
    if problem.offloadable:
        return min(problem, early, key=floor_of)
    return min(problem, early, key=lambda p: (floor_of(p), _beside_recomputation(p)))


def _beside_recomputation(problem: Problem) -> int:
    """The bytes alive before each step that reads what may be recomputed, summed over steps."""
    before = BackwardBytes.of(problem).before
    return sum(
        nbytes
        for o, nbytes in zip(problem.backward, before, strict=True)
        if problem.known.intersection(problem.operators[o].reads)
    )


def with_backward(problem: Problem, order: Sequence[int]) -> Problem:
    return replace(problem, backward_order=tuple(order))


def floor_of(problem: Problem) -> int:
    """The least peak that the order allows: what operators of the backward pass need at once.

    An operator needs what it reads and writes, and what other operators of the backward pass have
    made that is alive beside it. Values of the forward pass that it does not read could be
    recomputed, so they do not count.
    """
    replay = replay_of(problem, Decisions(problem.needed))
    live = list(costs_unchecked(problem, replay.schedule).live)
    num_forward = len(replay.schedule.forward)
    order = replay.schedule.backward
    may_idle = problem.known - problem.outputs
    wanted: set[int] = set()  # of these, what is read later
    nbytes_wanted = floor = 0
    for place in range(len(order) - 1, -1, -1):
        op = problem.operators[order[place]]
        made = wanted.intersection(op.writes)
        wanted -= made
        nbytes_wanted -= sum(problem.nbytes[v] for v in made)
        new = may_idle.intersection(op.reads) - wanted
        nbytes_read = sum(problem.nbytes[v] for v in wanted.intersection(op.reads))
        floor = max(floor, live[num_forward + place] - (nbytes_wanted - nbytes_read))
        wanted |= new
        nbytes_wanted += sum(problem.nbytes[v] for v in new)
    return floor


def _gradients_early(problem: Problem) -> list[int]:
    """The backward pass, with what leads to nothing but gradients right after what it reads."""
    operators = problem.operators
    readers: dict[int, list[int]] = {}
    for o in problem.backward:
        for v in operators[o].reads:
            readers.setdefault(v, []).append(o)
    final = problem.backward[-1]  # it reads the gradients
    ends: set[int] = set()
    for o in reversed(problem.backward[:-1]):
        after = {r for v in operators[o].writes for r in readers.get(v, ())}
        makes_gradients = problem.gradients.issuperset(operators[o].writes) and after <= {final}
        leads_to_one = len(after) == 1 and after <= ends
        if (makes_gradients or leads_to_one) and not operators[o].in_order:
            ends.add(o)
    order: list[int] = []
    done: set[int] = set()
    there = set(problem.known)
    waiting = [o for o in problem.backward if o in ends]
    by_input: dict[int, list[int]] = {}
    for o in waiting:
        for v in operators[o].reads:
            by_input.setdefault(v, []).append(o)

    def run(o: int) -> None:
        order.append(o)
        done.add(o)
        there.update(operators[o].writes)
        for v in operators[o].writes:
            for r in by_input.get(v, ()):
                if r not in done and all(u in there for u in operators[r].reads):
                    run(r)

    for o in problem.backward:
        if o not in done:
            run(o)
    return order
