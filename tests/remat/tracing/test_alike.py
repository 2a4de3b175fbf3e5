"""Modules that are built alike share a trace; what differs in something that was read does not."""

import array
import copy
import gc
import sys
import weakref

import pytest
import torch
from torch import nn

import torchremat as tr

torch.manual_seed(0)
runs = array.array("b")  # nothing that follows changes looks into one


class Layer(nn.Module):
    def __init__(self, number=0, *, width=4, p=0.0, scale=1.0):
        super().__init__()
        self.number = number
        self.scale = scale
        self.first = nn.Linear(width, width)
        self.drop = nn.Dropout(p)
        self.register_buffer("shift", torch.randn(width))
        self.extra = None

    def forward(self, x, length=None, kind="a"):
        runs.append(1)
        y = self.drop(self.first(x).tanh()) * self.scale + self.shift
        return y if self.extra is None else self.extra(y, self.number)


def gradients(model, x, **kwargs):
    x = x.detach().requires_grad_()
    wrt = [x, *(p for p in model.parameters() if p.requires_grad)]
    torch.manual_seed(1)
    out = model(x, **kwargs)
    grads = torch.autograd.grad(out.sin().sum(), wrt, allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]


def check(model, x=None, **kwargs):
    """Gradients are those without checkpoints; returns how often the function ran for traces."""
    x = torch.randn(2, 4) if x is None else x
    plain = copy.deepcopy(model)
    expected = gradients(tr.nn.unwrap(plain), x, **kwargs)
    del runs[:]
    found = gradients(model, x, **kwargs)
    count = len(runs)
    assert all(map(torch.equal, expected, found)) and len(expected) == len(found)
    return count


def wrapped(*layers, policy="dots"):
    return tr.nn.wrap(nn.Sequential(*layers), policy, select="*")


def test_alike_layers_share_one_trace_and_one_program():
    model = wrapped(*(Layer() for _ in range(6)))
    check(model[:2])
    assert check(model) == 0
    assert len({id(layer.forward.last_program) for layer in model[1:]}) == 1


def test_numbers_that_are_not_read_are_not_guarded():
    model = wrapped(*(Layer(number) for number in range(6)))
    check(model)
    assert check(wrapped(Layer(7), Layer(8))) <= 1  # the first, whose argument is a leaf
    assert check(model) == 0


def test_a_trace_for_each_value_that_is_read():
    layers = [Layer(number, scale=1.0 + number % 2) for number in range(6)]
    model = wrapped(*layers)
    check(model)
    model[0].scale = 5.0
    assert check(model) > 0


def test_a_number_passed_on_but_not_read_is_free():
    def ignore(y, number):
        return y.cos()

    def read(y, number):
        return y * number

    model = wrapped(*(Layer(number) for number in range(5)))
    for layer in model:
        layer.extra = ignore
    check(model)
    assert check(wrapped(*model)) == 0
    model = wrapped(*(Layer(number) for number in range(1, 5)))
    for layer in model:
        layer.extra = read
    check(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.eval(),
        lambda layer: setattr(layer.drop, "p", 0.25),
        lambda layer: layer.double().float().first.weight.requires_grad_(False),
        lambda layer: layer.register_buffer("shift", torch.randn(1)),
        lambda layer: setattr(layer, "first", nn.Linear(4, 4, bias=False)),
        lambda layer: setattr(layer, "extra", lambda y, n: y.exp()),
        lambda layer: layer.first.register_forward_hook(lambda m, a, out: out * 2),
        lambda layer: setattr(layer.first, "bias", layer.shift_parameter()),
    ],
    ids=["eval", "p", "frozen", "shape", "child", "function", "hook", "tied"],
)
def test_what_differs_has_a_trace_of_its_own(change):
    Layer.shift_parameter = lambda self: nn.Parameter(self.shift.clone())
    layers = [Layer(p=0.5) for _ in range(3)]
    change(layers[1])
    check(wrapped(*layers))
    del Layer.shift_parameter


def test_tied_weights_are_not_those_of_a_layer_without():
    class Tied(nn.Module):
        def __init__(self, *, tied):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            if tied:
                self.b.weight = self.a.weight

        def forward(self, x):
            runs.append(1)
            return self.b(self.a(x).tanh())

    check(wrapped(Tied(tied=True), Tied(tied=False), Tied(tied=True)))
    check(wrapped(Tied(tied=False), Tied(tied=True), Tied(tied=False)))


def test_a_weight_that_layers_have_in_common():
    layers = [Layer() for _ in range(3)]
    for layer in layers:
        layer.first = layers[0].first
    check(wrapped(*layers))


def test_a_layer_that_changes_after_it_was_adopted():
    model = wrapped(*(Layer(number) for number in range(4)))
    check(model)
    model[2].scale = 3.0
    model[3].first.weight = nn.Parameter(torch.randn(4, 4))
    check(model)
    model[1].extra = lambda y, n: y * n
    check(model)


def test_policies_by_module_names_are_asked_for_each():
    model = nn.Sequential(*(Layer() for _ in range(3)))
    tr.nn.wrap(model, tr.checkpoint_policies.save_modules("1.first"), select="*")
    x = torch.randn(2, 4)
    with pytest.warns(UserWarning, match="matches nothing"):
        gradients(model, x)
    saved = [len(layer.forward.last_program.residuals) for layer in model]
    assert saved[1] > saved[0] == saved[2]


def test_a_second_derivative_of_the_layer_that_is_left():
    layers = [Layer(number) for number in range(3)]
    model = wrapped(*layers)
    check(model)
    last = layers[-1]
    gone = weakref.ref(layers[0])
    del model, layers
    del runs[:]
    gc.collect()
    assert gone() is None
    x = torch.randn(2, 4, requires_grad=True)

    def second(function):
        (g,) = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(g.sum(), [x, last.first.weight])

    found = second(last)
    assert all(map(torch.allclose, found, second(tr.nn.unwrap(last))))


def test_a_copy_of_a_module_needs_no_trace():
    layer = wrapped(Layer(p=0.5))
    check(layer)
    assert check(copy.deepcopy(layer)) == 0


def test_layers_are_freed_one_by_one():
    layers = [wrapped(Layer(number)) for number in range(3)]
    for layer in layers:
        check(layer)
    del runs[:]
    weights = [weakref.ref(layer[0].first.weight) for layer in layers]
    del layer
    while layers:
        layers.pop(0)
        gc.collect()
        assert [w() is None for w in weights] == [True] * (3 - len(layers)) + [False] * len(layers)


@pytest.mark.parametrize("lengths", [(38, 41, 57, 20), (1.5, 2.5, 7.0), ("a", "b", "c")])
def test_arguments_that_are_not_read(lengths):
    model = tr.nn.wrap(Layer(), "dots")
    counts = [check(model, length=length) for length in lengths]
    assert not any(counts[2:])


def test_arguments_that_are_read_and_others_that_are_not():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x, factor, length, name):
            runs.append(1)
            options = {"length": length, "name": name}
            y = self.first(x)
            return y * factor if isinstance(options["length"], int) else y

    model = tr.nn.wrap(Scaled(), "dots")
    calls = [(1 + i % 2, 10 + i, "n" * i) for i in range(6)]
    counts = [check(model, factor=f, length=n, name=s) for f, n, s in calls]
    assert not any(counts[3:])


def test_a_number_that_is_only_asked_for_its_type_and_then_its_value():
    class Exact(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x, n):
            return self.first(x).cos() if type(n) is int and n > 100 else self.first(x)

    model = tr.nn.wrap(Exact(), "dots")
    for n in (1, 2, 3, 101, 102, 5):
        check(model, n=n)


def test_a_number_that_is_left_in_an_attribute_or_returned_is_read():
    def returned(x, n):
        return x.sin(), n

    fun = tr.checkpoint(returned)
    x = torch.randn(3, requires_grad=True)
    assert [fun(x, n)[1] for n in (3, 4, 5, 6)] == [3, 4, 5, 6]
    assert all(type(fun(x, n)[1]) is int for n in (3, 7, 8))


def test_sizes_and_numbers_that_vary_together():
    model = tr.nn.wrap(Layer(), "dots")
    sizes = [(3, 30), (4, 40), (5, 50), (6, 60), (7, 70), (8, 80)]
    counts = [check(model, torch.randn(size, 4), length=n) for size, n in sizes]
    assert not any(counts[3:])


def test_an_attribute_that_counts_steps_and_is_not_read():
    layer = tr.nn.wrap(Layer(), "dots")
    counts = []
    for step in range(5):
        layer.number = step
        counts.append(check(layer))
    assert not any(counts[2:])


def test_a_profiler_stays_and_nothing_is_watched():
    model = tr.nn.wrap(Layer(), "dots")

    def look(frame, event, argument):
        pass

    sys.setprofile(look)
    try:
        for length in (1, 2, 3):
            check(model, length=length)
        assert sys.getprofile() is look
    finally:
        sys.setprofile(None)


def test_alike_layers_keep_jobs_of_a_budget_of_their_own():
    def extend(y, _):
        return y.cos().exp().sin().exp().tanh().exp()

    layers = [Layer(width=32) for _ in range(2)]
    for layer in layers:
        layer.extra = extend
    small, large = (tr.nn.wrap(layer, "budget:80%") for layer in layers)
    check(small, torch.randn(64, 32))
    assert check(large, torch.randn(64, 32)) == 0
    programs = [layer.forward.last_program for layer in layers]
    assert programs[0].region is programs[1].region
    assert programs[0].policy is not programs[1].policy
    check(large, torch.randn(128, 32))
    (of_small,), (of_large,) = tr.nn.report(small).budgets, tr.nn.report(large).budgets
    assert of_small != of_large
    assert tr.nn.report(nn.Sequential(small, large)).budgets == (of_small, of_large)
