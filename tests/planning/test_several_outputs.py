"""Plans of models that return more than their loss: logits, states, whatever else."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchremat as tr
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


@pytest.mark.parametrize("budget", [1.0, "least"])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", ["loss", "logits", "hidden"])
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
