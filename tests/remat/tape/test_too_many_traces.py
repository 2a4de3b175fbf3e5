"""A module with too many traces runs on tapes where it has none, and says so once."""

import copy
import warnings

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same
from torchremat.errors import RetraceWarning
from torchremat.measure import LiveBytes
from torchremat.remat.tracing.trace_cache import FEW_TRACES, MANY_TRACES


class InChunks(nn.Module):
    """It reads a size as a number, as a loss does that is computed in chunks."""

    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))

    def forward(self, x, scale=1):
        for layer in self.layers:
            x = x + torch.cat([torch.tanh(layer(x[i : i + 7])) for i in range(0, x.shape[0], 7)])
            x = x + (x * scale).sin().cos()
        return x


def sized(rows):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))


def step(model, *args):
    model.zero_grad()
    with LiveBytes() as memory:
        y = model(*args)
        y.sum().backward()
    return (y, [p.grad for p in model.parameters()]), memory.peak


def train(policy, calls, **options):
    """All steps equal plain ones; gives the model, the peaks and what was warned of."""
    plain = InChunks()
    model = tr.nn.wrap(copy.deepcopy(plain), policy, **options)
    peaks = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for args in calls:
            found, peak = step(model, *args)
            expected, plain_peak = step(plain, *args)
            assert_same(found, expected)
            peaks.append((peak, plain_peak))
    return model, peaks, [w for w in caught if w.category is RetraceWarning]


@pytest.mark.parametrize("policy", ["full", "dots", "budget:70%"])
def test_sizes_that_are_read_as_numbers(policy):
    sizes = range(20, 36)
    model, peaks, caught = train(policy, [(sized(n),) for n in sizes])
    assert tr.nn.report(model).traces <= FEW_TRACES
    (warning,) = caught
    assert "for different sizes" in str(warning.message)
    assert "Calls that have no trace run as they are from now on" in str(warning.message)
    if policy != "dots":  # it also saves what plain autograd does not
        assert all(peak <= plain for peak, plain in peaks)
    step(model, sized(22))  # it has a trace
    assert tr.nn.report(model).traces <= FEW_TRACES


def test_a_budget_keeps_its_bytes():
    largest = step(InChunks(), sized(48))[1]
    calls = [(sized(n),) for n in (48, *range(20, 40))]
    model, peaks, _ = train("budget:60%", calls)
    assert tr.nn.report(model).traces <= FEW_TRACES
    assert max(peak for peak, _ in peaks) <= 0.6 * largest


def test_numbers_that_are_read():
    model, _, caught = train("full", [(sized(20), n) for n in range(12)], select=None)
    assert tr.nn.report(model).traces <= MANY_TRACES
    assert "different Python numbers" in str(caught[0].message)


def test_numbers_and_sizes_that_differ_together():
    calls = [(sized(20 + n % 5), n % 7) for n in range(40)]
    model, _, caught = train("full", calls, select=None)
    assert tr.nn.report(model).traces <= 2 * MANY_TRACES
    assert len(caught) == 1


def test_sizes_that_are_read_with_numbers_that_are_read_too():
    """As packed batches of tokens come: each size is sure to have its own trace."""
    model, _, caught = train("full", [(sized(n), n % 11) for n in range(20, 36)], select=None)
    assert tr.nn.report(model).traces <= FEW_TRACES
    assert "for different sizes" in str(caught[0].message)


def test_evaluation_needs_no_trace_either():
    model, _, _ = train("full", [(sized(n),) for n in range(20, 30)])
    with torch.no_grad():
        assert_same(model(sized(60)), InChunks.forward(copy.deepcopy(model), sized(60)))
    traces = tr.nn.report(model).traces
    model.eval()
    with torch.no_grad():
        model(sized(61))
    assert tr.nn.report(model).traces == traces


def test_functions_go_on_being_traced(monkeypatch):
    monkeypatch.setattr(tr.config, "untraceable", "modules")
    f = tr.checkpoint(lambda x: torch.cat([x[i : i + 7].sin() for i in range(0, x.shape[0], 7)]))
    with pytest.warns(RetraceWarning) as caught:
        for rows in range(20, 36):
            x = sized(rows).requires_grad_()
            f(x).sum().backward()
            assert_same(x.grad, x.detach().cos())
    assert "run as they are" not in str(caught[0].message)


class Cache:
    """A container that is made anew in each call, and equal to no other."""

    def __init__(self, scale):
        self.scale = scale


class WithCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, cache):
        return (self.linear(x) * cache.scale).sin()


def test_an_argument_that_is_another_object_in_each_call():
    torch.manual_seed(0)
    plain = WithCache()
    model = tr.nn.wrap(copy.deepcopy(plain))
    with pytest.warns(RetraceWarning, match=r"another object in each call \(Cache\)") as told:
        for i in range(3 * FEW_TRACES):
            x = torch.randn(4, 8)
            found = torch.autograd.grad(model(x, Cache(i)).sum(), model.linear.weight)
            expected = torch.autograd.grad(plain(x, Cache(i)).sum(), plain.linear.weight)
            assert_same(found, expected)
    assert len(told) == 1
    assert tr.nn.report(model).traces == FEW_TRACES


def test_objects_that_are_equal_to_earlier_ones_are_traced():
    class Scale(Cache):
        def __eq__(self, other):
            return self.scale == other.scale

        def __hash__(self):
            return hash(self.scale)

    model, x = tr.nn.wrap(WithCache()), torch.randn(4, 8)
    for i in range(6):
        model(x, Scale(i % 2)).sum().backward()
    report = tr.nn.report(model)
    assert report.traces == 2
    assert {row.way for row in report} == {"graph"}
