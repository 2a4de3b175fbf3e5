"""Steps to draw: a small model, its plan and its reports."""

import torch
import torch.nn.functional as F
from torch import nn

import torchremat as tr


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=16, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def mlp_plan(budget="70%"):
    return tr.plan(Model(), torch.ones(512, 16), budget=budget, device="h100", solver="local")


def mlp_report(policy):
    return tr.explain(Model(), torch.ones(512, 16), policy=policy)
