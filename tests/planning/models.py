"""Models to plan: small, of every shape of graph, with a loss inside."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        mask = torch.ones(time, time, dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~mask, -1e9).softmax(-1)
        x = x + self.dropout(self.out((scores @ v).transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, layers: int = 2, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Block(width, 2, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class ConvNet(nn.Module):
    """Residual, with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + self.dropout(F.relu(norm(conv(x))))
        return self.head(x.mean((2, 3))).square().mean()


class UNet(nn.Module):
    """With long skips."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.up = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for conv in self.down:
            skips.append(F.silu(conv(x)))
            x = F.avg_pool2d(skips[-1], 2)
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = F.silu(conv(torch.cat([x, skips.pop()], 1)))
        return x.square().mean()


def mlp() -> nn.Module:
    """Its backward pass reads its output."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(32, 1), nn.Tanh(), nn.Flatten(0))


MODELS = {
    "gpt": (lambda: GPT(), lambda: torch.randint(0, 64, (2, 32))),
    "gpt with dropout": (lambda: GPT(dropout=0.2), lambda: torch.randint(0, 64, (2, 32))),
    "convnet": (ConvNet, lambda: torch.randn(4, 3, 16, 16)),
    "unet": (UNet, lambda: torch.randn(2, 8, 16, 16)),
    "mlp": (mlp, lambda: torch.randn(512, 32)),
}
