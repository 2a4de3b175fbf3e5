"""Policies that offload, and what to try them on."""

import torch
import torch.nn.functional as F
from torch import nn

import torchremat as tr
from torchremat.checkpoint_policies import (
    offload_dot_with_no_batch_dims,
    save_and_offload_only_these_names,
)

DOTS = offload_dot_with_no_batch_dims("device", "pinned_host")


def names(*offloaded, saved=()):
    return save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).movedim(-3, 0)
        attn = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = x + self.out(tr.checkpoint_name(attn.transpose(1, 2).flatten(2), "attn"))
        hidden = F.gelu(tr.checkpoint_name(self.up(self.norm2(x)), "mlp"))
        return x + F.dropout(self.down(hidden), 0.1, self.training)


class GPT(nn.Module):
    def __init__(self, layers: int = 2, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 31)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm = nn.BatchNorm2d(16)
        self.mix = nn.Linear(16, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(16, 3, 1)

    def forward(self, x):
        skip = tr.checkpoint_name(F.silu(self.down1(x)), "skip")
        y = F.silu(self.norm(tr.checkpoint_name(self.down2(skip), "deep")))
        y = self.mix(y.movedim(1, -1)).movedim(-1, 1)
        return self.last(torch.cat([skip, self.up(y)], 1))


def gpt():
    return GPT(), torch.randint(31, (3, 8))


def u_net():
    return UNet(), torch.randn(2, 3, 8, 8)


def train(model, x, steps: int = 3):
    """The losses, the gradients of the last step, the buffers, and a number that is drawn then."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    grads = [p.grad.cpu() for p in model.parameters()]
    return losses, grads, [b.cpu() for b in model.buffers()], torch.rand(3)


def layers(x, *weights):
    for w in weights:
        x = torch.sin(x @ w)
    return x.sum()


def chain(count: int = 3, size: int = 8):
    weights = [torch.randn(size, size, requires_grad=True) for _ in range(count)]
    return torch.randn(size, size), *weights


def grads(fun, inputs):
    return torch.autograd.grad(fun(*inputs), inputs[1:])
