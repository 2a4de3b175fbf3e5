"""Models that are trained with updates in the backward pass, and what training them leaves."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.planning import models
from torchremat.measure import LiveBytes

STEPS = 3


class Mlp(nn.Module):
    """Its gradients are nearly all of the peak."""

    def __init__(self, width=128, depth=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


class Tied(models.GPT):
    """One weight at both ends, and one that is frozen."""

    def __init__(self):
        super().__init__(2, 64)
        self.head.weight = self.embedding.weight
        self.layers[0].up.weight.requires_grad_(False)


class Shared(nn.Module):
    """One layer many times: its gradient is complete at the end."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(*[nn.Linear(96, 96) for _ in range(4)])
        self.again, self.last = nn.Linear(96, 96), nn.Linear(96, 96)

    def forward(self, x):
        x = self.first(x)
        for _ in range(4):
            x = F.gelu(self.again(x))
        return self.last(x).square().sum()


MODELS = {
    "mlp": (Mlp, lambda: torch.ones(4, 128)),
    "gpt": (lambda: models.GPT(3, 64, 0.1), lambda: torch.arange(8).reshape(2, 4)),
    "tied": (Tied, lambda: torch.arange(8).reshape(2, 4)),
    "shared": (Shared, lambda: torch.ones(4, 96)),
    "batch norm": (models.ConvNet, lambda: torch.ones(2, 3, 4, 4)),
}
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}


def make(model="mlp", optimizer="sgd"):
    torch.manual_seed(0)
    build, batch = MODELS[model]
    built = build()
    return built, batch(), OPTIMIZERS[optimizer](built.parameters())


def train(model, x, optimizer):
    """The peak of the last step, beside what is there before it, and all that it leaves."""
    torch.manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with LiveBytes() as memory:
            model(x).backward()
        optimizer.step()
    return memory.peak, [*model.parameters(), *model.buffers()], optimizer.state_dict()
