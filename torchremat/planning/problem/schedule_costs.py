"""The costs of a schedule: the bytes alive at each of its operators, and the time that it adds.

    order       a   b   c   db      a value is alive from the operator that writes it
    x           w---r---r           to the last one that reads it, or that it is saved for
    live        x   xy  xyz yz      what is alive at an operator counts as a whole

Lifetimes are found for all values at once, in arrays: a search asks for thousands of them.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from torchremat.planning.problem.flat_step import Ints
from torchremat.planning.problem.problem import Part, Problem, Schedule

# What happens to a value at an operator, in this order: it is fetched from the host; it is read; it
# is written; its use ends, since it was saved or copied.
_FETCHED, _READ, _WRITTEN, _ENDS = _KINDS = range(4)


@dataclass(frozen=True)
class Costs:
    """Bytes and seconds of a schedule.

    Attributes:
        live: bytes alive while each operator runs, forward and then backward.
        added_seconds: the time of the operators that run more often than without
            rematerialisation, and that in which nothing runs but the link.
        link_seconds: the second of these.
    """

    live: tuple[int, ...]
    added_seconds: float
    link_seconds: float = 0.0

    @property
    def peak(self) -> int:
        return max(self.live, default=0)


class ScheduleError(ValueError):
    """A schedule in which an operator reads a value that is not there."""


def costs_of(problem: Problem, schedule: Schedule) -> Costs:
    """The bytes alive at each operator of `schedule`, and the time that it adds.

    A value is alive from when it is written to the last operator that reads it, or that it is
    saved for. If it is written a second time, it counts as another value from then on. Raises
    `ScheduleError` if a value is read that is not alive.

    An offloaded value is alive to its last operator in the forward pass. It is alive at least to
    the end of the next `Part.FORWARD` operator, by when its copy is done. In the backward pass it
    is fetched once, before it is first read: while the operator before runs that needs cotangents,
    or at the start if there is none. The link carries what is offloaded once each way, beside
    operators: each pass takes as long as its operators or its copies, whichever take longer.
    """
    check_schedule(problem, schedule)
    return costs_unchecked(problem, schedule)


def costs_unchecked(problem: Problem, schedule: Schedule) -> Costs:
    """`costs_of` a schedule that was checked, or made by `replay_of`."""
    live = count_live(problem, schedule)
    order = np.array((*schedule.forward, *schedule.backward), np.int64)
    counts = np.bincount(order, minlength=len(problem.operators))
    again = np.flatnonzero(counts > 1).tolist()
    added = sum((int(counts[o]) - 1) * problem.operators[o].seconds for o in again)
    link = _link_seconds(problem, schedule) if schedule.offloaded else 0.0
    return Costs(tuple(live), added + link, link)


def count_live(problem: Problem, schedule: Schedule) -> list[int]:
    """The bytes alive at each operator."""
    order = np.array((*schedule.forward, *schedule.backward), np.int64)
    live: Ints = problem.flat.nbytes_inside[order] + problem.constant
    live[len(schedule.forward) :] += problem.backward_constant
    if len(order):
        _add_lifetimes(problem, _list_events(problem, schedule, order), live)
        _add_lasting(problem, order, live)
    found: list[int] = live.tolist()
    return found


def _list_events(problem: Problem, schedule: Schedule, order: Ints) -> Ints:
    """The events of each value that is freed: numbers, in the order of events once sorted."""
    flat, num = problem.flat, len(order)
    where, reads = flat.reads.pick(order)
    events = [_number(reads, where, _READ, num)]
    where, writes = flat.writes.pick(order)
    events.append(_number(writes, where, _WRITTEN, num))
    for i, values, kind in _list_ends(problem, schedule):
        numbers = np.array(tuple(values), np.int64)
        events.append(_number(numbers, np.full(len(numbers), i), kind, num))
    found = np.concatenate(events)
    return found[~flat.is_lasting[found // (num * len(_KINDS))]]


def _list_ends(problem: Problem, schedule: Schedule) -> Iterator[tuple[int, Collection[int], int]]:
    """Positions, values, and what happens to these there though no operator does it."""
    if schedule.forward:
        yield len(schedule.forward) - 1, (*problem.written, *schedule.saved), _ENDS
    if schedule.offloaded:
        copied, fetched = _schedule_copies(problem, schedule)
        for i, values in copied.items():
            yield i, values, _ENDS
        for i, values in fetched.items():
            yield i, values, _FETCHED


def _number(values: Ints, where: Ints, kind: int, num: int) -> Ints:
    return (values * num + where) * len(_KINDS) + kind


def _add_lifetimes(problem: Problem, events: Ints, live: Ints) -> None:
    """Add the bytes of each value from an event that makes it to the last before the next one."""
    events.sort()
    if not len(events):
        return
    num = len(live)
    moments, kinds = np.divmod(events, len(_KINDS))
    values, where = np.divmod(moments, num)
    is_made = (kinds == _WRITTEN) | (kinds == _FETCHED)
    is_other = np.empty(len(events), np.bool_)
    is_other[0] = True
    np.not_equal(values[1:], values[:-1], out=is_other[1:])
    starts = np.flatnonzero(is_made | is_other)
    ends = np.append(starts[1:], len(events)) - 1
    sizes = problem.flat.nbytes[values[starts]]
    changes = np.zeros(num + 1, np.int64)
    # what nothing makes before it is read, as in a part of a schedule, is there from the start
    np.add.at(changes, np.where(is_made[starts], where[starts], 0), sizes)
    np.subtract.at(changes, where[ends] + 1, sizes)
    live += np.cumsum(changes[:-1])


def _add_lasting(problem: Problem, order: Ints, live: Ints) -> None:
    """Add what is alive until the end: it counts from when it is first written."""
    flat = problem.flat
    where, values = flat.writes.pick(order)
    chosen = flat.is_lasting[values]
    where, values = where[chosen], values[chosen]
    _, first = np.unique(values, return_index=True)
    made = np.zeros(len(live), np.int64)
    np.add.at(made, where[first], flat.nbytes[values[first]])
    live += np.cumsum(made)
    again = np.ones(len(values), np.bool_)
    again[first] = False
    np.add.at(live, where[again], flat.nbytes[values[again]])


Moments = dict[int, list[int]]
"""Values by positions in the order of both passes."""


def _schedule_copies(problem: Problem, schedule: Schedule) -> tuple[Moments, Moments]:
    operators, left = problem.operators, set(schedule.offloaded)
    copied: Moments = {}
    writing: list[int] = []
    for i, o in enumerate(schedule.forward):
        if operators[o].part is Part.FORWARD and writing:
            copied[i] = writing
            writing = []
        writing += left.intersection(operators[o].writes)
        left.difference_update(operators[o].writes)
    if writing:
        copied.setdefault(len(schedule.forward) - 1, []).extend(writing)
    fetched: Moments = {}
    left = set(schedule.offloaded)
    before = len(schedule.forward)  # where the last operator ran that needs cotangents
    for i, o in enumerate(schedule.backward, len(schedule.forward)):
        read = left.intersection(operators[o].reads)
        if read:
            fetched.setdefault(before, []).extend(read)
        left -= read
        left.difference_update(operators[o].writes)
        if operators[o].part is Part.BACKWARD:
            before = i
    return copied, fetched


def _link_seconds(problem: Problem, schedule: Schedule) -> float:
    copying = problem.copy_seconds(schedule.offloaded)
    passes = (schedule.forward, schedule.backward)
    return sum(max(0.0, copying - problem.seconds_of(operators)) for operators in passes)


def check_schedule(problem: Problem, schedule: Schedule) -> None:
    """Raise `ScheduleError` unless operators find what they read, and all that must run does."""
    there: set[int] = set()
    for o in schedule.forward:
        _check_reads(problem, o, there)
    missing = set(schedule.saved) - there
    if missing:
        raise ScheduleError(f"saved, but not made by the forward pass: values {sorted(missing)}")
    _check_offloaded(problem, schedule, there)
    there &= problem.outputs | {*schedule.saved, *schedule.offloaded}
    for o in schedule.backward:
        _check_reads(problem, o, there)
    for part, ran in ((problem.forward, schedule.forward), (problem.backward, schedule.backward)):
        lacking = set(part) - set(ran)
        if lacking:
            raise ScheduleError(f"operators {sorted(lacking)} do not run")


def _check_offloaded(problem: Problem, schedule: Schedule, there: set[int]) -> None:
    for wrong, what in (
        (set(schedule.offloaded) - problem.offloadable, "which may not be"),
        (set(schedule.offloaded) - there, "but not made by the forward pass"),
        (set(schedule.offloaded).intersection(schedule.saved), "and saved besides"),
    ):
        if wrong:
            raise ScheduleError(f"offloaded, {what}: values {sorted(wrong)}")


def _check_reads(problem: Problem, o: int, there: set[int]) -> None:
    op = problem.operators[o]
    for v in op.reads:
        if v not in there:
            raise ScheduleError(f"operator {o} reads value {v}, which is not there")
    there.update(op.writes)
