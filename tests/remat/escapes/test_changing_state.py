"""Functions that keep tensors beside state that changes with each call, against plain PyTorch."""

import copy
from types import SimpleNamespace

import pytest
import torch

import torchremat as tr
from tests.helpers import assert_same

SCALE, LAST = 1.0, None


def scale_in_a_dict():
    kept = {"scale": 1.0}

    def fun(x):
        kept["aux"] = x.sum()
        return x * kept["scale"]

    def read():
        kept["scale"] += 1
        return [kept["aux"]]

    return fun, read


def scale_in_a_list():
    kept = [1.0]

    def fun(x):
        kept.append(x.sum())
        return x * kept[0]

    def read():
        kept[0] += 1
        return [kept.pop()]

    return fun, read


def scale_in_an_object():
    kept = SimpleNamespace(scale=1.0)

    def fun(x):
        kept.aux = x.sum()
        return x * kept.scale

    def read():
        kept.scale += 1
        return [kept.aux]

    return fun, read


def scale_in_a_global():
    def fun(x):
        global LAST
        LAST = x.sum()
        return x * SCALE

    def read():
        global SCALE
        SCALE += 1
        return [LAST]

    return fun, read


def measure(items):
    return len(items)


def size_of_a_dict():
    kept = {}

    def fun(x):
        kept["aux"] = x.sum()
        return x * measure(kept)

    def read():
        kept[len(kept)] = 1
        return [kept["aux"]]

    return fun, read


def window_of_a_dict():
    kept, step = {}, [0]

    def fun(x):
        kept[f"{step[0]}"] = x.sum()
        while measure(kept) > 2:
            del kept[next(iter(kept))]
        return x * measure(kept)

    def read():
        step[0] += 1
        return list(kept.values())

    return fun, read


def new_list_with_a_last_item():
    kept = SimpleNamespace(items=[])

    def fun(x):
        kept.items = [*kept.items, x.sum()][-2:]
        return x * 1

    return fun, lambda: kept.items


def new_tuple_with_a_last_item():
    kept = SimpleNamespace(items=())

    def fun(x):
        kept.items = (*kept.items, x.sum())[-2:]
        return x * 1

    return fun, lambda: list(kept.items)


def new_list_that_is_emptied():
    kept, step = SimpleNamespace(items=[]), [0]

    def fun(x):
        kept.items = [*kept.items, x.sum()]
        return x * 1

    def read():
        found, step[0] = list(kept.items), step[0] + 1
        if step[0] % 2 == 0:
            kept.items = []
        return found

    return fun, read


def new_dict_with_the_old_value():
    kept = SimpleNamespace(d={"now": torch.zeros(())})

    def fun(x):
        kept.d = {"now": x.sum(), "before": kept.d["now"]}
        return x * 1

    return fun, lambda: list(kept.d.values())


def two_attributes_in_turn():
    kept = SimpleNamespace(now=torch.zeros(()), before=torch.zeros(()))

    def fun(x):
        kept.before = kept.now
        kept.now = x.sum()
        return x * 1

    return fun, lambda: [kept.now, kept.before]


def two_objects_in_turn():
    now, before = SimpleNamespace(t=torch.zeros(())), SimpleNamespace(t=None, aux=None)

    def fun(x):
        before.aux = x.mean()
        before.t = now.t
        now.t = x.sum()
        return x * 1

    return fun, lambda: [now.t, before.t, before.aux]


MAKERS = [
    scale_in_a_dict, scale_in_a_list, scale_in_an_object, scale_in_a_global, size_of_a_dict,
    window_of_a_dict, new_list_with_a_last_item, new_tuple_with_a_last_item,
    new_list_that_is_emptied, new_dict_with_the_old_value, two_attributes_in_turn,
    two_objects_in_turn,
]  # fmt: skip


def results_of(make, prepare):
    global SCALE, LAST
    SCALE, LAST = 1.0, None
    fun, read = make()
    run = prepare(fun)
    torch.manual_seed(0)
    found = []
    for _ in range(5):
        x = torch.randn(3, requires_grad=True)
        y = run(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        found.append((y.detach(), grad, [t.detach() for t in read()]))
    return found


@pytest.mark.parametrize("make", MAKERS)
def test_state_beside_kept_tensors_is_that_of_each_call(make):
    assert_same(results_of(make, tr.checkpoint), results_of(make, lambda fun: fun))


def read_by_iteration(kept):
    return len([1 for _ in kept])


def read_by_an_index(kept):
    try:
        return 3 if kept[2] is not None else 2
    except IndexError:
        return 1


READS = {
    "a helper": measure,
    "iteration": read_by_iteration,
    "an index": read_by_an_index,
    "a slice": lambda kept: 2 if kept[2:] else 1,
    "a star": lambda kept: len([*kept]),
    "a sum of lists": lambda kept: len([1] + kept),  # noqa: RUF005
    "a comparison": lambda kept: 1 if kept[:0] < [None, None] and kept.__len__() < 3 else 2,
    "a copy": lambda kept: len(copy.copy(kept)),
    "a tree": lambda kept: len(torch.utils._pytree.tree_leaves({"kept": kept})),
    "an assignment": lambda kept: assign_rest(*kept),
    "itself": lambda kept: kept.extend(kept) or 1,
    "a shorter list": lambda kept: kept.__delitem__(slice(0, -2)) or 1,
}


def assign_rest(first, *rest):
    return 1 + len(rest)


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_list_that_is_appended_to_and_read_has_its_length_in_each_call(read, with_gradients):
    def lengths(prepare):
        kept, found = [], []
        alias = [kept]

        def fun(x):
            kept.append(x.sum())
            return x * read(alias[0])

        run = prepare(fun)
        with torch.set_grad_enabled(with_gradients):
            for _ in range(5):
                found.append((run(torch.ones(3, requires_grad=True)).detach(), len(kept)))
        assert type(kept) is list
        return found

    assert_same(lengths(tr.checkpoint), lengths(lambda fun: fun))


@pytest.mark.parametrize("nested", [True, False])
def test_a_list_that_is_only_appended_to_costs_one_trace(nested):
    kept, traced = [], []

    def keep(x):
        for items in [kept]:
            items.append(x.sum())
        kept.extend([x.mean()])
        traced.append(1)
        return x.sin()

    inner = tr.checkpoint(keep) if nested else keep
    run = tr.checkpoint(lambda x: inner(x))
    for length in (0, 3, 1, 7, 2):
        del kept[length:]
        kept.extend(torch.ones(length - len(kept)))
        run(torch.ones(3))
        assert len(kept) == length + 2
    assert len(traced) == 1


def test_the_type_of_a_list_is_its_own_again_after_an_error():
    kept = []

    def fun(x):
        kept.append(x.sum())
        if len(kept) == 2:
            raise ValueError("two")
        return x.sin()

    run = tr.checkpoint(fun)
    run(torch.ones(3))
    with pytest.raises(ValueError, match="two"):
        run(torch.ones(3))
    assert type(kept) is list
    assert len(kept) == 1
