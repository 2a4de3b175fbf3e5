"""The order of a pass's tasks with the least peak: a few lists, and a search around the peak.

    given           x1 = f(a), x2 = f(b), y1 = sum(x1), y2 = sum(x2)      x1 and x2 alive together
    with less peak  x1 = f(a), y1 = sum(x1), x2 = f(b), y2 = sum(x2)

A list takes n log n. The search runs through sets of tasks that are done. It is exact where there
are few of them, and otherwise improves what surrounds the peak.
"""

import heapq
from collections.abc import Callable, Sequence

from torchremat.planning.problem.pass_tasks import PassTasks

Rule = Callable[[int, int], tuple[int, int]]
"""From the bytes that a task adds, and how late it became ready, to its rank: least comes first."""

# Tasks before and after a peak in the first window. It grows until it helps; chosen by hand.
_FIRST_WINDOW = 8
# Sets of done tasks that one search looks at: more take longer. Chosen by hand.
_MOST_SETS = 2_000
# The same of all searches for one order; chosen by hand.
_MOST_SETS_IN_ALL = 5_000
# A window costs a look at every task, too: as much as one set for so many; chosen by hand.
_TASKS_OF_ONE_SET = 10


def find_task_order(tasks: PassTasks) -> list[int]:
    """The order of least peak that is found: the given one, unless another has less."""
    found = [list(range(len(tasks))), list_tasks(tasks, _least_bytes), list_tasks(tasks, _deepest)]
    found.append(list_from_ends(tasks))
    best = min(found, key=tasks.peak_of)  # the first of equals
    better = improve_around_peaks(tasks, best)
    return better if tasks.peak_of(better) < tasks.peak_of(best) else best


def _least_bytes(added: int, turn: int) -> tuple[int, int]:
    return added, -turn


def _deepest(added: int, turn: int) -> tuple[int, int]:
    return int(added > 0), -turn


def list_tasks(tasks: PassTasks, rule: Rule) -> list[int]:
    """At each place, the task of least rank of those that may run."""
    nbytes, lasting = tasks.nbytes, tasks.lasting
    left = {v: set(readers) for v, readers in tasks.readers.items()}
    waits = [len(before) for before in tasks.before]
    turns = [0] * len(tasks)
    queue: list[tuple[tuple[int, int], int, int]] = []
    added = [_count_added(tasks, t) for t in range(len(tasks))]
    turn = 0

    def push(t: int) -> None:
        heapq.heappush(queue, (rule(added[t], turns[t]), t, added[t]))

    for t in range(len(tasks)):
        if not waits[t]:
            push(t)
    order: list[int] = []
    done = [False] * len(tasks)
    while queue:
        _, t, believed = heapq.heappop(queue)
        if done[t] or believed != added[t]:
            continue  # it stands in the queue a second time
        done[t] = True
        order.append(t)
        turn += 1
        for v in tasks.reads[t]:
            left[v].discard(t)
            if len(left[v]) == 1 and v not in lasting:
                (last,) = left[v]
                added[last] -= nbytes[v]
                if not waits[last]:
                    push(last)
        for after in tasks.after[t]:
            waits[after] -= 1
            if not waits[after]:
                turns[after] = turn
                push(after)
    return order


def list_from_ends(tasks: PassTasks) -> list[int]:
    """From each task that nothing waits for, first what it needs, the most bytes first."""
    need = [0] * len(tasks)
    size = [sum(tasks.nbytes[v] for v in writes) for writes in tasks.writes]
    first: list[list[int]] = []
    for t, before in enumerate(tasks.before):  # the given order has what is needed first
        first.append(sorted(before, key=lambda p: (size[p] - need[p], p)))
        held = most = 0
        for p in first[t]:
            most = max(most, held + need[p])
            held += size[p]
        need[t] = max(most, held + size[t] + tasks.inside[t])
    order: list[int] = []
    seen = [False] * len(tasks)
    for end in (t for t in range(len(tasks)) if not tasks.after[t]):
        stack = [(end, False)]
        while stack:
            t, is_ready = stack.pop()
            if is_ready:
                order.append(t)
            elif not seen[t]:
                seen[t] = True
                stack.append((t, True))
                stack.extend((p, False) for p in reversed(first[t]) if not seen[p])
    return order


def _count_added(tasks: PassTasks, t: int) -> int:
    """The bytes that are alive after the task and were not before, if no other task has run."""
    lasting, readers = tasks.lasting, tasks.readers
    own = sum(tasks.nbytes[v] for v in tasks.writes[t] if v in lasting or v in readers)
    ends = (v for v in tasks.reads[t] if v not in lasting and len(readers[v]) == 1)
    return own - sum(tasks.nbytes[v] for v in ends)


def improve_around_peaks(tasks: PassTasks, order: Sequence[int]) -> list[int]:
    """`order`, with the tasks around its peaks in the order of least peak, while that helps."""
    best, half, sets = list(order), _FIRST_WINDOW, _MOST_SETS_IN_ALL
    while sets > 0 and best:
        live = tasks.live_of(best)
        peak = max(live)
        place = live.index(peak)
        start, end = max(0, place - half), min(len(best), place + half + 1)
        window = _Window(tasks, best, start, end)
        found = window.search(peak, min(sets, _MOST_SETS))
        sets -= max(window.sets, len(best) // _TASKS_OF_ONE_SET)
        if found is not None:
            best[start:end] = found
        elif (start, end) == (0, len(best)) or window.sets >= _MOST_SETS:
            break
        else:
            half *= 2
    return best


class _Window:
    """The tasks of an order from `start` to `end`: a set of them, done, is the bits of a number."""

    def __init__(self, tasks: PassTasks, order: Sequence[int], start: int, end: int) -> None:
        self.tasks = tasks
        self.inner = list(order[start:end])
        self.sets = 0
        bits = {t: 1 << i for i, t in enumerate(self.inner)}
        later = set(order[end:])
        self.before = [sum(bits.get(p, 0) for p in tasks.before[t]) for t in self.inner]
        self.written = [sum(tasks.nbytes[v] for v in tasks.writes[t]) for t in self.inner]
        self.frees: list[list[tuple[int, int]]] = []
        """For each task, the bytes of what it may end, and the tasks that must run before."""
        for t in self.inner:
            frees = []
            for v in (*tasks.reads[t], *tasks.writes[t]):
                readers = tasks.readers.get(v, ())
                if v not in tasks.lasting and later.isdisjoint(readers):
                    frees.append((sum(bits.get(r, 0) for r in readers), tasks.nbytes[v]))
            self.frees.append(frees)
        self.start = self._bytes_before(order[:start])

    def _bytes_before(self, done: Sequence[int]) -> int:
        tasks, gone = self.tasks, set(done)
        alive = sum(tasks.nbytes[v] for v in tasks.readers if v not in tasks.makers)
        alive += sum(tasks.nbytes[v] for t in done for v in tasks.writes[t])
        touched = {v for t in done for v in (*tasks.reads[t], *tasks.writes[t])}
        ended = (
            v
            for v in touched
            if v not in tasks.lasting and gone.issuperset(tasks.readers.get(v, ()))
        )
        return alive - sum(tasks.nbytes[v] for v in ended)

    def search(self, bound: int, most: int) -> list[int] | None:
        """The order of least peak, if that is below `bound`; `None` after `most` sets, too.

        A task that leaves no more bytes alive, and needs no more than the peak so far, runs at
        once: where it ran later in some order, the bytes before it are no more if it runs now.
        """
        whole = (1 << len(self.inner)) - 1
        least: dict[int, int] = {0: self.start}
        came: dict[int, int] = {}
        alive = {0: self.start}
        queue = [(self.start, 0, 0)]
        while queue and self.sets < most:
            peak, _, done = heapq.heappop(queue)
            if peak > least[done]:
                continue
            if done == whole:
                return self._trace(came, whole)
            self.sets += 1
            for then, live, left in self._steps(done, alive[done], peak):
                high = max(peak, live)
                if high < min(bound, least.get(then, bound)):
                    least[then], alive[then], came[then] = high, left, done
                    heapq.heappush(queue, (high, -then.bit_count(), then))
        return None

    def _steps(self, done: int, total: int, peak: int) -> list[tuple[int, int, int]]:
        found = []
        for i, before in enumerate(self.before):
            if done >> i & 1 or before & ~done:
                continue
            then = done | 1 << i
            live = total + self.written[i] + self.tasks.inside[self.inner[i]]
            left = total + self.written[i]
            left -= sum(nbytes for readers, nbytes in self.frees[i] if not readers & ~then)
            if left <= total and live <= peak:
                return [(then, live, left)]
            found.append((then, live, left))
        return found

    def _trace(self, came: dict[int, int], done: int) -> list[int]:
        found = []
        while done:
            before = came[done]
            found.append(self.inner[(done ^ before).bit_length() - 1])
            done = before
        return found[::-1]
