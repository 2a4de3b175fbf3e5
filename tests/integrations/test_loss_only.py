"""With `loss_only` a model of `transformers` trains with logits that are never whole."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")

from tests.helpers import assert_same, peak_of
from tests.integrations.test_transformers import (
    Data,
    make_model,
    switch_off,
    switch_on,
    trained,
    wrapped,
)
from torchremat.errors import BudgetError, OptionError
from torchremat.integrations.transformers import RematCallback

WIDE = {"vocab_size": 8192, "attention_dropout": 0.0, "use_cache": False}
BUDGET = "budget:40%+tile"


def run(model, *, length=256, **more):
    tokens = torch.arange(2 * length).view(2, length)
    model.zero_grad(set_to_none=True)
    found = model(input_ids=tokens, labels=tokens, **more)
    found.loss.backward()
    return found, [p.grad for p in model.parameters()]


def assert_alike(model, plain, **options):
    found, gradients = run(model, **options)
    expected, of_plain = run(plain, **options)
    assert set(found) == {"loss"}
    assert type(found) is type(expected)
    torch.testing.assert_close(found.loss, expected.loss)
    for gradient, other in zip(gradients, of_plain, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("lengths", [(256,), (256, 200, 300)], ids=str)
def test_it_trains_as_plain_at_a_fraction_of_the_memory(lengths):
    model, plain = make_model(**WIDE), make_model(**WIDE)
    switch_on(model, {"policy": BUDGET, "loss_only": True})
    for length in lengths:
        assert_alike(model, plain, length=length)
    _, most = peak_of(lambda: run(plain))
    _, peak = peak_of(lambda: run(model))
    assert peak <= 0.4 * most


def test_without_it_the_same_budget_is_refused():
    model = make_model(**WIDE)
    switch_on(model, {"policy": "budget:25%+tile", "loss_only": True})
    run(model)
    switch_on(model, {"policy": "budget:25%+tile", "loss_only": False})
    with pytest.raises(BudgetError):
        run(model)


def test_logits_are_there_in_eval_mode_and_afterwards():
    model, plain = make_model(**WIDE), make_model(**WIDE).eval()
    tokens = torch.arange(32).view(1, 32)
    expected = plain(input_ids=tokens, labels=tokens)
    switch_on(model, {"policy": "budget:100%", "loss_only": True})
    assert_same(model.eval()(input_ids=tokens, labels=tokens).logits, expected.logits)
    model.train()
    assert model(input_ids=tokens, labels=tokens).logits is None
    with torch.no_grad():
        assert model(input_ids=tokens, labels=tokens).logits is None
    switch_off(model)
    assert wrapped(model) == []
    assert_same(model(input_ids=tokens, labels=tokens).logits, expected.logits)


def test_switching_it_on_and_off_changes_what_is_returned():
    model = make_model(**WIDE)
    for loss_only in (True, False, True):
        switch_on(model, {"policy": "budget:100%", "loss_only": loss_only})
        assert (run(model)[0].logits is None) == loss_only


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_returns_its_own_loss(clone):
    model = make_model(**WIDE)
    switch_on(model, {"policy": BUDGET, "loss_only": True})
    run(model)
    other = clone(model)
    plain = make_model(**WIDE)
    with torch.no_grad():
        for each in (other, plain):
            each.lm_head.weight.mul_(2)
    assert_alike(other, plain)
    assert_alike(model, make_model(**WIDE))


def test_a_model_whose_forward_is_its_own_attribute():
    model, calls = make_model(**WIDE), []
    forward = model.forward

    def count(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    model.forward = count
    switch_on(model, {"policy": BUDGET, "loss_only": True})
    assert_alike(model, make_model(**WIDE))
    assert calls
    switch_off(model)
    assert model.forward is count


def test_a_model_without_a_loss_returns_all_and_says_so():
    model = make_model(**WIDE)
    switch_on(model, {"policy": "budget:100%", "loss_only": True})
    tokens = torch.arange(32).view(1, 32)
    with pytest.warns(UserWarning, match="returned no loss by name. Give it labels"):
        found = model(input_ids=tokens)
    assert found.logits.shape == (1, 32, 8192)
    with pytest.warns(UserWarning, match="leave return_dict=True"):
        found = model(input_ids=tokens, labels=tokens, return_dict=False)
    assert len(found) == 2


def test_a_trainer_with_the_callback(tmp_path):
    expected, _ = trained(make_model(use_cache=False, attention_dropout=0.0), tmp_path)
    model = make_model(attention_dropout=0.0)
    callback = RematCallback(budget="100%", loss_only=True)
    found, trainer = trained(
        model, tmp_path, [callback], eval_dataset=Data(), eval_strategy="steps"
    )
    assert_same(found, expected)
    last = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert last
    assert wrapped(model) == []
    x = Data().x[:1]
    assert model.train()(input_ids=x, labels=x).logits is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "dots", "loss_only": True}, "for the model as a whole"),
        ({"policy": "budget:50%", "select": "model", "loss_only": True}, "without select="),
        ({"policy": "budget:50%", "loss_only": "yes"}, "loss_only='yes' is neither"),
        ({"loss_only": True}, "has no 'policy'"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_and_changes_nothing(options, message):
    model = make_model()
    with pytest.raises(OptionError, match=message):
        switch_on(model, options)
    assert wrapped(model) == []


def test_a_callback_refuses_it_beside_a_policy_for_layers(tmp_path):
    with pytest.raises(OptionError, match="neither True nor False"):
        RematCallback(budget="50%", loss_only=1)
    model = make_model()
    with pytest.raises(OptionError, match="for the model as a whole"):
        trained(model, tmp_path, [RematCallback("dots", loss_only=True)])
    assert wrapped(model) == []
