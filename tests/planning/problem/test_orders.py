"""The order of operators: the least peak of all orders where they are few, and the same bits."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor

import torchremat as tr
from tests.planning.schedules import plain_schedule
from tests.planning.test_oracles import examples, problems
from torchremat.measure import LiveBytes
from torchremat.planning.problem.orders import (
    find_lowest_need,
    find_plain_saved,
    orders_of,
    renumber,
    renumber_back,
)
from torchremat.planning.problem.pass_tasks import PassTasks
from torchremat.planning.problem.problem import Operator, Part, Problem
from torchremat.planning.problem.replay import Decisions, replay_of
from torchremat.planning.problem.schedule_costs import costs_of
from torchremat.planning.problem.task_order import find_task_order
from torchremat.planning.solver import solve_orders


def least_peak_of_all_orders(tasks: PassTasks) -> int:
    """A dynamic program over sets of done tasks, which counts the bytes of each set anew."""
    everything = frozenset(range(len(tasks)))

    def count_alive(done: frozenset[int]) -> int:
        made = {v for t in done for v in tasks.writes[t]}
        made |= {v for t in everything for v in tasks.reads[t] if v not in tasks.makers}
        wanted = {v for t in everything - done for v in tasks.reads[t]} | tasks.lasting
        return sum(tasks.nbytes[v] for v in made & wanted)

    @functools.cache
    def least(done: frozenset[int]) -> float:
        if done == everything:
            return 0
        best = float("inf")
        for t in everything - done:
            if tasks.before[t] <= done:
                own = sum(tasks.nbytes[v] for v in tasks.writes[t]) + tasks.inside[t]
                best = min(best, max(count_alive(done) + own, least(done | {t})))
        return best

    return int(least(frozenset()))


@st.composite
def tasks_of_any_graph(draw) -> PassTasks:
    num = draw(st.integers(1, 9))
    reads, writes = [], []
    nbytes: list[int] = [draw(st.integers(1, 9)) for _ in range(2)]  # two are there before
    for _ in range(num):
        reads.append(tuple(sorted(draw(st.sets(st.integers(0, len(nbytes) - 1), max_size=2)))))
        writes.append((len(nbytes),))
        nbytes.append(draw(st.integers(1, 9)))
    lasting = frozenset(draw(st.sets(st.integers(2, len(nbytes) - 1), max_size=2)))
    inside = tuple(draw(st.sampled_from([0, 0, 4])) for _ in range(num))
    in_order = tuple(sorted(draw(st.sets(st.integers(0, num - 1), max_size=3))))
    return PassTasks(tuple(reads), tuple(writes), inside, tuple(nbytes), lasting, in_order)


@examples(300)
@given(tasks=tasks_of_any_graph())
def test_a_few_tasks_get_the_order_of_least_peak(tasks):
    order = find_task_order(tasks)
    note(f"{order}")
    places = {t: i for i, t in enumerate(order)}
    assert sorted(order) == list(range(len(tasks)))
    assert all(places[p] < places[t] for t in places for p in tasks.before[t])
    assert sorted(tasks.in_order, key=places.__getitem__) == list(tasks.in_order)
    assert tasks.peak_of(order) == least_peak_of_all_orders(tasks)
    assert order == find_task_order(tasks)


@examples(100)
@given(problem=problems())
def test_tasks_count_the_bytes_of_the_simulation(problem):
    saved = find_plain_saved(problem)
    tasks = PassTasks.of_forward(problem, saved)
    live = costs_of(problem, replay_of(problem, Decisions(saved)).schedule).live
    expected = [n - problem.constant for n in live[: len(tasks)]]
    assert tasks.live_of(range(len(tasks))) == expected


@examples(60)
@given(problem=problems())
def test_an_order_is_worth_a_search_if_it_needs_less(problem):
    orders = orders_of(problem)
    for other in orders:
        schedule = replay_of(other, Decisions(find_plain_saved(other))).schedule
        there = renumber_back(other, schedule)
        assert costs_of(problem, there).live == costs_of(other, schedule).live
        if other.numbers is not None:
            assert sorted(other.numbers) == list(range(len(problem.operators)))


def branches(num: int) -> Problem:
    """`num` branches of two operators, written breadth-first, with a backward pass like it."""
    operators = [Operator((), (i,), 1.0, Part.FORWARD) for i in range(num)]
    operators += [Operator((i,), (num + i,), 1.0, Part.FORWARD) for i in range(num)]
    outputs = frozenset(range(num, 2 * num))
    for i in reversed(range(num)):
        operators.append(Operator((i,), (2 * num + i,), 1.0, Part.BACKWARD))
    gradients = tuple(range(2 * num, 3 * num))
    operators.append(Operator(gradients, (), 0.0, Part.BACKWARD))
    nbytes = (100,) * num + (1,) * (2 * num)
    return Problem(tuple(operators), nbytes, outputs, frozenset(gradients))


def test_branches_written_breadth_first_need_what_one_branch_needs():
    problem = branches(8)
    *_, other = orders_of(problem)
    assert find_lowest_need(problem) == 801
    assert find_lowest_need(other) < 120
    solution = solve_orders(orders_of(problem), 120)
    assert solution.schedule is not None
    assert costs_of(problem, solution.schedule).peak <= 120
    assert solution.added_seconds == 7  # the last branch is saved
    assert solution.lower_bound_seconds == pytest.approx(7)


def test_draws_keep_their_order():
    problem = branches(4)
    operators = [replace(op, in_order=i < 8) for i, op in enumerate(problem.operators)]
    drawing = replace(problem, operators=tuple(operators))
    assert all(other.numbers is None for other in orders_of(drawing))


def test_an_operator_that_was_added_keeps_its_number():
    problem = renumber(branches(2), [0, 2, 1, 3])
    schedule = plain_schedule(problem)
    there = renumber_back(problem, replace(schedule, backward=(99, *schedule.backward)))
    assert there.forward == (0, 2, 1, 3)
    assert there.backward[0] == 99


def breadth_first(x: Tensor) -> Tensor:
    hidden = [torch.sin(x * (i + 1.0)) for i in range(8)]
    hidden = [torch.exp(h) for h in hidden]
    parts = [h.sum(0) for h in hidden]
    return functools.reduce(torch.add, parts).sum()


def depth_first(x: Tensor) -> Tensor:
    parts = [torch.exp(torch.sin(x * (i + 1.0))).sum(0) for i in range(8)]
    return functools.reduce(torch.add, parts).sum()


def linear(x: Tensor) -> Tensor:
    hidden = [x * (i + 1.0) for i in range(8)]
    return functools.reduce(torch.add, [h.sum(0) for h in hidden]).sum()


def dropping(x: Tensor) -> Tensor:
    hidden = [torch.nn.functional.dropout(torch.sin(x * (i + 1.0)), 0.5) for i in range(4)]
    parts = [torch.exp(h).sum(0) for h in hidden]
    return functools.reduce(torch.add, parts).sum()


@pytest.mark.parametrize("budget", ["25%", "50%"])
def test_branches_plan_alike_however_they_are_written(budget):
    x = torch.empty(256, 256, device="meta", requires_grad=True)
    first, second = (
        tr.plan(f, x, budget=budget, device="h100") for f in (breadth_first, depth_first)
    )
    assert first.peak_bytes <= second.peak_bytes
    assert first.recompute_seconds == pytest.approx(second.recompute_seconds)


def run(f: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(64, 256, requires_grad=True)
    y = f(x)
    y.backward()
    yield from (y.detach(), x.grad, torch.rand(3))  # the generator is where it was, too


def test_another_order_may_need_less_at_no_recomputation():
    x = torch.empty(256, 256, device="meta", requires_grad=True)
    plan = tr.plan(linear, x, budget="60%", device="h100")
    assert plan.recompute_seconds == 0
    assert plan.peak_bytes < 0.5 * plan.baseline.peak_bytes


@pytest.mark.parametrize("f", [breadth_first, depth_first, dropping, linear])
@pytest.mark.parametrize("budget", ["40%", "60%"])
def test_bits_are_those_of_plain_pytorch(f, budget):
    planned = tr.checkpoint(f, policy=f"budget:{budget}")
    for expected, found in zip(run(f), run(planned), strict=True):
        assert torch.equal(expected, found)


def test_a_budget_that_only_another_order_meets_is_kept():
    x = torch.randn(256, 256, requires_grad=True)
    plan = tr.plan(breadth_first, x, budget="least")
    step = tr.checkpoint(breadth_first, policy=tr.checkpoint_policies.from_plan(plan))
    step(x).backward()
    x.grad = None
    with LiveBytes() as live:
        step(x).backward()
    assert live.peak <= plan.peak_bytes < 2 << 20
