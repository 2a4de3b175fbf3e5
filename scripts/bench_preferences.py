#!/usr/bin/env python
"""A loss of preferences in tiles, beside Liger's, which is written again with chunks.

ORPO compares the likelihoods of a chosen and a rejected answer (Hong et al., 2024). Its logits are
large, and no loss of a token alone: the odds are of whole answers. Liger's loss for it takes the
answers pair by pair, and needs no GPU. Ours is the formula, under a budget with tiles. The step is
that of the head: from hidden states to their gradients, and those of its weight. The peak is what
the allocator tells PyTorch's profiler; seconds are of this process's processor. The ways take
turns, and ratios are the median over rounds.

    pip install --no-deps liger-kernel
    python scripts/bench_preferences.py
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torchremat as tr
from tests.helpers import peak_of
from torchremat.errors import BudgetError

BETA = 0.1
"""The weight of the odds beside the loss of the chosen answers."""


class Head(nn.Module):
    """A head and the loss: chosen answers are the first half of the batch."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, width) / width**0.5)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        scores = F.log_softmax(F.linear(hidden, self.weight), -1)
        scores = scores.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        chosen, rejected = scores.mean(-1).chunk(2)
        odds = chosen - rejected - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())
        return -chosen.mean() - BETA * F.logsigmoid(odds).mean()


class LigersHead(Head):
    def __init__(self, vocabulary: int, width: int, *, is_compiled: bool) -> None:
        super().__init__(vocabulary, width)
        liger = import_module("liger_kernel.chunked_loss")
        self.loss = liger.LigerFusedLinearORPOLoss(beta=BETA, compiled=is_compiled)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.weight, hidden, target)[0]


@dataclass
class Way:
    name: str
    make: Callable[[], nn.Module]
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    loss: float = 0.0
    gradient: Tensor | None = None
    refusal: str = ""
    head: nn.Module | None = None


def take_step(head: nn.Module, hidden: Tensor, target: Tensor) -> float:
    hidden.grad = head.weight.grad = None
    loss = head(hidden, target)
    loss.backward()
    return loss.item()


def measure(ways: list[Way], weight: Tensor, batch: tuple[Tensor, Tensor], rounds: int) -> None:
    for way in ways:
        way.head = way.make()
        with torch.no_grad():
            way.head.weight.copy_(weight)
        step = partial(take_step, way.head, *batch)
        try:
            way.loss = step()
        except BudgetError as error:
            way.refusal = f"{error.least_bytes / 2**20:.0f} MiB at least"
            continue
        way.gradient = way.head.weight.grad
        step()
        _, way.peak = peak_of(step)
    for _ in range(rounds):
        for way in ways:
            if way.head is not None and not way.refusal:
                start = time.process_time()
                take_step(way.head, *batch)
                way.seconds.append(time.process_time() - start)


def show(ways: list[Way]) -> None:
    table = Table("way", "peak (MiB)", "of plain", "time / plain", "loss - plain", "gradient")
    plain = ways[0]
    assert plain.gradient is not None
    for way in ways:
        if way.refusal or way.gradient is None:
            table.add_row(way.name, way.refusal)
            continue
        ratios = [a / b for a, b in zip(way.seconds, plain.seconds, strict=True)]
        distance = (way.gradient - plain.gradient).norm() / plain.gradient.norm()
        table.add_row(
            way.name,
            f"{way.peak / 2**20:.1f}",
            f"{way.peak / plain.peak:.3f}",
            f"{statistics.median(ratios):.2f}",
            f"{way.loss - plain.loss:.1e}",
            f"{distance.item():.1e}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = 2 * options.pairs, options.tokens
    hidden = torch.randn(*shape, options.width, requires_grad=True)
    target = torch.randint(0, options.vocabulary, shape)
    sizes = options.vocabulary, options.width
    plain = Head(*sizes)

    def wrap(policy: str) -> Callable[[], nn.Module]:
        return lambda: tr.nn.wrap(Head(*sizes), policy)

    ways = [
        Way("plain PyTorch", partial(Head, *sizes)),
        Way("Liger, a pair at a time", partial(LigersHead, *sizes, is_compiled=False)),
        Way("the same, compiled", partial(LigersHead, *sizes, is_compiled=True)),
        *(Way(f'"{text}"', wrap(text)) for text in [
            "budget:30%", "budget:30%+tile", "budget:least+tile",
        ]),
    ]  # fmt: skip
    measure(ways, plain.weight.detach(), (hidden, target), options.rounds)
    show(ways)


if __name__ == "__main__":
    main()
