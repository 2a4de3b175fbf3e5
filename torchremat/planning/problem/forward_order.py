"""Where operators that may run in either pass run in the forward pass: with the least peak.

    x -> y -> z      c = cos(y) is saved      y is large, c is small
    order            x  y  c  z               y is freed after z

One operator after the other is placed. Arrays have the bytes alive at each place and the lifetimes
of values, so that all places of an operator are compared at once.
"""

from collections.abc import Iterable

import numpy as np

from torchremat.planning.problem.fixed_bytes import ForwardBytes
from torchremat.planning.problem.flat_step import Ints
from torchremat.planning.problem.problem import Part, Problem

# Operators to place times places, up to which each place is tried. One more operator takes a pass
# over the whole order, so beyond that they run as early as they can.
_MOST_PLACES = 20_000


class ForwardOrder:
    """Finds the order of the forward pass for what is saved.

    >>> from torchremat.planning.problem.problem import Operator
    >>> x = Operator((), (0,), 1.0, Part.FORWARD)
    >>> y = Operator((0,), (1,), 1.0, Part.FORWARD)
    >>> c = Operator((0,), (2,), 1.0, Part.EITHER_PASS)
    >>> forward = ForwardOrder(Problem((x, y, c), (4, 4, 1), outputs=frozenset({1})))
    >>> forward.order([]), forward.order([2])
    ((0, 1), (0, 2, 1))
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        size, bytes_of_pass = len(problem.nbytes), ForwardBytes.of(problem)
        self._live = np.array(bytes_of_pass.live, np.int64)
        self._made, self._last = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
        self._made[list(bytes_of_pass.made)] = list(bytes_of_pass.made.values())
        self._last[list(bytes_of_pass.last)] = list(bytes_of_pass.last.values())
        lasting = list((problem.outputs | problem.written) & problem.known)
        self._last[lasting] = len(problem.forward)

    def order(self, saved: Iterable[int], offloaded: Iterable[int] = ()) -> tuple[int, ...]:
        """The forward pass, with operators of either pass where the bytes alive are least."""
        problem = self.problem
        chosen = frozenset(saved)
        extra = self._find_extra(chosen.union(offloaded))
        if not extra:
            return problem.forward
        if len(extra) * len(problem.forward) > _MOST_PLACES:
            return _insert_early(problem, extra)
        places = _Places(problem, chosen, self._live, self._made, self._last)
        for o in sorted(extra):
            places.insert(o)
        return tuple(places.order)

    def _find_extra(self, values: Iterable[int]) -> set[int]:
        """The operators of either pass that make `values`, or what these are made of."""
        operators, producers = self.problem.operators, self.problem.producers
        found: set[int] = set()
        stack = [producers[v] for v in values]
        while stack:
            o = stack.pop()
            if o not in found and operators[o].part is Part.EITHER_PASS:
                found.add(o)
                stack.extend(producers[v] for v in operators[o].reads)
        return found


def _insert_early(problem: Problem, extra: set[int]) -> tuple[int, ...]:
    after: dict[int, int] = {}
    for o in sorted(extra):
        reads = (problem.producers[v] for v in problem.operators[o].reads)
        after[o] = max((after.get(p, p) for p in reads), default=-1)
    runs = [*((o, -1) for o in problem.forward), *((after[o], o) for o in extra)]
    return tuple(first if last < 0 else last for first, last in sorted(runs))


class _Places:
    """An order, to which operators are added.

    Attributes:
        live: the bytes alive at each operator.
        made: the position at which each value is made; -1 where it is not.
        last: the last one at which it is alive, beyond the order where it stays.
    """

    def __init__(
        self, problem: Problem, saved: frozenset[int], live: Ints, made: Ints, last: Ints
    ) -> None:
        self.problem = problem
        self.saved = saved
        self.order = list(problem.forward)
        self.made, self.last = made.copy(), last.copy()
        num = len(self.order)
        kept = np.array([v for v in saved if 0 <= last[v] < num], np.int64)
        longer = np.zeros(num + 1, np.int64)
        np.add.at(longer, last[kept] + 1, problem.flat.nbytes[kept])
        self.live = live + np.cumsum(longer[:-1])
        self.last[kept] = num

    def insert(self, o: int) -> None:
        """Run `o` where the peak is least, at the first of such places."""
        op = self.problem.operators[o]
        reads, writes = np.array(op.reads, np.int64), np.array(op.writes, np.int64)
        nbytes, num = self.problem.flat.nbytes, len(self.order)
        late, ended = np.zeros((2, num + 2), np.int64)
        np.add.at(late, np.minimum(self.last[reads] + 2, num + 1), nbytes[reads])
        np.add.at(ended, np.minimum(self.last[reads] + 1, num + 1), nbytes[reads])
        late, ended = np.cumsum(late)[:-1], np.cumsum(ended)[:-1]
        kept = writes[[v in self.saved for v in op.writes]]
        before = np.zeros(num + 1, np.int64)  # what `o` reads is alive for longer at each place
        before[1:] = self.live + late[1:]
        during = self._count_between() + ended + nbytes[writes].sum() + op.nbytes_inside
        after = np.zeros(num + 1, np.int64)  # what `o` writes comes on top, if it is saved
        after[:-1] = np.maximum.accumulate(self.live[::-1])[::-1]
        least = int(self.made[reads].max(initial=-1)) + 1
        before[:least] = 0
        after += nbytes[kept].sum()
        peaks = np.maximum(np.maximum(np.maximum.accumulate(before), during), after)
        place = least + int(np.argmin(peaks[least:]))
        self._insert_at(place, o, int(during[place]))
        stays = np.isin(writes, kept)
        self.last[writes] = np.where(stays, num + 1, place)

    def _count_between(self) -> Ints:
        """The bytes alive before each operator, and at the end."""
        num = len(self.order)
        freed = np.zeros(num + 1, np.int64)
        ends = np.flatnonzero(self.last >= 0)
        np.add.at(freed, self.last[ends], self.problem.flat.nbytes[ends])
        between = np.full(num + 1, self.problem.constant, np.int64)
        between[1:] = self.live - self.problem.flat.nbytes_inside[self.order] - freed[:-1]
        return between

    def _insert_at(self, place: int, o: int, live: int) -> None:
        op, nbytes = self.problem.operators[o], self.problem.nbytes
        for v in op.reads:
            self.live[self.last[v] + 1 : place] += nbytes[v]
        self.live = np.insert(self.live, place, live)
        self.live[place + 1 :] += sum(nbytes[v] for v in op.writes if v in self.saved)
        self.order.insert(place, o)
        self.last[self.last >= place] += 1
        self.made[self.made >= place] += 1
        for v in op.reads:
            self.last[v] = max(self.last[v], place)
        self.made[list(op.writes)] = place
