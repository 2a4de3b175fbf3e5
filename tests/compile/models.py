"""Small models for the compilers, and what is asked of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchremat as tr


class Block(nn.Module):
    """A transformer block, the product of whose first half of the MLP is called `hidden`."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        a = a.transpose(1, 2).reshape(batch, length, width)
        if self.dropout:
            a = F.dropout(a, self.dropout, self.training)
        x = x + self.out(a)
        return x + self.down(tr.checkpoint_name(F.gelu(self.up(self.norm2(x))), "hidden"))


class Transformer(nn.Module):
    """Blocks, and the mean of a sine as the loss."""

    def __init__(self, layers: int = 2, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sin().mean()


class Convolutions(nn.Module):
    """Convolutions with batch normalisation, which writes to buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))).square().mean()


class Residual(nn.Module):
    """Two convolutions with batch normalisation, and what they are added to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.second, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return torch.relu(x + self.norm2(self.second(tr.checkpoint_name(y, "hidden"))))


class ResNet(nn.Module):
    """Residual blocks that train, with a pool between, and the mean of squares as the loss."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 5)
        self.layers = nn.ModuleList(Residual(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(self.layers[0](self.stem(x)), 2)
        return self.head(self.layers[1](y).mean((2, 3))).square().mean()


class UNet(nn.Module):
    """Down, further down, and up again beside what was there on the way."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())
                for i, o in ((3, width), (width, 2 * width), (2 * width, width), (2 * width, width))
            ]
        )
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        beside = tr.checkpoint_name(self.layers[0](x), "hidden")
        y = self.layers[2](self.layers[1](F.max_pool2d(beside, 2)))
        return self.layers[3](torch.cat([beside, self.up(y)], 1)).square().mean()


def gradients_of(f: Callable[..., Tensor], model: nn.Module, *args: Any) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    loss = f(*args)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def held_nbytes(f: Callable[..., Any], model: nn.Module, *args: Any) -> int:
    """The bytes that autograd holds of what `f` computed."""
    there = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers(), *args]}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in there:
            held[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        f(*args)
    return sum(held.values())
