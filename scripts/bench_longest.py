#!/usr/bin/env python
"""The longest sequence of a training step that fits a GPU, beside the best setting by hand.

A model shaped like Llama 3 8B is trained with AdamW, all of its weights or adapters of low rank. It
is on the meta device: nothing is computed. Bytes are of all that there is: parameters, states,
gradients and the step. Ways by hand are each layer in a checkpoint and the loss in chunks; and that
with updates in the backward pass. A plan is first made for the longest sequence that fits by hand,
for the seconds of a step beside those by hand. Then longer ones are tried, until one is refused.
By hand the peak of long sequences grows linearly, so two lengths tell which one to try next.

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
NEAR = 1 / 4
"""The longest of a plan is found to this part of it: a plan takes minutes."""
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
class Step:
    """A step of a sequence of `length`: its peak, or the least one if it does not fit."""

    length: int
    nbytes: int
    seconds: float
    fits: bool


@dataclass
class Way:
    name: str
    measure: Callable[[int], Step]
    is_planned: bool


class Job:
    """What is trained, on how much memory."""

    def __init__(self, layers: int, memory: int, has_adapters: bool, offload: bool) -> None:
        self.layers = layers
        self.memory = memory
        self.has_adapters = has_adapters
        self.offload = offload

    def make_model(self) -> nn.Module:
        loss, _ = llama.llama_loss(self.layers)
        return adapt(loss) if self.has_adapters else loss

    def estimate(self, length: int, *, by_hand: bool, updates: bool = False) -> Step:
        model = self.make_model()
        model = InChunks(model) if by_hand else model
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        with step_in_backward(optimizer) if updates else nullcontext():
            found = tr.estimate(model, tokens_of(length), optimizer=optimizer, device="h100")
        return Step(length, found.total_bytes, found.seconds, found.total_bytes <= self.memory)

    def plan(self, length: int, **options: Any) -> Step:
        model = self.make_model()
        try:
            plan = tr.plan(
                model,
                tokens_of(length),
                budget=self.memory,
                optimizer=torch.optim.AdamW(p for p in model.parameters() if p.requires_grad),
                device="h100",
                **options,
            )
        except BudgetError as error:
            return Step(length, error.least_bytes, math.nan, fits=False)
        seconds = plan.baseline.seconds + plan.recompute_seconds
        return Step(length, plan.peak_bytes, seconds, fits=True)

    def list_ways(self) -> Iterator[Way]:
        def estimated(name: str, **options: bool) -> Way:
            return Way(name, lambda length: self.estimate(length, **options), is_planned=False)

        def planned(name: str, **options: bool) -> Way:
            return Way(name, lambda length: self.plan(length, **options), is_planned=True)

        by_hand = f"each layer in a checkpoint, the loss in chunks of {CHUNK}"
        yield estimated("plain PyTorch", by_hand=False)
        yield estimated(by_hand, by_hand=True)
        if not self.has_adapters:
            yield estimated("the same, updates in the backward pass", by_hand=True, updates=True)
        yield planned("a plan, with tiles", tile=True)
        if self.offload:
            yield planned("a plan, with tiles and the host", tile=True, offload=True)

    def find_by_slope(self, way: Way) -> Step:
        """The longest sequence that fits, of a way whose peak grows linearly, for long ones."""
        before, step = (way.measure(length) for length in TRIED)
        while True:
            slope = (step.nbytes - before.nbytes) / (step.length - before.length)
            before, room = step, self.memory - step.nbytes
            if 0 <= room < slope * STEP:
                return step
            length = int((step.length + room / slope) // STEP * STEP)
            if length <= 0:
                return step
            step = way.measure(length)

    def find_longest(self, way: Way, first: Step) -> Step:
        """The longest sequence that is planned; `first` is the plan of the first that was tried."""
        step, refused = first, None
        longest: Step | None = None
        while True:
            if step.fits:
                longest = step
            else:
                refused = step.length
            fits = longest.length if longest else 0
            if refused is not None and refused - fits <= max(STEP, fits * NEAR):
                return longest or step
            middle = fits * 5 / 4 if refused is None else (fits + refused) / 2
            step = way.measure(int(middle // STEP) * STEP)


def tokens_of(length: int) -> Tensor:
    return torch.empty(1, length, dtype=torch.int64, device="meta")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--memory", default="80GiB")
    parser.add_argument(
        "--train", nargs="*", choices=["all", "adapters"], default=["adapters", "all"]
    )
    parser.add_argument("--offload", action="store_true", help="also plans that use the host")
    options = parser.parse_args()
    memory = Budget.of(options.memory).nbytes
    if memory is None:
        parser.error("--memory takes bytes, such as 80GiB")
    table = Table("trained", "way", "positions", "peak (GiB)", "step (s)", "measured in (s)")
    for kind in options.train:
        job = Job(options.layers, memory, kind == "adapters", options.offload)
        for name, step, took in measure(job):
            seconds = f"{step.seconds:.2f}" if step.fits else "refused"
            row = kind, name, f"{step.length:,}", f"{step.nbytes / 2**30:.2f}", seconds
            table.add_row(*row, f"{took:.0f}")
            print(*row, file=sys.stderr, flush=True)
    Console(width=140).print(table)


def measure(job: Job) -> Iterator[tuple[str, Step, float]]:
    """The longest step of each way, and plans of the longest by hand."""
    by_hand = 0
    for way in job.list_ways():
        began = time.perf_counter()
        if not way.is_planned:
            step = job.find_by_slope(way)
            by_hand = max(by_hand, step.length)
        else:
            step = way.measure(by_hand)
            yield f"{way.name}, as long as by hand", step, time.perf_counter() - began
            step = job.find_longest(way, step)
        yield way.name, step, time.perf_counter() - began


if __name__ == "__main__":
    main()
