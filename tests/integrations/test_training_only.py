"""Modules under `checkpoint` only while they train."""

import copy
import functools
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

from tests.helpers import assert_freed, assert_same
from torchremat.integrations.callback import StepPeak
from torchremat.integrations.training_only import TrainingPolicy, find_training_forward, remove
from torchremat.measure import LiveBytes
from torchremat.nn import report, wrap


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


X = torch.ones(2, 4)


def is_checkpointed(model):
    return type(model(X).grad_fn).__name__ == "CheckpointBackward"


def test_it_is_on_in_train_mode_alone():
    model = make_model()
    assert TrainingPolicy("full").apply_to(model) == [""]
    assert is_checkpointed(model)
    assert not is_checkpointed(model.eval())
    assert is_checkpointed(model.train())
    assert remove(model) == 1
    assert not is_checkpointed(model)
    assert remove(model) == 0


def test_what_was_wrapped_before_is_again_and_reports():
    model = wrap(make_model(), "dots")
    forward = model.forward
    TrainingPolicy("full").apply_to(model)
    assert model.forward is not forward
    remove(model)
    assert model.forward is forward
    model(X)
    assert report(model).by_decision()


RUNS = itertools.count()


class Counting(nn.Module):
    """Counts how often its forward runs in Python: a replay does not run it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        next(RUNS)
        return self.linear(x).tanh(), self.linear(x).exp()


def count_runs(model):
    before = next(RUNS)
    torch.stack(model(X)).sum().backward()
    return next(RUNS) - before - 1


def put_around(model):
    """As accelerate does for autocast."""
    inner = model.forward
    model.forward = functools.wraps(inner.__func__)(lambda *args: inner(*args))


@pytest.mark.parametrize("place", ["alone", "beneath", "above"])
def test_traces_outlast_a_moment_without_it(place):
    model = Counting()
    if place == "above":
        put_around(model)
    TrainingPolicy("full").apply_to(model)
    if place == "beneath":
        put_around(model)
    assert count_runs(model) > 0
    for _ in range(2):
        remove(model)
        assert count_runs(model) == 1
        TrainingPolicy("full").apply_to(model)
        assert count_runs(model) == 0
    remove(model)
    TrainingPolicy("dots").apply_to(model)
    # another policy decides anew, on the same graph; a forward that hides the module's has its own
    assert (count_runs(model) > 0) is (place != "alone")
    assert str(find_training_forward(model).policy) == "dots"


def test_a_forward_that_was_replaced_in_the_meantime_is_traced():
    model, twice = Counting(), lambda x: (x * 2, x * 3)
    model.forward = twice
    TrainingPolicy("full").apply_to(model)
    for forward in (lambda x: (x * 4, x * 5), None, twice):
        assert_same(model(X), (X * 2, X * 3))
        remove(model)
        del model.forward
        gc.collect()
        if forward is not None:
            model.forward = forward
        TrainingPolicy("full").apply_to(model)
        expected = Counting.forward(model, X) if forward is None else forward(X)
        assert_same(model(X), expected)
        remove(model)
        model.forward = twice
        TrainingPolicy("full").apply_to(model)


@pytest.mark.parametrize("hides", [False, True])
def test_a_module_that_it_was_on_is_freed(hides):
    model = Counting()
    if hides:
        put_around(model)
    TrainingPolicy("full").apply_to(model)
    count_runs(model)
    remove(model)
    reference = weakref.ref(model)
    del model
    assert_freed(reference)


def test_a_backward_pass_outlasts_it_where_it_hid_a_forward():
    """What a second derivative needs is traced once the forward is off the module."""
    model, x = Counting(), X.clone().requires_grad_()
    inner = model.forward
    model.forward = lambda x: inner(x)
    expected = second_derivative(model(x)[0], x)
    TrainingPolicy("full").apply_to(model)
    y, _ = model(x)
    remove(model)
    assert_same(second_derivative(y, x), expected)


def second_derivative(y, x):
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)


def test_it_is_off_also_beneath_what_another_library_puts_around_it():
    model = make_model()
    TrainingPolicy("full").apply_to(model)
    inner = model.forward

    @functools.wraps(inner.__func__)
    def around(*args):
        return inner(*args)

    model.forward = around
    assert is_checkpointed(model)
    assert find_training_forward(model) is inner
    remove(model)
    assert model.forward is around
    assert not is_checkpointed(model)
    assert find_training_forward(model) is None


def test_a_copy_is_independent():
    model = make_model()
    TrainingPolicy("full").apply_to(model)
    other = copy.deepcopy(model)
    remove(model)
    assert is_checkpointed(other)
    assert not is_checkpointed(model)


@pytest.mark.parametrize("options", [{"policy": "dost"}, {"select": "9"}, {"compile": "none"}])
def test_an_error_changes_nothing(options):
    model = make_model()
    TrainingPolicy("full").apply_to(model)
    with pytest.raises(ValueError, match=r"nearest|there are"):
        TrainingPolicy(**options).apply_to(model)
    assert is_checkpointed(model)


def test_compiled_by_dynamo():
    model = make_model()
    expected = model(X)
    TrainingPolicy("full").apply_to(model)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(X), expected)


def test_a_step_is_measured_as_live_bytes_are():
    def step():
        return make_model()(X).square().sum().backward()

    peak = StepPeak(torch.device("cpu"))
    peak.start()
    assert peak.is_running
    step()
    found = peak.stop()
    assert not peak.is_running
    with LiveBytes() as memory:
        step()
    assert found == memory.peak > 0
