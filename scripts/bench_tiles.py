"""A step in tiles: its peak and its time, beside logits that are cut by hand.

A GPT with a large vocabulary takes training steps on this machine. The peak is what the allocator
tells PyTorch's profiler; seconds are of this process's processor. The ways take turns, and ratios
are the median over rounds. Some budgets run under a compiler, too. Beside them is `torch.compile`,
also with inductor's own chunks of the logits (`torch._inductor.config.auto_chunker`). Then plans of
four layers shaped like Llama 3 8B, on the meta device, say what tiles are worth on an H100.

    python scripts/bench_tiles.py
    python scripts/bench_tiles.py --batch 4 --rounds 9
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torchremat as tr
from tests.helpers import peak_of
from tests.planning import llama
from torchremat.errors import BudgetError

NUM_CHUNKS = 16
"""Into so many the logits are cut by hand."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, 64)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A language model with its loss, in one piece or with the logits cut by hand."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.is_cut = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_cut else block(x)
        x, target = self.norm(x).flatten(0, 1), tokens.flatten()
        if not self.is_cut:
            return F.cross_entropy(self.head(x), target)
        parts = zip(x.chunk(NUM_CHUNKS), target.chunk(NUM_CHUNKS), strict=True)
        losses = [checkpoint(self._loss_of_part, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / len(target)

    def _loss_of_part(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), target, reduction="sum")


def cut_by_hand(model: GPT) -> GPT:
    model.is_cut = True
    return model


def checkpoint_blocks(model: GPT) -> GPT:
    for block in model.blocks:

        def forward(x: Tensor, inner: Callable[..., Tensor] = block.forward) -> Tensor:
            return checkpoint(inner, x, use_reentrant=False)

        block.forward = forward
    return model


def compile_in_chunks(model: GPT) -> nn.Module:
    model.compile(options={"auto_chunker.enable": True})
    return model


def compile_plainly(model: GPT) -> nn.Module:
    model.compile()
    return model


def wrap(policy: str) -> Callable[[GPT], nn.Module]:
    return lambda model: tr.nn.wrap(model, policy)


def compile_under(policy: str) -> Callable[[GPT], nn.Module]:
    def prepare(model: GPT) -> nn.Module:
        model.compile(backend="torchremat", options={"policy": policy})
        return model

    return prepare


@dataclass
class Way:
    name: str
    prepare: Callable[[GPT], nn.Module]
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    loss: float = 0.0
    refusal: str = ""
    model: nn.Module | None = None


def make_ways(budgets: list[str], compiled: list[str]) -> list[Way]:
    return [
        Way("plain PyTorch", lambda model: model),
        Way("torch.utils.checkpoint, each block", checkpoint_blocks),
        Way(f"the same, and logits cut in {NUM_CHUNKS} by hand", cut_by_hand),
        Way("torch.compile", compile_plainly),
        Way("torch.compile with inductor's chunks", compile_in_chunks),
        *(Way(f'"{text}"', wrap(text)) for text in budgets),
        *(Way(f'"{text}", compiled', compile_under(text)) for text in compiled),
    ]


def take_step(model: nn.Module, tokens: Tensor) -> float:
    loss = model(tokens)
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.item()


def measure(ways: list[Way], model: GPT, tokens: Tensor, rounds: int) -> None:
    for way in ways:
        way.model = way.prepare(copy.deepcopy(model))
        try:
            way.loss = take_step(way.model, tokens)
        except BudgetError as error:
            way.refusal = f"{error.least_bytes / 2**20:.0f} MiB at least"
            continue
        take_step(way.model, tokens)
        _, way.peak = peak_of(partial(take_step, way.model, tokens))
    for _ in range(rounds):
        for way in ways:
            if not way.refusal and way.model is not None:
                start = time.process_time()
                take_step(way.model, tokens)
                way.seconds.append(time.process_time() - start)


def show_steps(console: Console, ways: list[Way]) -> None:
    table = Table("way", "peak (MiB)", "of plain", "time / plain", "loss - plain")
    plain = ways[0]
    for way in ways:
        if way.refusal:
            table.add_row(way.name, way.refusal, "", "", "")
            continue
        ratios = [a / b for a, b in zip(way.seconds, plain.seconds, strict=True)]
        table.add_row(
            way.name,
            f"{way.peak / 2**20:.1f}",
            f"{way.peak / plain.peak:.3f}",
            f"{statistics.median(ratios):.2f}",
            f"{way.loss - plain.loss:.1e}",
        )
    console.print(table)


def show_plans(console: Console, tokens: int) -> None:
    """Plans of four layers of Llama 3 8B, each within the least memory that its way allows."""
    model, _ = llama.llama_loss(4)
    batch = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    table = Table("budget", "tiles", "peak (GiB)", "added time", "at least", "seconds to plan")
    for budget, tile in [
        ("100%", False), ("least", False), ("6GiB", True), ("5GiB", True), ("3.7GiB", True),
        ("least", True),
    ]:  # fmt: skip
        start = time.perf_counter()
        plan = tr.plan(model, batch, budget=budget, tile=tile, device="h100")
        whole = plan.baseline.seconds
        table.add_row(
            budget,
            str(plan.tiling.num_tiles) if plan.tiling else "-",
            f"{plan.peak_bytes / 2**30:.2f}",
            f"{100 * plan.recompute_seconds / whole:.1f} %",
            f"{100 * plan.lower_bound_seconds / whole:.1f} %",
            f"{time.perf_counter() - start:.0f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of each sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budgets", nargs="+", default=[
        "budget:25%", "budget:25%+tile", "budget:20%+tile", "budget:least+tile",
    ])  # fmt: skip
    parser.add_argument("--compiled", nargs="*", default=[
        "budget:20%+tile", "budget:least+tile",
    ], help="budgets under torch.compile(backend='torchremat')")  # fmt: skip
    parser.add_argument("--plan-tokens", type=int, default=8192, help="of the Llama; 0 for none")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT(options.vocabulary, options.width, options.layers)
    tokens = torch.randint(0, options.vocabulary, (options.batch, options.tokens))
    ways = make_ways(options.budgets, options.compiled)
    measure(ways, model, tokens, options.rounds)
    console = Console(width=100)
    show_steps(console, ways)
    if options.plan_tokens:
        show_plans(console, options.plan_tokens)


if __name__ == "__main__":
    main()
