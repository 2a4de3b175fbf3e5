"""One budget over many steps: its bytes, its plans, and steps that cannot be met."""

import copy
import itertools
import random
import re
import warnings

import pytest
import torch

import torchremat as tr
from tests.helpers import assert_same, one_in, skip_before_2_13
from tests.planning.models import GPT
from torchremat.checkpoint_policies import memory_budget
from torchremat.errors import ArgumentTypeError, BudgetError, BudgetWarning
from torchremat.measure import LiveBytes


def tokens(batch, length):
    generator = torch.Generator().manual_seed(batch * length)
    return torch.randint(0, 64, (batch, length), generator=generator)


def step(model, x):
    """The loss, all gradients, and the peak."""
    with LiveBytes() as memory:
        loss = model(x).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
    return (loss.detach(), gradients), memory.peak


def plain_peak(batch, length):
    return step(GPT(), tokens(batch, length))[1]


@pytest.mark.parametrize("seed", [0, 1])
def test_two_plans_serve_all_sizes_and_every_step_keeps_within_the_budget(seed):
    skip_before_2_13(
        "torch.matmul of batches reads sizes as numbers, so that each length is traced"
    )
    plain, draw = GPT(), random.Random(seed)
    sizes = list(itertools.product((2, 3, 4), range(16, 64, 4)))
    limit = int(0.7 * plain_peak(4, 60))
    model = tr.nn.wrap(copy.deepcopy(plain), memory_budget(limit))
    for batch, length in draw.sample(sizes, 16):
        x = tokens(batch, length)
        found, peak = step(model, x)
        assert_same(found, step(plain, x)[0])
        assert peak <= limit
    report = tr.nn.report(model)
    assert 1 <= report.plans <= 2
    assert report.traces <= 3


class IntoABuffer(torch.nn.Module):
    """It writes into a part of a buffer that is most of its peak, and wants no copy of it."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)

    def forward(self, x):
        buffer = torch.empty(x.shape[0], 2048)
        with torch.no_grad():
            torch.mm(x, self.layer.weight, out=buffer[:, :32])
            buffer[:, :32].sub_(x)
        return self.layer(x).sin() * buffer[:, :32].sum()


def test_what_is_written_in_place_counts_once_for_all_sizes():
    plain = IntoABuffer()
    model = tr.nn.wrap(copy.deepcopy(plain), "budget:100%")
    for rows in (40, 48, 56):
        x = torch.randn(rows, 32)
        found, peak = step(model, x)
        expected, plain_peak = step(plain, x)
        assert_same(found, expected)
        assert peak <= plain_peak
        limit = float(re.search(r"\((\d+) bytes\)", tr.nn.report(model).budgets[0])[1])
        assert limit <= 1.02 * plain_peak


def test_a_budget_that_does_not_bind_makes_no_plan():
    model = tr.nn.wrap(GPT(), "budget:8GiB")
    for length in (16, 24, 32):
        model(tokens(2, length)).sum().backward()
    assert tr.nn.report(model).plans == 0


def test_a_fraction_is_fixed_by_the_largest_step_so_that_a_last_batch_ends_nothing():
    largest = plain_peak(4, 48)
    model = tr.nn.wrap(GPT(), "budget:70%")
    for batch, length in ((4, 48), (1, 4), (2, 40), (4, 48)):
        _, peak = step(model, tokens(batch, length))
        assert peak <= 0.7 * largest
    report = tr.nn.report(model)
    assert report.plans == 1
    (line,) = report.budgets
    assert f"({int(0.7 * largest)} bytes), fixed by the largest step so far" in line
    assert line in str(report)


def test_a_larger_step_raises_the_bytes_of_a_fraction():
    model = tr.nn.wrap(GPT(), "budget:70%")
    for length in (24, 32, 48):
        x = tokens(2, length)
        assert step(model, x)[1] <= 0.7 * plain_peak(2, length)
    assert tr.nn.report(model).plans <= 2


def test_a_declared_step_fixes_a_fraction_before_the_first_one():
    model = tr.nn.wrap(GPT(), "budget:70%", example=((tokens(4, 48),), {}))
    limit = int(0.7 * plain_peak(4, 48))
    for batch, length in ((2, 16), (4, 48), (4, 40)):
        assert step(model, tokens(batch, length))[1] <= limit
    report = tr.nn.report(model)
    assert report.plans == 1
    assert f"({limit} bytes), fixed by the step that was declared" in str(report)


def test_a_declared_step_of_layers_that_are_wrapped_one_by_one():
    example = ((tokens(4, 48),), {})
    model = tr.nn.wrap(GPT(), "budget:90%", select="layers.*", example=example)
    model(tokens(2, 16)).sum().backward()
    assert str(tr.nn.report(model)).count("fixed by the step that was declared") >= 1


def test_a_declared_step_that_cannot_be_met_is_an_error_and_nothing_is_wrapped():
    model = GPT()
    with pytest.raises(BudgetError, match=r"a peak of 1.00 KiB cannot be met"):
        tr.nn.wrap(model, "budget:1KiB", example=((tokens(2, 16),), {}))
    assert "forward" not in vars(model)
    with pytest.raises(ArgumentTypeError, match=r"\(args, kwargs\), but it is Tensor"):
        tr.nn.wrap(model, "budget:1GiB", example=tokens(2, 16))


class Branching(torch.nn.Module):
    """It asks for values, so that its calls run on tapes."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = x * 2 if x.sum().item() > 1e9 else x
        return x


@pytest.mark.parametrize("select", [None, "layers.*"])
def test_an_example_for_a_model_that_is_no_graph(select):
    model = Branching()
    example = ((torch.randn(64, 16),), {})
    with pytest.warns(BudgetWarning, match=r"example=\.\.\.\) is ignored: Branching cannot be one"):
        tr.nn.wrap(model, "budget:100%", select=select, example=example)
    for rows in (32, 16):
        x = torch.randn(rows, 16)
        assert_same(step(model, x)[0], step(tr.nn.unwrap(copy.deepcopy(model)), x)[0])


def test_a_job_that_has_begun_is_met_as_well_as_can_be_with_one_warning():
    limit = int(0.8 * plain_peak(2, 16))
    plain = GPT()
    model = tr.nn.wrap(copy.deepcopy(plain), memory_budget(limit))
    step(model, tokens(2, 16))
    with pytest.warns(BudgetWarning, match=rf"\({limit} bytes\). It runs with the least peak"):
        found, peak = step(model, tokens(4, 64))
    expected, most = step(plain, tokens(4, 64))
    assert_same(found, expected)
    assert limit < peak < most
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, tokens(4, 60))


def test_on_infeasible_error_raises_in_the_middle_too():
    limit = int(0.8 * plain_peak(2, 16))
    model = tr.nn.wrap(GPT(), memory_budget(limit, on_infeasible="error"))
    step(model, tokens(2, 16))
    with pytest.raises(BudgetError, match=r"cannot be met"):
        step(model, tokens(4, 64))
    step(model, tokens(2, 12))


def test_the_option_on_infeasible_is_checked():
    with pytest.raises(ValueError, match=r"on_infeasible='warn'\): it is 'best'"):
        memory_budget("1GiB", on_infeasible="warn")
    policy = memory_budget("1GiB", on_infeasible="error")
    assert eval(repr(policy)) == policy != memory_budget("1GiB")
    assert policy.spelling is None


def chain(x, w):
    for _ in range(6):
        x = torch.tanh(x @ w)
    return x.sum()


X, W = torch.ones(64, 32), torch.ones(32, 32)


def test_the_least_budget_is_met_and_no_smaller_one():
    least = tr.plan(chain, X, W, budget="least")
    assert least.peak_bytes <= least.budget < least.baseline.peak_bytes
    with pytest.raises(BudgetError):
        tr.plan(chain, X, W, budget=int(least.budget * 0.9))


def test_least_memory_for_some_time_lies_between():
    least, some, none = (
        tr.plan(chain, X, W, budget=text) for text in ("least", "time:+10%", "time:+0%")
    )
    assert least.peak_bytes <= some.peak_bytes <= none.peak_bytes
    assert some.recompute_seconds <= 0.1 * some.baseline.seconds
    assert none.recompute_seconds == 0


@pytest.mark.parametrize("text", one_in(2, ["least", "time:+20%"]))
def test_budgets_that_are_searched_hold_over_a_job(text):
    plain = GPT()
    model = tr.nn.wrap(copy.deepcopy(plain), f"budget:{text}")
    for batch, length in ((2, 32), (2, 24), (3, 40)):
        x = tokens(batch, length)
        found, peak = step(model, x)
        expected, most = step(plain, x)
        assert_same(found, expected)
        assert peak <= most
    assert 1 <= tr.nn.report(model).plans <= 2


def test_a_search_takes_no_limit_on_what_is_saved():
    with pytest.raises(TypeError, match=r"saved='1MiB'\): a search for the least memory"):
        memory_budget("least", saved="1MiB")
