"""Stacks of layers, and the comparison of one under checkpoints with the plain one."""

import copy

import torch
from torch import nn

import torchremat as tr


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Stack(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        x = 2 * x  # the layers after the first are not given leaves, so nor is the first
        for layer in self.layers:
            x = layer(x)
        return x


def step(model, x):
    """What a training step gives: output, gradients, buffers, and the state of the generator."""
    torch.manual_seed(0)
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    gradients = [p.grad for p in model.parameters()]
    return [y, x.grad, *gradients, *model.buffers(), torch.get_rng_state()]


def check_bits(model, x, *, policy=None, wrap=True, is_copied=True):
    """A step of `model` with its layers under checkpoints is that of the plain model.

    Without `is_copied` the plain step is that of the model itself, before it is wrapped.
    """
    if is_copied:
        plain = tr.nn.unwrap(copy.deepcopy(model))
        if wrap:
            tr.nn.wrap(model, policy, select="layers.*")
        expected = step(plain, x)
    else:
        expected = [None if t is None else t.clone() for t in step(model, x)]
        tr.nn.wrap(model, policy, select="layers.*")
    found = step(model, x)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) is (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def count_traces(model):
    return tr.nn.report(model).traces
