"""Budgets as policies count on the updates that optimizers make in the backward pass."""

import pytest
import torch

import torchremat as tr
from tests.helpers import one_in
from tests.planning.stepping import MODELS, OPTIMIZERS, Mlp, make, train
from torchremat.checkpoint_policies import memory_budget
from torchremat.errors import BudgetError, BudgetWarning
from torchremat.measure import LiveBytes, resident_bytes
from torchremat.optim import step_in_backward


def find_least(name, optimizer):
    """The least peak of a plan with updates, beside what is there before the step."""
    model, x, stepped = make(name, optimizer)
    with step_in_backward(stepped), pytest.raises(BudgetError) as error:
        tr.plan(model, x, budget=1, optimizer=stepped)
    return error.value.least_bytes - resident_bytes(model, stepped, x)


@pytest.mark.parametrize(("name", "optimizer"), one_in(3, MODELS, OPTIMIZERS))
@pytest.mark.sampled(2)
def test_a_policy_keeps_to_a_budget_that_all_gradients_exceed(name, optimizer):
    plain_peak, *plain = train(*make(name, optimizer))
    budget = find_least(name, optimizer)
    model, x, stepped = make(name, optimizer)
    with step_in_backward(stepped):
        peak, *found = train(tr.nn.wrap(model, memory_budget(budget)), x, stepped)
    assert peak <= budget < plain_peak
    assert all(torch.equal(a, b) for a, b in zip(found[0], plain[0], strict=True))
    assert repr(found[1]) == repr(plain[1])


@pytest.mark.parametrize(
    ("name", "budget"),
    one_in(2, ["mlp", "gpt", "tied"], ["budget:60%", "budget:least", "budget:time:+10%"]),
)
@pytest.mark.sampled(2)
def test_an_estimate_is_what_a_step_takes(name, budget):
    model, x, stepped = make(name)
    with step_in_backward(stepped):
        estimated = tr.estimate(model, x, policy=budget, optimizer=stepped)
        peak, *_ = train(tr.nn.wrap(model, budget), x, stepped)
    assert peak == estimated.peak_bytes


@pytest.mark.parametrize("policy", [None, "none", "dots"])
def test_an_estimate_of_other_policies_counts_updates(policy):
    model, x, stepped = make("gpt", "adamw")
    usual = tr.estimate(model, x, policy=policy, optimizer=stepped).peak_bytes
    with step_in_backward(stepped):
        estimated = tr.estimate(model, x, policy=policy, optimizer=stepped).peak_bytes
        peak, *_ = train(model if policy is None else tr.nn.wrap(model, policy), x, stepped)
    assert peak <= estimated < usual


def test_a_percentage_is_one_of_the_step_without_updates():
    plain_peak, *_ = train(*make())
    model, x, stepped = make()
    with step_in_backward(stepped):
        wrapped = tr.nn.wrap(model, "budget:60%")
        peak, *_ = train(wrapped, x, stepped)
    (line,) = tr.nn.report(wrapped).budgets
    assert f"({int(0.6 * plain_peak)} bytes), fixed by the largest step so far" in line
    assert peak <= 0.6 * plain_peak


def test_updates_that_begin_later_are_counted_from_then_on():
    budget = find_least("gpt", "sgd")
    model, x, optimizer = make("gpt")
    wrapped = tr.nn.wrap(model, memory_budget(budget))
    with pytest.raises(BudgetError, match=r"optim\.step_in_backward"):
        wrapped(x)
    with step_in_backward(optimizer):
        peak, *_ = train(wrapped, x, optimizer)
    assert peak <= budget


def test_without_its_updates_a_job_goes_on_with_a_warning():
    _, *plain = train(*make("gpt"))
    model, x, optimizer = make("gpt")
    wrapped = tr.nn.wrap(model, memory_budget(find_least("gpt", "sgd")))
    stepping = step_in_backward(optimizer)
    torch.manual_seed(1)
    for number in range(3):
        optimizer.zero_grad()
        if number == 1:
            stepping.remove()
            with pytest.warns(BudgetWarning, match="cannot keep within"):
                loss = wrapped(x)
        else:
            loss = wrapped(x)
        loss.backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain[0], strict=True))


@pytest.mark.parametrize("is_autocast", [False, True])
def test_lengths_that_change(is_autocast):
    lengths, found = (6, 3, 8, 5, 12, 7), []
    for is_planned in (False, True):
        model, _, optimizer = make("gpt", "adamw")
        peaks = []
        torch.manual_seed(1)
        if is_planned:
            tr.nn.wrap(model, memory_budget(limit := int(0.7 * max(found[0][0]))))
            stepping = step_in_backward(optimizer)
        for length in lengths:
            optimizer.zero_grad()
            with LiveBytes() as memory:
                with torch.autocast("cpu", enabled=is_autocast):
                    loss = model(torch.arange(2 * length).reshape(2, length))
                loss.backward()
            optimizer.step()
            peaks.append(memory.peak)
        found.append((peaks, list(model.parameters()), optimizer.state_dict()))
    stepping.remove()
    assert max(found[1][0][1:]) <= limit  # the first makes the optimizer's state
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    assert repr(found[0][2]) == repr(found[1][2])


@pytest.mark.parametrize("settings", [{"max_norm": 1.0}, {"accumulate": 2}])
def test_gradients_that_are_clipped_or_accumulated_are_counted_whole(settings):
    model, x, optimizer = make()
    wrapped = tr.nn.wrap(model, memory_budget(find_least("mlp", "sgd")))
    with step_in_backward(optimizer, **settings), pytest.raises(BudgetError):
        wrapped(x)


def test_two_optimizers():
    plain_peak, *_ = train(*make())
    model, x, _ = make()
    halves = model.layers[:4], model.layers[4:]
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.01) for half in halves]
    wrapped = tr.nn.wrap(model, "budget:45%")
    with step_in_backward(optimizers[0]):
        with pytest.raises(BudgetError):
            wrapped(x)
        with step_in_backward(optimizers[1]), LiveBytes() as memory:
            wrapped(x).backward()
    assert memory.peak <= 0.45 * plain_peak


def test_blocks_are_planned_as_without_updates():
    model, x, optimizer = make("gpt")
    wrapped = tr.nn.wrap(model, "budget:100%", select="layers.*")
    wrapped(x).backward()
    budgets = tr.nn.report(wrapped).budgets
    with step_in_backward(optimizer):
        train(wrapped, x, optimizer)
    assert len(budgets) == 1 and tr.nn.report(wrapped).budgets == budgets


def test_with_tiles():
    budget = find_least("gpt", "sgd")
    model, x, optimizer = make("gpt")
    with step_in_backward(optimizer):
        peak, *_ = train(tr.nn.wrap(model, memory_budget(budget, tile=True)), x, optimizer)
    assert peak <= budget


def test_the_largest_size_with_updates_is_larger():
    with torch.device("meta"):
        model, x = Mlp(512, 6), torch.empty(4, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    usual = tr.fit(model, x, memory="26MiB", optimizer=optimizer, maximize="batch")
    with step_in_backward(optimizer):
        found = tr.fit(model, x, memory="26MiB", optimizer=optimizer, maximize="batch")
    assert found.size > 2 * usual.size


def test_a_program_that_hands_out_nothing_early_counts_all_gradients(monkeypatch):
    model, x, optimizer = make()
    with step_in_backward(optimizer):
        step = tr.checkpoint(model, policy="budget:100%")
        step(x)
        assert len(step.last_program.policy.updates) == 16
        monkeypatch.setattr(tr.config, "verify_recomputation", "bitwise")
        step(x)
        assert not step.last_program.policy.updates
        monkeypatch.undo()
        with pytest.raises(BudgetError):
            tr.jit(model, policy="budget:45%")(x)
