"""What a function does besides computing is noticed when it is traced, and said with the line."""

import copy
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same, nothing_left_behind
from torchremat.errors import BudgetError, BudgetWarning, EffectError

rng = np.random.default_rng(0)
own = random.Random(0)
generator = torch.Generator()


def python(x):
    return x * random.random()


def python_gauss(x):
    return x * own.gauss(0, 1)


def python_shuffle(x):
    order = [0, 1, 2]
    random.shuffle(order)
    return x[order]


def numpy_global(x):
    return x * float(np.random.rand())


def numpy_generator(x):
    return x.cos() if rng.random() < 0.5 else x.sin()


def seeds(x):
    torch.manual_seed(3)
    return x * torch.rand(3)


def seeds_a_generator(x):
    generator.manual_seed(4)
    return x * torch.rand(3, generator=generator)


def seeds_in_a_scope(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42)
        y = nn.functional.dropout(x, 0.5)
    return y.sin()


def forks_alone(x):
    with torch.random.fork_rng(devices=[]):
        y = nn.functional.dropout(x, 0.5)
    return y.sin()


def draws_twice_from_a_state(x):
    state = torch.get_rng_state()
    y = nn.functional.dropout(x, 0.5)
    torch.set_rng_state(state)
    return y * nn.functional.dropout(x, 0.5)


def makes_a_generator(x):
    return x * torch.rand(3, generator=torch.Generator().manual_seed(4))


DRAWING = [
    python, python_gauss, python_shuffle, numpy_global, numpy_generator, seeds, seeds_a_generator,
    seeds_in_a_scope, forks_alone, draws_twice_from_a_state, makes_a_generator,
]  # fmt: skip


@pytest.mark.parametrize("fun", DRAWING)
def test_random_numbers_that_no_operator_draws(fun):
    x = torch.ones(3, requires_grad=True)
    states = random.getstate(), own.getstate(), rng.bit_generator.state, torch.get_rng_state()
    line = rf"at test_effects.py:\d+ \({fun.__name__}\)"
    with nothing_left_behind(), pytest.raises(EffectError, match=line):
        tr.checkpoint(fun)(x)
    after = random.getstate(), own.getstate(), rng.bit_generator.state, torch.get_rng_state()
    assert states[:3] == after[:3]
    assert_same(states[3], after[3])


@pytest.mark.usefixtures("no_tapes")
def test_drawing_deep_inside_a_module():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + np.random.normal()

    net = tr.nn.wrap(nn.Sequential(nn.Linear(3, 3), Noisy()))
    with pytest.raises(
        EffectError, match=r"numpy.random, or seeds it, at test_effects.py:\d+ \(for"
    ):
        net(torch.ones(2, 3))


def test_another_thread_that_draws_is_not_blamed():
    done = threading.Event()

    def draw():
        while not done.is_set():
            random.random()
            torch.rand(1)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(3):
            tr.checkpoint(lambda x: x.sin().cos())(torch.ones(3))
    finally:
        done.set()
        thread.join()


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.count = 0
        self.seen = []
        self.table = {}


class Counts(Module):
    def forward(self, x):
        self.count += 1
        return self.lin(x)


class Appends(Module):
    def forward(self, x):
        self.seen.append(x.shape)
        return self.lin(x)


@pytest.mark.usefixtures("no_tapes")
@pytest.mark.parametrize("way", ["wrap", "checkpoint", "inside"])
@pytest.mark.parametrize(("kind", "name"), [(Counts, "count"), (Appends, "seen")])
def test_a_forward_that_changes_an_attribute(kind, name, way):
    module = kind()
    net = module if way == "wrap" else nn.Sequential(module)
    fun = tr.checkpoint(net) if way == "checkpoint" else tr.nn.wrap(net)
    line = rf"attribute '{name}' of the module .* at test_effects.py:\d+ \(forward\)"
    with nothing_left_behind(), pytest.raises(EffectError, match=line):
        fun(torch.ones(2, 3))
    assert (module.count, module.seen) == (0, [])


def test_what_a_forward_makes_once_stays():
    class Lazy(Module):
        def forward(self, x):
            if "scale" not in self.table:
                self.table["scale"] = 2.0
                self.is_ready = True
            return self.lin(x) * self.table["scale"]

    net, plain = Lazy(), Lazy()
    plain.load_state_dict(net.state_dict())
    tr.nn.wrap(net)
    for _ in range(2):
        x = torch.ones(2, 3)
        assert_same(net(x), plain(x))
    assert (net.table, net.is_ready) == (plain.table, True)


class Grows(nn.Module):
    """Makes its inside at the first call, from random numbers; `way` says how."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.inner, self.noise = nn.Linear(3, 3), None

    def forward(self, x):
        if self.noise is None and self.way == "a tensor":
            self.noise = torch.randn(3)
        elif self.noise is None:
            self.noise = 1.0
            made = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
            self.inner = made if self.way == "a module" else self.inner
        return nn.functional.dropout(self.inner(x) * self.noise, 0.5)


@pytest.mark.parametrize("way", ["a tensor", "a module", "a module that is dropped"])
@pytest.mark.parametrize("policy", ["full", "budget:100%"])
def test_a_first_call_that_draws_what_it_keeps_is_as_in_plain_pytorch(way, policy):
    """Its draws are not lost, and later calls are a graph."""
    torch.manual_seed(0)
    plain = nn.Sequential(Grows(way), nn.Tanh())
    wrapped = tr.nn.wrap(copy.deepcopy(plain), policy)
    found = []
    for net in (plain, wrapped):
        torch.manual_seed(1)
        outputs = [net(torch.ones(64, 3)) for _ in range(3)]
        for y in outputs:
            y.square().sum().backward()
        found.append((outputs, [p.grad for p in net.parameters()], torch.get_rng_state()))
    assert_same(*found)
    assert tr.nn.report(wrapped).traces >= 1


def test_a_budget_that_a_first_call_exceeds_is_a_warning():
    """What runs once, on a tape, says nothing of the graph of later calls."""
    net = tr.nn.wrap(Grows("a module that is dropped"), "budget:1B")
    x = torch.ones(64, 3)
    with pytest.warns(BudgetWarning, match="The least that was found"):
        net(x).sum().backward()
    with pytest.raises(BudgetError, match="The least that was found"):
        net(x)


def test_counters_outside_modules_are_the_users_business():
    calls = []

    @tr.checkpoint
    def fun(x):
        calls.append(1)
        return x.sin()

    for _ in range(3):
        fun(torch.ones(2))
    assert calls == [1]


def test_lists_and_dicts_that_are_arguments_are_changed_at_each_call():
    def attend(x, cache, options):
        cache.append(x.sin())
        options["steps"] += 1
        return x.cos(), cache

    x, cache, options = torch.ones(3, requires_grad=True), [], {"steps": 1}
    _, new = tr.checkpoint(attend)(x, cache, options=options)
    assert options == {"steps": 2}
    assert_same(cache, [x.sin()])
    assert_same(new, [x.sin()])

    def grows(x, static):
        static.append(1)
        return x.sin()

    tr.checkpoint(grows, static_argnums=1)(x, static := [])
    assert static == [1]


@pytest.mark.usefixtures("no_tapes")
def test_an_attribute_of_the_class_that_a_module_makes_its_own():
    class Counted(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x.sin()

    with pytest.raises(EffectError, match=r"'calls' of the module .*, which it did not have: a"):
        tr.nn.wrap(Counted())(torch.ones(3))


def test_an_operator_that_writes_to_out_and_to_other_arguments():
    def normalize(x, mean, var):
        out, save_mean, save_invstd = torch.zeros(5, 3), torch.zeros(3), torch.zeros(3)
        torch.ops.aten._native_batch_norm_legit.out(
            x, None, None, mean, var, True, 0.1, 1e-5,
            out=out, save_mean=save_mean, save_invstd=save_invstd,
        )  # fmt: skip
        return out

    with pytest.raises(EffectError, match=r"writes to `out`, and in place to others.*copy its"):
        tr.checkpoint(normalize)(torch.randn(5, 3), torch.zeros(3), torch.ones(3))
