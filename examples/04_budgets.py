"""Fit a training step into a budget of peak memory, with the least recomputation.

Budgets that fit are found on the meta device, where a model of any size takes no memory. Then a
small model is trained within the budget, and its real peak is measured.

    python examples/04_budgets.py
    python examples/04_budgets.py --layers 12 --width 512 --budget 45%
"""

import argparse

import torch
from torch import nn

import torchremat as tr
from torchremat.measure import LiveBytes


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def build(layers: int, width: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(layers)), nn.Linear(width, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--budget", default="60%", help="'2GiB', or '60%%' of the peak without")
    args = parser.parse_args()

    with torch.device("meta"):
        model, x = build(args.layers, args.width), torch.empty(16, 64, args.width)
        print(tr.estimate(model, x, optimizer=torch.optim.AdamW))
        print()
        print(tr.plan(model, x, budget=args.budget))
        print()
        print(tr.planning.pareto(model, x, points=4))
        print()

    torch.manual_seed(0)
    model, x = build(args.layers, args.width), torch.randn(16, 64, args.width)
    optimizer = torch.optim.AdamW(model.parameters())
    tr.nn.wrap(model, tr.checkpoint_policies.memory_budget(args.budget))
    for step in range(3):
        optimizer.zero_grad()
        with LiveBytes() as memory:
            loss = model(x).square().mean()
            loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}, peak {memory.peak / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
