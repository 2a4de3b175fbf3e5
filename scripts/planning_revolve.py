"""REVOLVE: the optimum for chains of equal steps (Griewank and Walther 2000), as schedules."""

import math

from torchremat.planning.problem.problem import Part, Problem, Schedule


def fewest_moves(steps: int, snapshots: int) -> int:
    """The forward steps to reverse a chain; one of the snapshots is its input.

    >>> [fewest_moves(10, snapshots) for snapshots in (1, 2, 3, 9)]
    [45, 20, 15, 9]
    """
    repeats = 0
    while math.comb(snapshots + repeats, snapshots) < steps:
        repeats += 1
    return repeats * steps - math.comb(snapshots + repeats, repeats - 1) if repeats else 0


def reverse_chain(problem: Problem, steps: int, snapshots: int) -> Schedule:
    """The schedule of least time that has `snapshots` values at once, and the input of the chain.

    >>> from planning_graphs import chain_of
    >>> from torchremat.planning.problem.schedule_costs import costs_of
    >>> problem = chain_of(10).problem
    >>> costs = costs_of(problem, reverse_chain(problem, 10, 2))
    >>> round(costs.added_seconds * 1e3), costs.peak >> 20
    (6, 5)
    """
    run = _Reversal(problem)
    run.reverse(0, steps, snapshots + 1, is_first=True)
    return Schedule(tuple(sorted(run.saved)), problem.forward, tuple(run.order))


class _Reversal:
    def __init__(self, problem: Problem) -> None:
        self.saved: set[int] = set()
        back = [o for o, op in enumerate(problem.operators) if op.part is Part.BACKWARD]
        self.order = back[:1]
        self.back_of = dict(enumerate(reversed(back[1:])))

    def reverse(self, start: int, end: int, snapshots: int, *, is_first: bool) -> None:
        """Run backward from step `end` to `start`, whose input is there; step i writes value i."""
        if end - start > 1:
            # with one snapshot, the input of the last step is there only while it is read
            middle = end - 1 if snapshots == 1 else self._split(start, end, snapshots)
            if is_first:
                self.saved.add(middle - 1)
            else:
                self.order.extend(range(start, middle))
            self.reverse(middle, end, max(snapshots - 1, 1), is_first=is_first)
            self.reverse(start, middle, snapshots, is_first=False)
        else:
            self.order.append(self.back_of[start])

    def _split(self, start: int, end: int, snapshots: int) -> int:
        def moves(middle: int) -> int:
            behind = fewest_moves(end - middle, snapshots - 1)
            return middle - start + behind + fewest_moves(middle - start, snapshots)

        return min(range(start + 1, end), key=moves)
