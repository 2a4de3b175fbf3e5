#!/usr/bin/env python
"""The longest sequence of a training step that fits a GPU, beside the best setting by hand.

A model shaped like Llama 3 8B is trained with AdamW, all of its weights or adapters of low rank. It
is on the meta device: nothing is computed. Bytes are of all that there is: parameters, states,
gradients and the step. Ways by hand are each layer in a checkpoint and the loss in chunks; and that
with updates in the backward pass. The peak of a way grows linearly with the sequence, so two
lengths give the longest, which is then tried.

    python scripts/bench_longest.py
    python scripts/bench_longest.py --layers 4 --memory 16GiB --train adapters
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torchremat as tr
from tests.planning import llama
from torchremat.errors import BudgetError
from torchremat.optim import step_in_backward
from torchremat.planning.budget import Budget

STEP = 1024
"""Lengths are multiples of it."""
CHUNK = 1024
"""The positions whose logits exist at one time, by hand."""
TRIED = (8192, 16384)
RANK = 16


class Adapted(nn.Module):
    """A frozen linear layer, and a product of low rank that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        options = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.down = nn.Parameter(torch.empty(RANK, base.in_features, **options))
        self.up = nn.Parameter(torch.empty(base.out_features, RANK, **options))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + F.linear(F.linear(x, self.down), self.up)
        return y


def adapt(loss: nn.Module) -> nn.Module:
    """Train adapters of all linear layers but the head."""
    loss.requires_grad_(requires_grad=False)
    for layer in loss.model.model.layers:
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Adapted(child))
    return loss


class InChunks(nn.Module):
    """The loss with few logits at one time; the backward pass makes them again."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.model = loss.model
        tr.nn.wrap(self.model, "nothing_saveable", select="model.layers.*")

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=tokens).last_hidden_state[0, :-1]
        head = tr.checkpoint(self._sum_losses, policy=tr.checkpoint_policies.nothing_saveable)
        pairs = zip(hidden.split(CHUNK), tokens[0, 1:].split(CHUNK), strict=True)
        total: Tensor = sum(head(h, t) for h, t in pairs)
        return total / (tokens.shape[1] - 1)

    def _sum_losses(self, hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.model.lm_head(hidden).float(), target, reduction="sum")


@dataclass
class Way:
    """A way to train: its peak and the seconds of a step, of a length and for a budget."""

    name: str
    measure: Callable[[int, int], tuple[int, float]]


class Job:
    """What is trained, on how much memory."""

    def __init__(self, layers: int, memory: int, has_adapters: bool) -> None:
        self.layers = layers
        self.memory = memory
        self.has_adapters = has_adapters

    def make_model(self) -> nn.Module:
        loss, _ = llama.llama_loss(self.layers)
        return adapt(loss) if self.has_adapters else loss

    def estimate(self, length: int, *, by_hand: bool, updates: bool = False) -> tuple[int, float]:
        model = self.make_model()
        model = InChunks(model) if by_hand else model
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        with step_in_backward(optimizer) if updates else nullcontext():
            found = tr.estimate(model, tokens_of(length), optimizer=optimizer, device="h100")
        return found.total_bytes, found.seconds

    def plan(self, length: int, budget: int, **options: Any) -> tuple[int, float]:
        """The peak and the seconds of a plan; of one that is refused, the least peak."""
        model = self.make_model()
        try:
            plan = tr.plan(
                model,
                tokens_of(length),
                budget=budget,
                optimizer=torch.optim.AdamW(p for p in model.parameters() if p.requires_grad),
                device="h100",
                **options,
            )
        except BudgetError as error:
            return error.least_bytes, math.nan
        return plan.peak_bytes, plan.baseline.seconds + plan.recompute_seconds

    def list_ways(self) -> Iterator[Way]:
        def estimated(name: str, **options: bool) -> Way:
            return Way(name, lambda length, _: self.estimate(length, **options))

        def planned(name: str, **options: bool) -> Way:
            return Way(name, lambda length, budget: self.plan(length, budget, **options))

        by_hand = f"each layer in a checkpoint, the loss in chunks of {CHUNK}"
        yield estimated("plain PyTorch", by_hand=False)
        yield estimated(by_hand, by_hand=True)
        if not self.has_adapters:
            yield estimated("the same, updates in the backward pass", by_hand=True, updates=True)
        yield planned("a plan, with tiles", tile=True)
        yield planned("a plan, with tiles and the host", tile=True, offload=True)

    def find_longest(self, way: Way) -> tuple[int, int, float]:
        """The longest sequence that fits, with its peak and seconds; lengths are tried."""
        (a, b), peaks = TRIED, [way.measure(length, 1)[0] for length in TRIED]
        slope = (peaks[1] - peaks[0]) / (b - a)
        length = int((a + (self.memory - peaks[0]) / slope) // STEP * STEP)
        while length > 0:
            peak, seconds = way.measure(length, self.memory)
            if peak <= self.memory:
                return length, peak, seconds
            length -= STEP * max(1, math.ceil((peak - self.memory) / slope / STEP))
        return 0, peaks[0], math.nan


def tokens_of(length: int) -> Tensor:
    return torch.empty(1, length, dtype=torch.int64, device="meta")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--memory", default="80GiB")
    parser.add_argument(
        "--train", nargs="*", choices=["all", "adapters"], default=["adapters", "all"]
    )
    options = parser.parse_args()
    memory = Budget.of(options.memory).nbytes
    if memory is None:
        parser.error("--memory takes bytes, such as 80GiB")
    table = Table("trained", "way", "longest", "peak (GiB)", "step (s)", "measured in (s)")
    console = Console(width=120)
    for kind in options.train:
        job = Job(options.layers, memory, kind == "adapters")
        for way in job.list_ways():
            start = time.perf_counter()
            length, peak, seconds = job.find_longest(way)
            row = kind, way.name, f"{length:,}", f"{peak / 2**30:.2f}", f"{seconds:.2f}"
            table.add_row(*row, f"{time.perf_counter() - start:.0f}")
            print(*row, file=sys.stderr, flush=True)
    console.print(table)


if __name__ == "__main__":
    main()
