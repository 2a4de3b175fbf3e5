"""The cost of checkpointing in eager mode where the operators themselves cost next to nothing.

There are two measurements on one thread. One is a training step of a stack of tiny blocks
(LayerNorm, Linear, GELU, Linear, residual), each block checkpointed, over the plain step. The other
is a step of a tiny function over that of torch.utils.checkpoint.

The variants take turns, in another order each time and after a step that is not timed. So noise and
cold caches hit all of them alike. The best time of each is compared, and the median is printed
beside it. The row "plain again" is plain a second time: its distance from 1.00 is the error of the
other ratios.

    python scripts/bench_overhead.py
    python scripts/bench_overhead.py --blocks 48 --width 64 --json
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchremat as tr

STACK_TARGET = 1.6  # of a plain step
TINY_TARGET = 0.5  # of a step with torch.utils.checkpoint
SEQUENCE = 16

Step = Callable[[], list[torch.Tensor]]  # one training step, giving its gradients


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def save_matmuls(_context: object, op: object, *_args: object, **_kwargs: object) -> object:
    """A policy for torch's selective checkpointing."""
    is_saved = op in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


with_torch = partial(partial, checkpoint, use_reentrant=False)
with_torch_reentrant = partial(partial, checkpoint, use_reentrant=True)


def with_torch_selective(block: nn.Module) -> Callable:
    make_contexts = partial(create_selective_checkpoint_contexts, save_matmuls)
    return partial(checkpoint, block, use_reentrant=False, context_fn=make_contexts)


def wrapped(block: nn.Module, policy: str | None = None) -> nn.Module:
    return tr.nn.wrap(block, policy)


# name -> what makes of a block the function that is called in its place
STACK_VARIANTS: dict[str, Callable[[nn.Module], Callable]] = {
    "plain": lambda block: block,
    "plain again": lambda block: block,
    "tr.checkpoint": tr.checkpoint,
    "tr.nn.wrap": wrapped,
    "tr.nn.wrap, dots": partial(wrapped, policy="dots"),
    "torch.utils.checkpoint": with_torch,
    "torch.utils.checkpoint, reentrant": with_torch_reentrant,
    "torch.utils.checkpoint, selective": with_torch_selective,
}

TINY_VARIANTS: dict[str, Callable[[Callable], Callable]] = {
    "plain": lambda function: function,
    "plain again": lambda function: function,
    "tr.checkpoint": tr.checkpoint,
    "torch.utils.checkpoint": with_torch,
    "torch.utils.checkpoint, reentrant": with_torch_reentrant,
}


def stack_step(options: argparse.Namespace, prepare: Callable[[nn.Module], Callable]) -> Step:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(options.width) for _ in range(options.blocks))
    parameters = list(blocks.parameters())
    functions = [prepare(block) for block in blocks]
    # reentrant checkpoints give no gradients to an input that asks for none
    x = torch.randn(options.batch, SEQUENCE, options.width, requires_grad=True)

    def step() -> list[torch.Tensor]:
        for parameter in parameters:
            parameter.grad = None
        hidden = x
        for function in functions:
            hidden = function(hidden)
        hidden.sum().backward()
        return [parameter.grad for parameter in parameters]

    return step


def tiny_function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.tanh(x @ w))


def tiny_step(options: argparse.Namespace, prepare: Callable[[Callable], Callable]) -> Step:
    torch.manual_seed(0)
    function = prepare(tiny_function)
    x = torch.randn(options.batch, options.width, requires_grad=True)
    w = torch.randn(options.width, options.width, requires_grad=True)

    def step() -> list[torch.Tensor]:
        x.grad = w.grad = None
        function(x, w).sum().backward()
        return [x.grad, w.grad]

    return step


@dataclass
class Timed:
    """A variant and the seconds that its steps took."""

    step: Step
    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def time_in_turn(steps: dict[str, Step], repeats: int, num_steps: int) -> dict[str, Timed]:
    """Each sample is the mean of `num_steps` steps; the gradients must be equal to the bit."""
    timed = {name: Timed(step) for name, step in steps.items()}
    expected = [grad.clone() for grad in timed["plain"].step()]
    for name, variant in timed.items():
        for _ in range(3):  # trace, fill caches
            grads = variant.step()
        if not all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True)):
            raise AssertionError(f"{name} has other gradients than plain: it need not be timed")
    turns = list(timed.values())
    shuffle = random.Random(0).shuffle
    gc.disable()
    try:
        for _ in range(repeats):
            gc.collect()
            shuffle(turns)
            for variant in turns:
                variant.step()  # what ran before, or the collector, has left the caches cold
                start = time.perf_counter()
                for _ in range(num_steps):
                    variant.step()
                variant.seconds.append((time.perf_counter() - start) / num_steps)
    finally:
        gc.enable()
    return timed


def report(timed: dict[str, Timed], base: str) -> list[dict[str, object]]:
    """A row a variant: times in microseconds, and over those of `base`."""
    return [
        {
            "variant": name,
            "best_us": 1e6 * variant.best,
            "median_us": 1e6 * variant.median,
            "best_ratio": variant.best / timed[base].best,
            "median_ratio": variant.median / timed[base].median,
        }
        for name, variant in timed.items()
    ]


def table_of(title: str, rows: list[dict[str, object]], base: str, targets: dict) -> Table:
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    table.add_column("variant")
    for heading in ("best us", "median us", f"over {base}", "by median", "target"):
        table.add_column(heading, justify="right")
    for row in rows:
        target = targets.get(row["variant"])
        verdict = ""
        if target is not None:
            verdict = f"{target:.2f} {'met' if row['best_ratio'] <= target else 'MISSED'}"
        table.add_row(
            row["variant"],
            f"{row['best_us']:.0f}",
            f"{row['median_us']:.0f}",
            f"x {row['best_ratio']:.2f}",
            f"x {row['median_ratio']:.2f}",
            verdict,
        )
    return table


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    add = parser.add_argument
    add("--blocks", type=positive, default=24, help="blocks in the stack, %(default)s")
    add("--width", type=positive, default=32, help="size of the hidden states, %(default)s")
    add("--batch", type=positive, default=8, help=f"times {SEQUENCE} in the stack, %(default)s")
    add("--repeats", type=positive, default=100, help="samples of each variant, %(default)s")
    add("--json", action="store_true", help="print the figures as JSON, and no table")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    stack_steps = {name: stack_step(options, make) for name, make in STACK_VARIANTS.items()}
    stack = report(time_in_turn(stack_steps, options.repeats, num_steps=1), "plain")
    tiny_steps = {name: tiny_step(options, make) for name, make in TINY_VARIANTS.items()}
    tiny = report(time_in_turn(tiny_steps, options.repeats, num_steps=20), "torch.utils.checkpoint")
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        targets = {"stack": STACK_TARGET, "tiny": TINY_TARGET}
        result = {"options": settings, "targets": targets, "stack": stack, "tiny": tiny}
        json.dump(result | {"torch": torch.__version__}, sys.stdout, indent=2)
        print()
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    stack_targets = {"tr.checkpoint": STACK_TARGET, "tr.nn.wrap": STACK_TARGET}
    title = f"A step of {options.blocks} blocks of width {options.width}"
    console.print(table_of(title, stack, "plain", stack_targets))
    title = "A step of sin(tanh(x @ w))"
    console.print(table_of(title, tiny, "torch's", {"tr.checkpoint": TINY_TARGET}))


if __name__ == "__main__":
    main()
