"""Functions that keep tensors beside state that changes with each call, against plain PyTorch."""

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
