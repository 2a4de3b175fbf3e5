"""Bytes alive, from arrays, beside a count of one value at one operator after the other."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.planning.problem.test_problem import SINE
from tests.planning.test_oracles import examples, problems
from torchremat.planning.problem.problem import Part, Schedule
from torchremat.planning.problem.replay import Decisions, backward_order, replay_of, values_used
from torchremat.planning.problem.schedule_costs import count_live


def events_of(problem, schedule, v):
    """Positions and kinds of what happens to a value, in order: "read" or "end" need it there."""
    order = (*schedule.forward, *schedule.backward)
    away = v in schedule.offloaded
    fetched = first_fetch(problem, schedule, v) if away else None
    found = []
    for i, o in enumerate(order):
        op = problem.operators[o]
        found += [(i, 0, "fetch")] * (i == fetched)
        found += [(i, 1, "read")] * (v in op.reads)
        found += [(i, 2, "write")] * (v in op.writes)
        is_end = i == len(schedule.forward) - 1 and (v in problem.written or v in schedule.saved)
        found += [(i, 3, "end")] * (is_end or (away and i == last_copy(problem, schedule, v)))
    return found


def last_copy(problem, schedule, v):
    """Where the copy of a value to the host is done: at the next operator of the forward pass."""
    made = schedule.forward.index(problem.producers[v])
    later = range(made + 1, len(schedule.forward))
    run = (i for i in later if problem.operators[schedule.forward[i]].part is Part.FORWARD)
    return next(run, len(schedule.forward) - 1)


def first_fetch(problem, schedule, v):
    """Where a value comes back: at the last operator before its use that needs cotangents."""
    before = len(schedule.forward)
    for i, o in enumerate(schedule.backward, len(schedule.forward)):
        op = problem.operators[o]
        if v in op.reads:
            return before
        if v in op.writes:
            return None
        before = i if op.part is Part.BACKWARD else before
    return None


def count_one_by_one(problem, schedule):
    order = (*schedule.forward, *schedule.backward)
    lasting = problem.outputs | problem.gradients
    live = []
    for i, o in enumerate(order):
        op = problem.operators[o]
        total = problem.constant + op.nbytes_inside
        total += problem.backward_constant * (i >= len(schedule.forward))
        for v, nbytes in enumerate(problem.nbytes):
            if v in lasting:
                runs = [j for j, p in enumerate(order) if v in problem.operators[p].writes]
                total += nbytes * ((bool(runs) and runs[0] <= i) + (i in runs[1:]))
                continue
            events = events_of(problem, schedule, v)
            now = [kind for at, _, kind in events if at == i]
            then = [kind for at, _, kind in events if at > i]
            is_read_later = bool(then) and then[0] in ("read", "end")
            total += nbytes * (bool(now) or is_read_later)
        live.append(total)
    return live


@examples(300)
@given(problem=problems(), data=st.data())
def test_bytes_alive_are_those_of_a_count_one_by_one(problem, data):
    problem = replace(problem, host_bytes_per_second=data.draw(st.sampled_from([None, 2.0])))
    values = st.frozensets(st.sampled_from(sorted(problem.known)))
    saved, steps = data.draw(values), range(len(problem.backward))
    away = (data.draw(values) & problem.offloadable) - saved
    drops = {step: data.draw(values) for step in steps if data.draw(st.booleans())}
    schedule = replay_of(problem, Decisions(saved, drops, offloaded=away)).schedule
    assert count_live(problem, schedule) == count_one_by_one(problem, schedule)
    forward = Schedule(schedule.saved, schedule.forward, ())
    assert count_live(problem, forward) == count_one_by_one(problem, forward)


@examples(300)
@given(problem=problems(), data=st.data())
def test_saved_values_are_used_that_are_read_before_they_are_recomputed(problem, data):
    values = st.frozensets(st.sampled_from(sorted(problem.known)))
    saved, steps = data.draw(values), range(len(problem.backward))
    drops = {step: data.draw(values) for step in steps if data.draw(st.booleans())}
    decisions = Decisions(saved, drops)
    order, _ = backward_order(problem, decisions)
    used, made = set(), set()
    for o in order:
        used |= (set(problem.operators[o].reads) - made) & saved
        made |= set(problem.operators[o].writes)
    assert values_used(problem, decisions, order) == used
    # without what is saved in vain the same operators run
    assert backward_order(problem, Decisions(frozenset(used), drops))[0] == order


def test_a_value_that_nothing_makes_is_alive_from_the_start():
    problem = replace(SINE, outputs=frozenset())
    assert count_live(problem, Schedule((), (), (3, 1))) == [12, 8]  # value 0 waits for operator 1
