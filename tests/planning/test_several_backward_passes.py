"""Losses that take gradients themselves: what one backward pass makes, the next may recompute."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import torchremat as tr
from tests.helpers import assert_same, peak_of


def network(inputs: int, outputs: int) -> nn.Module:
    layers = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(64, outputs))


def descend(weights, loss):
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    pairs = zip(weights.items(), gradients, strict=True)
    return {name: weight - 0.1 * gradient for (name, weight), gradient in pairs}


class UnrolledGan(nn.Module):
    """A generator against a discriminator that is some steps ahead."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = network(16, 2), network(2, 1)

    def forward(self, noise, real):
        fake = self.generator(noise)
        weights = dict(self.discriminator.named_parameters())
        for _ in range(3):
            weights = descend(weights, self.loss(weights, real, fake))
        return -self.loss(weights, real, fake)

    def loss(self, weights, real, fake):
        true = functional_call(self.discriminator, weights, (real,))
        false = functional_call(self.discriminator, weights, (fake,))
        return F.softplus(-true).mean() + F.softplus(false).mean()


class Maml(nn.Module):
    """The loss after some steps on a task of its own."""

    def __init__(self):
        super().__init__()
        self.network = network(16, 2)

    def forward(self, x, target):
        weights = dict(self.network.named_parameters())
        for _ in range(3):
            found = functional_call(self.network, weights, (x,))
            weights = descend(weights, F.mse_loss(found, target))
        return F.mse_loss(functional_call(self.network, weights, (x,)), target)


class GradientPenalty(nn.Module):
    """A critic, and how far the norm of its gradient is from one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        x = y = x.detach().requires_grad_()
        for layer in self.layers:
            y = F.silu(layer(y))
        value = self.head(y).mean()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + (gradient.norm(dim=-1) - 1).square().mean()


MODELS = {
    "gan": (UnrolledGan, [(256, 16), (256, 2)]),
    "maml": (Maml, [(256, 16), (256, 2)]),
    "penalty": (GradientPenalty, [(256, 64)]),
}


def build(name):
    torch.manual_seed(0)
    model, shapes = MODELS[name]
    return model(), [torch.randn(shape) for shape in shapes]


def run(model, args):
    loss = model(*args)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [loss.detach(), *gradients]


@pytest.mark.parametrize("budget", ["60%", pytest.param("40%", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_budgets_are_kept_with_the_bits_of_plain_pytorch(name, budget):
    model, args = build(name)
    wrapped = tr.nn.wrap(copy.deepcopy(model), f"budget:{budget}")
    expected = run(model, args)
    assert_same(run(wrapped, args), expected)
    found, peak = peak_of(lambda: run(wrapped, args), counts_workspaces=False)
    assert_same(found, expected)
    _, plain = peak_of(lambda: run(model, args), counts_workspaces=False)
    assert peak < (float(budget[:-1]) / 100 + 0.05) * plain


@pytest.mark.parametrize(
    "name",
    [name if name == "maml" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_what_an_inner_backward_pass_makes_is_recomputed_in_the_outer_one(name):
    model, args = build(name)
    plan = tr.plan(model, *args, budget="40%")
    assert plan.peak_bytes <= 0.4 * plan.baseline.peak_bytes
    # layers have a bias, so that they are addmm: a product alone is of the inner backward pass
    first, again = (
        {node.name for node in graph.graph.nodes if node.target is torch.ops.aten.mm.default}
        for graph in (plan.forward_graph, plan.backward_graph)
    )
    assert first & again
