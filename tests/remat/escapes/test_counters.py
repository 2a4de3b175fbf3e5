"""Functions that change numbers, texts and lists outside of themselves, against plain PyTorch."""

from types import SimpleNamespace

import pytest
import torch

import torchremat as tr
from tests.helpers import assert_same
from torchremat.errors import RetraceWarning

# each trace asks the collector who refers to a list, among all that other tests have left
pytestmark = pytest.mark.usefixtures("frozen")

COUNT = 0


class Shared:
    count = 0


class Slots:
    __slots__ = ("items",)


def item_of_a_list(state):
    state.n = [0]

    def fun(x):
        state.n[0] += 1
        return x * state.n[0]

    return fun


def item_of_a_dict_beside_a_kept_tensor(state):
    state.kept = {"n": 0}

    def fun(x):
        with torch.no_grad():
            state.kept["aux"] = x.sum()
        state.kept["n"] = state.kept["n"] + 1
        return x * state.kept["n"] + state.kept["aux"]

    return fun


def item_that_comes_to_be(state):
    state.counts = {}

    def fun(x):
        state.counts["n"] = state.counts.get("n", 0) + 1
        return x / state.counts["n"]

    return fun


def attribute(state):
    state.n, state.last = 0, None

    def fun(x):
        state.n += 1
        with torch.no_grad():
            state.last = x.sum()
        return x + state.n

    return fun


def attribute_of_a_class(state):
    Shared.count = 0

    def fun(x):
        Shared.count += 1
        state.seen = Shared.count
        return x * Shared.count

    return fun


def variable(state):
    n = 0

    def fun(x):
        nonlocal n
        n += 1
        state.seen = n
        return x * 2

    return fun


def module_variable(state):
    global COUNT
    COUNT = 0

    def fun(x):
        global COUNT
        COUNT += 1
        return x * COUNT

    return fun


def variable_in_turn(state):
    flag = False

    def fun(x):
        nonlocal flag
        flag = not flag
        return x.sin() if flag else x.cos()

    return fun


def what_is_made_once(state):
    def fun(x):
        if not hasattr(state, "scale"):
            state.scale = 2.0
            return x
        return x * state.scale

    return fun


def object_that_is_made_once(state):
    state.made = None

    def fun(x):
        if state.made is None:
            state.made = SimpleNamespace()
            return x
        return x * 2

    return fun


def length_of_a_list(state):
    state.seen = []

    def fun(x):
        state.seen.append(1)
        return x * len(state.seen)

    return fun


def list_that_torch_reads(state):
    state.seen = []

    def fun(x):
        state.seen.append(2.0)
        return x * torch.tensor(state.seen).sum()

    return fun


def new_list(state):
    state.seen = [1]

    def fun(x):
        state.seen = [*state.seen, len(state.seen)]
        return x * sum(state.seen)

    return fun


def window(state):
    state.seen = [1, 2]

    def fun(x):
        state.seen.append(state.seen.pop(0) + 1)
        return x * state.seen[0]

    return fun


def items_of_a_set(state):
    state.seen = {3, 8}

    def fun(x):
        state.seen.add(len(state.seen))
        state.seen.discard(8)
        return x * sum(state.seen)

    return fun


def text(state):
    state.name = ""

    def fun(x):
        state.name += "a"
        return x * len(state.name)

    return fun


def count_that_decides_late(state):
    state.n = 0

    def fun(x):
        state.n += 1
        return x * 2 if state.n > 3 else x

    return fun


def count_that_is_copied(state):
    state.n, state.last = 0, None

    def fun(x):
        state.last = state.n
        state.n += 1
        return x * 1

    return fun


def count_read_by_a_helper(state):
    state.n = [0]
    pair = (state.n, 1)

    def read(index=(lambda kept: kept[0][0])):
        return index(pair)

    def fun(x):
        state.n[0] += 1
        return x * read()

    return fun


def list_read_through_a_tuple(state):
    state.seen = []
    pair = (state.seen,)

    def fun(x):
        state.seen.append(1)
        return x * len(pair[0])

    return fun


def list_read_through_slots(state):
    state.seen = []
    slots = Slots()
    slots.items = state.seen

    def fun(x):
        state.seen.append(1)
        return x * len(slots.items)

    return fun


def list_read_by_its_method(state):
    state.seen = []
    count = state.seen.__len__

    def fun(x):
        state.seen.append(1)
        return x * count()

    return fun


def list_read_by_a_generator(state):
    state.seen = []

    def lengths(items):
        while True:
            yield len(items)

    numbers = lengths(state.seen)

    def fun(x):
        state.seen.append(1)
        return x * next(numbers)

    return fun


CHANGING = [
    item_of_a_list, item_of_a_dict_beside_a_kept_tensor, item_that_comes_to_be, attribute,
    attribute_of_a_class, variable, module_variable, variable_in_turn, what_is_made_once,
    object_that_is_made_once, length_of_a_list, list_that_torch_reads, new_list, window,
    items_of_a_set, text, count_that_decides_late, count_that_is_copied, count_read_by_a_helper,
    list_read_through_a_tuple, list_read_through_slots, list_read_by_its_method,
    list_read_by_a_generator,
]  # fmt: skip


def results_of(make, prepare):
    """Outputs, gradients of two orders, and what is left, of five calls."""
    state = SimpleNamespace()
    run = prepare(make(state))
    found = []
    for i in range(5):
        x = torch.arange(1.0, 4.0).mul(i + 1).requires_grad_()
        y = run(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        left = {k: repr(v) for k, v in vars(state).items() if k != "made"}
        found.append((y.detach(), grad.detach(), second, left, COUNT, Shared.count))
    return found


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("make", CHANGING)
@pytest.mark.sampled(3)
def test_what_a_function_changes_and_reads_is_that_of_each_call(make, nested):
    def prepare(fun):
        return tr.checkpoint(tr.checkpoint(fun)) if nested else tr.checkpoint(fun)

    assert_same(results_of(make, prepare), results_of(make, lambda fun: fun))


class Counter:
    def __init__(self):
        self.calls = 0


def count_runs(way):
    """A function that counts its runs in some way, and how to read the count."""
    number, items, table, owner = 0, [], {}, Counter()

    def by_variable(x):
        nonlocal number
        number += 1
        return x.sin()

    def by_list(x):
        items.append((x.shape, "run"))
        return x.sin()

    def by_dict(x):
        table["runs"] = table.get("runs", 0) + 1
        return x.sin()

    def by_attribute(x):
        owner.calls += 1
        return x.sin()

    def bump(counter):
        counter.calls = counter.calls + 1

    def by_helper(x):
        bump(owner)
        return x.sin()

    return {
        "variable": (by_variable, lambda: number),
        "list": (by_list, lambda: len(items)),
        "dict": (by_dict, lambda: table["runs"]),
        "attribute": (by_attribute, lambda: owner.calls),
        "helper": (by_helper, lambda: owner.calls),
    }[way]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("way", ["variable", "list", "dict", "attribute", "helper"])
def test_a_counter_that_nothing_reads_counts_traces(way, nested):
    fun, count = count_runs(way)
    run = tr.checkpoint(tr.checkpoint(fun) if nested else fun)
    run(torch.ones(3, requires_grad=True)).sum().backward()
    assert count() == 1
    for _ in range(3):
        run(torch.ones(3, requires_grad=True)).sum().backward()
    assert count() == 1


def test_a_counter_that_is_read_costs_a_trace_for_each_value_and_a_warning():
    state = SimpleNamespace()
    run = tr.checkpoint(item_of_a_list(state))
    with pytest.warns(RetraceWarning, match=r"the closed-over state.n changes"):
        found = [run(torch.ones(())).item() for _ in range(10)]
    assert found == list(range(1, 11))


def test_a_counter_beside_tensors_that_is_read_gives_a_warning():
    run = tr.checkpoint(item_of_a_dict_beside_a_kept_tensor(SimpleNamespace()))
    with pytest.warns(RetraceWarning, match=r"what it keeps in kept.n changes"):
        for _ in range(10):
            run(torch.ones(3))


def test_values_that_come_again_have_their_traces():
    traced = []
    state = SimpleNamespace()
    turn = variable_in_turn(state)

    def fun(x):
        traced.append(1)
        return turn(x)

    run = tr.checkpoint(fun)
    for _ in range(6):
        run(torch.ones(3))
    assert len(traced) == 2


def test_stand_ins_are_gone_after_an_error():
    numbers, items = [0], []

    def fun(x):
        numbers[0] += 1
        items.append(x.sum())
        if type(items) is not list:
            raise ValueError("a stand-in")
        return x.sin()

    run = tr.checkpoint(fun)
    for _ in range(3):
        run(torch.ones(3))
    assert type(items) is list and all(type(t) is torch.Tensor for t in items)
    assert numbers == [3] and len(items) == 3


@pytest.mark.parametrize("changes", [False, True])
def test_a_checkpoint_that_is_made_in_the_function_keeps_no_stand_in(changes):
    numbers, items = [0], []

    def step(x):
        if changes:
            numbers[0] += 1
            items.append(1)
        return x.sin()

    def fun(x):
        numbers[0] += 1
        items.append(1)
        return tr.checkpoint(lambda x: step(x))(x)

    kept = tr.checkpoint(step)
    run = tr.checkpoint(lambda x: kept(fun(x)))
    for _ in range(3):
        x = torch.ones(3, requires_grad=True)
        assert_same(run(x).detach(), x.sin().sin().detach())
    assert_same(kept(x), x.sin())
    assert type(numbers[0]) is int and type(items) is list
    assert all(type(item) is int for item in items)
