"""Plans of models that return more than their loss: logits, states, whatever else."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchremat as tr
from tests.helpers import one_in
from torchremat.checkpoint_policies import from_plan
from torchremat.measure import LiveBytes


class Classifier(nn.Module):
    """A convolution whose input needs no gradient, masks of dropout, and three outputs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm, self.dropout = nn.BatchNorm2d(8), nn.Dropout(0.4)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, images, labels):
        x = F.relu(self.norm(self.first(images))).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = self.dropout(F.gelu(layer(x)))
        logits = self.head(x.mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits, "hidden": x}


def make():
    torch.manual_seed(0)
    return Classifier(), torch.randn(4, 3, 10, 10), torch.arange(4)


def gradients_of(model, images, labels, order, name):
    torch.manual_seed(1)
    with LiveBytes() as memory:
        found = model(images, labels)[name].square().sum()
        grads = torch.autograd.grad(found, list(model.parameters())[:4], create_graph=order == 2)
    if order == 2:
        grads = torch.autograd.grad(
            sum(g.square().sum() for g in grads), list(model.parameters())[:2]
        )
    return grads, memory.peak


@pytest.mark.parametrize(
    ("name", "order", "budget"), one_in(4, ["hidden", "logits", "loss"], [1, 2], [1.0, "least"])
)
def test_each_output_has_its_gradients(name, order, budget):
    model, images, labels = make()
    plan = tr.plan(model, images, labels, budget=budget)
    wrapped = tr.nn.wrap(copy.deepcopy(model), from_plan(plan))
    plain, _ = gradients_of(model, images, labels, order, name)
    for _ in range(2):
        found, peak = gradients_of(wrapped, images, labels, order, name)
        if order == 1:
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
        else:  # sums in another order
            torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
        model.load_state_dict(wrapped.state_dict())
        plain, _ = gradients_of(model, images, labels, order, name)
    if (name, order) == ("loss", 1):
        assert peak <= plan.peak_bytes


def test_values_of_dropout_are_not_saved_twice():
    model, images, labels = make()
    plan = tr.plan(model, images, labels, budget=1.0)
    tr.nn.wrap(model, from_plan(plan))
    model(images, labels)["loss"].backward()
    saved = [row.op for row in tr.nn.report(model) if row.decision == "saved"]
    assert "aten.bernoulli.p" not in saved
    assert sum(row.nbytes for row in tr.nn.report(model) if row.decision == "saved") <= (
        plan.saved_bytes
    )


WIDTH = 64


class Tower(nn.Module):
    """Layers, and a choice of what is returned beside the last of them."""

    def __init__(self, choose):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(12)
        )
        self.choose = choose

    def forward(self, x):
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return self.choose(first, x)


RETURNED = {
    "an auxiliary loss": (lambda first, y: (y, first.square().mean()), (True, True)),
    "one of what is detached": (
        lambda first, y: (y, y.detach().mean() * first.mean()),
        (True,) * 2,
    ),
    "logits and loss": (lambda first, y: (y, y.square().mean()), (False, True)),
    "parts of a sum": (
        lambda first, y: (a := y.mean(), b := first.mean(), a + b, first),
        (False, False, True, False),
    ),
    "two losses": (lambda first, y: (y.mean(), first.mean()), (True, True)),
    "more after the loss": (
        lambda first, y: (y.mean(), (y * 2).sin(), first),
        (True, False, False),
    ),
    "no scalar": (lambda first, y: (y, first), (True, True)),
    "a loss twice": (lambda first, y: (loss := y.mean(), loss), (True,)),
}


def region_of(function, *args):
    checkpointed = tr.checkpoint(function, policy=tr.checkpoint_policies.memory_budget("100%"))
    checkpointed(*args)
    return checkpointed.last_call[0].region


@pytest.mark.parametrize("name", RETURNED)
def test_outputs_that_a_loss_is_computed_from_are_taken_for_having_no_gradient(name):
    choose, expected = RETURNED[name]
    assert region_of(Tower(choose), torch.randn(4, WIDTH)).usual_outputs == expected


def train_tower(model, rows, loss_of):
    """The gradients and the peak of a step."""
    model.zero_grad()
    torch.manual_seed(rows)
    x = torch.randn(rows, WIDTH)
    with LiveBytes() as memory:
        loss_of(*model(x)).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()], memory.peak


def compare_peaks(choose, loss_of, rows, policy="budget:60%"):
    """The peaks of steps under a budget as parts of those of plain PyTorch, and the model."""
    plain, wrapped = Tower(choose), tr.nn.wrap(Tower(choose), policy)
    parts = []
    for count in rows:
        expected, peak = train_tower(plain, count, loss_of)
        found, ours = train_tower(wrapped, count, loss_of)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        parts.append(ours / peak)
    return parts, wrapped


@pytest.mark.parametrize("rows", [[256] * 4, [256, 200, 300, 256]])
def test_a_budget_holds_with_an_auxiliary_loss(rows):
    choose, _ = RETURNED["an auxiliary loss"]
    parts, _ = compare_peaks(choose, lambda y, aux: y.square().mean() + aux, rows)
    assert max(parts) < 0.65  # the loss outside is not of what is wrapped


@pytest.mark.parametrize("policy", ["budget:60%", "budget:700KiB"])
def test_a_budget_learns_which_outputs_have_gradients(policy):
    choose, _ = RETURNED["logits and loss"]
    rows = [256] * 4
    parts, _ = compare_peaks(choose, lambda y, loss: y.square().mean(), rows, policy)
    assert max(parts[1:]) < 0.75
    assert min(parts[1:]) == max(parts[1:])


def test_outputs_that_take_turns_are_planned_for_together():
    choose, _ = RETURNED["two losses"]
    plain, wrapped = Tower(choose), tr.nn.wrap(Tower(choose), "budget:60%")
    for step in range(6):
        loss_of = (lambda a, b: a) if step % 2 else (lambda a, b: b)
        expected, _ = train_tower(plain, 256, loss_of)
        found, _ = train_tower(wrapped, 256, loss_of)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert tr.nn.report(wrapped).traces == 1


def test_a_plan_that_was_made_stays():
    choose, _ = RETURNED["logits and loss"]
    model = Tower(choose)
    plan = tr.plan(model, torch.randn(256, WIDTH), budget="60%")
    wrapped = tr.nn.wrap(copy.deepcopy(model), from_plan(plan))
    for _ in range(3):
        expected, _ = train_tower(model, 256, lambda y, loss: y.square().mean())
        found, _ = train_tower(wrapped, 256, lambda y, loss: y.square().mean())
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
