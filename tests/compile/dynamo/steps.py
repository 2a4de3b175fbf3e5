"""Training steps whose compiled graphs have budgets."""

import torch
from torch import nn

from tests.helpers import peak_of

WIDTH = 32


class Part(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(torch.nn.functional.gelu(layer(x)).exp())
        return x


def step_of(model, run, x):
    def step():
        model.zero_grad()
        loss = run(x)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    return step


def peak_of_second(model, run, x):
    """The loss and gradients of a second step, and its peak: the first may make what stays."""
    step_of(model, run, x)()
    return peak_of(step_of(model, run, x))
