"""A job of many sizes, first steps included, beside `torch.utils.checkpoint` on each layer.

A Llama of small width trains for some steps, each of one of 12 lengths and 3 batch sizes, drawn at
random. Every way takes all the steps, from the first call of its wrapped model. The ways take
turns; the ratio is of the seconds of one round, and the median over the rounds is printed. Seconds
are of this process's processor, so that other work on the machine counts little.

    python scripts/bench_lengths.py
    python scripts/bench_lengths.py --depths 16 --steps 40 --repeats 3 --width 128

The exit status is 1 if a step of a budget for the whole model exceeds it, or if it makes more than
two plans.
"""

import argparse
import copy
import gc
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planning_models import Llama

import torchremat as tr
from torchremat.checkpoint_policies import memory_budget
from torchremat.measure import LiveBytes

BATCHES = (1, 2, 4)
LENGTHS = tuple(range(16, 208, 16))
VOCABULARY = 256
FRACTION = 0.6
"""Of the plain peak of the largest size: the budget of the whole model, in bytes."""
MOST_PLANS = 2
"""How many plans a job may need, whatever its sizes."""

Wrap = Callable[[nn.Module], nn.Module]


class AnyLength(Llama):
    """A Llama whose tables of positions are cut to the length of each batch."""

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


@dataclass
class Way:
    """One way to train, and what was measured of it; `limit` is a budget for the whole model."""

    name: str
    wrap: Wrap
    limit: int | None = None
    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    counts: str = ""
    num_plans: int = 0
    largest_peak: int = 0


def checkpoint_layers(model: nn.Module) -> nn.Module:
    """Put `torch.utils.checkpoint` round each layer."""
    for layer in model.layers:

        def forward(*args: Tensor, inner: Callable[..., Tensor] = layer.forward) -> Tensor:
            return checkpoint(inner, *args, use_reentrant=False)

        layer.forward = forward
    return model


def wrap_layers(policy: object) -> Wrap:
    return lambda model: tr.nn.wrap(model, policy, select="layers.*")


def make_ways(limit: int) -> list[Way]:
    return [
        Way("torch.utils.checkpoint", checkpoint_layers),
        Way("full, each layer", wrap_layers("full")),
        Way("dots, each layer", wrap_layers("dots")),
        Way("budget:least, each layer", wrap_layers("budget:least")),
        Way("budget, whole model", lambda m: tr.nn.wrap(m, memory_budget(limit)), limit),
    ]


def draw_batches(count: int) -> list[Tensor]:
    """Tokens of random sizes; each length and each batch size is drawn about as often."""
    draw = random.Random(0)
    sizes = list(itertools.product(BATCHES, LENGTHS))
    draw.shuffle(sizes)
    sizes += draw.choices(sizes, k=max(0, count - len(sizes)))
    return [torch.randint(0, VOCABULARY, size) for size in sizes[:count]]


def take_step(model: nn.Module, tokens: Tensor) -> None:
    model(tokens).backward()
    model.zero_grad(set_to_none=True)


def measure_peak(model: nn.Module, tokens: Tensor) -> int:
    with LiveBytes() as memory:
        model(tokens).backward()
    model.zero_grad(set_to_none=True)
    return memory.peak


def time_job(way: Way, plain: nn.Module, batches: list[Tensor]) -> None:
    gc.collect()  # alike layers of the model before would serve this one
    model = copy.deepcopy(plain)
    marks = [time.process_time()]
    model = way.wrap(model)
    for tokens in batches:
        take_step(model, tokens)
        marks.append(time.process_time())
    way.seconds.append(marks[-1] - marks[0])
    way.first.append(marks[1] - marks[0])
    if way.name != "torch.utils.checkpoint":
        report = tr.nn.report(model)
        way.num_plans, way.counts = report.plans, f"{report.plans} / {report.traces}"


def measure_depth(depth: int, options: argparse.Namespace) -> list[Way]:
    torch.manual_seed(0)
    width = options.width
    plain = AnyLength(depth, width, width // 32, max(LENGTHS), VOCABULARY)
    largest = torch.randint(0, VOCABULARY, (max(BATCHES), max(LENGTHS)))
    ways = make_ways(int(FRACTION * measure_peak(plain, largest)))
    batches = draw_batches(options.steps)
    take_step(plain, largest)  # what PyTorch does once in a process
    for _ in range(options.repeats):
        for way in ways:
            time_job(way, plain, batches)
    for way in ways:
        if way.limit is not None:
            model = way.wrap(copy.deepcopy(plain))
            way.largest_peak = max(measure_peak(model, tokens) for tokens in batches)
    return ways


def describe(depth: int, ways: list[Way]) -> Table:
    table = Table(
        "way", "seconds", "ratio", "first step, s", "plans / traces", "largest peak of budget",
        title=f"{depth} layers",
    )  # fmt: skip
    for way in ways:
        pairs = zip(way.seconds, ways[0].seconds, strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        peak = "" if way.limit is None else f"{way.largest_peak / way.limit:.3f}"
        seconds, first = (statistics.median(s) for s in (way.seconds, way.first))
        table.add_row(way.name, f"{seconds:.2f}", f"{ratio:.2f}", f"{first:.2f}", way.counts, peak)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    is_kept = True
    for depth in options.depths:
        ways = measure_depth(depth, options)
        Console(width=110).print(describe(depth, ways))
        budgets = [way for way in ways if way.limit is not None]
        is_kept &= all(w.largest_peak <= w.limit and w.num_plans <= MOST_PLANS for w in budgets)
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
