#!/usr/bin/env python
"""Training steps in eager mode under policies and budgets, beside plain PyTorch, on any device.

For each model: a plain step, `torch.utils.checkpoint` on each block, the policies "full" and "dots"
on each block, and two budgets for the whole model. A row has the seconds of a step over the plain
one, the peak that was measured, the peak that the plan promises, and whether loss and gradients are
plain PyTorch's to the bit. On a GPU the peak is that of the bytes requested from the allocator,
with the workspaces of its kernels; on the CPU it is that of `torchremat.measure.LiveBytes`.

    python scripts/bench_steps.py                    small models on the CPU, large ones on a GPU
    python scripts/bench_steps.py --models gpt --json steps.json

The variants take turns, and medians are printed. The exit status is 1 if bits differ from plain
PyTorch's where `torch.utils.checkpoint` keeps them.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerator import find_device, measure_peak, synchronize
from compile_measure import checkpointed
from compile_models import MODELS, Model

import torchremat as tr

FRACTIONS = (0.7, 0.5)
"""Of the plain peak, by the simulation: the budgets."""


@dataclass
class Row:
    """A variant of a model; bytes are above what was there before the step."""

    model: str
    variant: str
    seconds: float
    of_plain: float
    first_seconds: float
    peak_nbytes: int
    planned_nbytes: int | None
    is_equal: bool


class Step:
    """One way to train a model, and what was measured of it."""

    def __init__(self, name: str, module: nn.Module, args: tuple[Tensor, ...], planned: int | None):
        self.name, self.module, self.args, self.planned = name, module, args, planned
        self.seconds: list[float] = []
        self.first_seconds = self.run()
        self.values = [p.grad.clone() for p in module.parameters()]
        self.peak = self._weigh()

    def run(self) -> float:
        """Seconds of one step, gradients made anew."""
        self.module.zero_grad()
        torch.manual_seed(0)
        synchronize(self.args[0].device)
        start = time.perf_counter()
        self.module(*self.args).backward()
        synchronize(self.args[0].device)
        return time.perf_counter() - start

    def _weigh(self) -> int:
        self.run()
        self.module.zero_grad()
        return measure_peak(self.run, self.args[0].device)


def variants_of(model: Model, device: torch.device, small: bool) -> dict[str, Callable[[], Step]]:
    """How each variant is made, by name."""
    module, args = model.make(device, small=small)
    blocks = ",".join(f"{name}.*" for name in model.blocks)

    def budget(fraction: float) -> Step:
        own = copy.deepcopy(module)
        plan = tr.plan(own, *args, budget=fraction)
        tr.nn.wrap(own, tr.checkpoint_policies.from_plan(plan))
        return Step(f"budget of {fraction:.0%}", own, args, plan.peak_bytes)

    def per_block(policy: str) -> Step:
        own = tr.nn.wrap(copy.deepcopy(module), policy, select=blocks)
        return Step(f'"{policy}" a block', own, args, None)

    def by_pytorch() -> Step:
        own = checkpointed(copy.deepcopy(module), model.blocks)
        return Step("torch.utils.checkpoint a block", own, args, None)

    return {
        "plain": lambda: Step("plain", copy.deepcopy(module), args, None),
        "torch": by_pytorch,
        "full": lambda: per_block("full"),
        "dots": lambda: per_block("dots"),
    } | {f"{f}": lambda f=f: budget(f) for f in FRACTIONS}


def measure(name: str, args: argparse.Namespace) -> list[Row]:
    """The rows of one model."""
    variants = variants_of(MODELS[name], torch.device(args.device), args.small)
    steps = [make() for make in variants.values()]
    for _ in range(args.rounds):
        for step in steps:
            step.seconds.append(step.run())
    plain = steps[0]
    base = statistics.median(plain.seconds)
    return [
        Row(
            name,
            step.name,
            statistics.median(step.seconds),
            statistics.median(step.seconds) / base,
            step.first_seconds,
            step.peak,
            step.planned,
            all(map(torch.equal, plain.values, step.values)),
        )
        for step in steps
    ]


def print_rows(rows: list[Row]) -> None:
    """Print a Markdown table."""
    print("| model | variant | ms a step | of plain | first step, s | peak, MiB | planned | bits |")
    print("|---|---|---:|---:|---:|---:|---:|---|")
    for row in rows:
        planned = "" if row.planned_nbytes is None else f"{row.planned_nbytes / 2**20:,.1f}"
        print(
            f"| {row.model} | {row.variant} | {1e3 * row.seconds:.1f} | {row.of_plain:.2f} | "
            f"{row.first_seconds:.1f} | {row.peak_nbytes / 2**20:,.1f} | {planned} | "
            f"{'equal' if row.is_equal else 'differ'} |"
        )


def main() -> int:
    """Measure, print, and write the JSON that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default=str(find_device()))
    parser.add_argument("--small", action="store_true", help="the sizes for a CPU, on any device")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.backends.cudnn.deterministic = True  # else plain PyTorch differs from itself
    rows = [row for name in args.models for row in measure(name, args)]
    print_rows(rows)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    kept = {row.model for row in rows if row.variant.startswith("torch") and row.is_equal}
    return int(any(row.model in kept and not row.is_equal for row in rows))


if __name__ == "__main__":
    sys.exit(main())
