#!/usr/bin/env python
"""Loops of many steps: memory and time of `tr.scan`, beside plain Python and checkpoints.

A recurrent cell runs over slices, forward and backward, on this machine's CPU with one thread. The
peak is of live bytes beside inputs and weights. Ways take turns; ratios are the median over rounds.

    python scripts/bench_loops.py                 one minute
    python scripts/bench_loops.py --docs          docs/measured/loops.md
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torchremat as tr
from torchremat.measure import LiveBytes

PAGE = Path(__file__).resolve().parents[1] / "docs" / "measured" / "loops.md"
ROWS = 32
ROUNDS = 7
SIZES = ((64, 1000), (512, 300), (512, 1200))
MIB = 2**20
Cell = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Way:
    """A way to run a loop: its name, its step, and what was measured."""

    name: str
    run: Callable[[], Tensor]
    seconds: list[float] = field(default_factory=list)
    peak: int = 0


def run_python(cell: Cell, h: Tensor, xs: Tensor) -> Tensor:
    results = []
    for x in xs:
        h, result = cell(h, x)
        results.append(result)
    return torch.stack(results).sum()


def run_in_checkpoints(cell: Cell, h: Tensor, xs: Tensor, every: int) -> Tensor:
    def run(h: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        results = []
        for x in xs:
            h, result = cell(h, x)
            results.append(result)
        return h, torch.stack(results)

    parts = []
    for part in xs.split(every):
        h, results = checkpoint(run, h, part, use_reentrant=False)
        parts.append(results)
    return torch.cat(parts).sum()


def run_scan(cell: Cell, h: Tensor, xs: Tensor, states: int | None) -> Tensor:
    budget = None if states is None else states * h.nbytes
    return tr.scan(cell, h, xs, budget=budget)[1].sum()


def make_ways(width: int, steps: int) -> Iterator[Way]:
    torch.manual_seed(0)
    w, v = (torch.randn(width, width).div_(width**0.5).requires_grad_() for _ in range(2))
    h, xs = torch.zeros(ROWS, width), torch.randn(steps, ROWS, width)

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + torch.nn.functional.gelu(x @ v))
        return h, h.mean()

    root = round(steps**0.5)
    yield Way("Python loop", partial(run_python, cell, h, xs))
    yield Way("checkpoint of each step", partial(run_in_checkpoints, cell, h, xs, 1))
    yield Way(f"checkpoint of {root} steps", partial(run_in_checkpoints, cell, h, xs, root))
    yield Way("scan", partial(run_scan, cell, h, xs, None))
    for states in (4, steps // 10, steps // 3):
        yield Way(f"scan, {states} states", partial(run_scan, cell, h, xs, states))


def measure(ways: list[Way]) -> None:
    for way in ways:
        way.run().backward()
        with LiveBytes() as memory:
            way.run().backward()
        way.peak = memory.peak
    for _ in range(ROUNDS):
        for way in ways:
            start = time.perf_counter()
            way.run().backward()
            way.seconds.append(time.perf_counter() - start)


def rows() -> Iterator[str]:
    yield "| width | steps | way | peak (MiB) | of the Python loop | seconds | of the Python loop |"
    yield "|---:|---:|---|---:|---:|---:|---:|"
    for width, steps in SIZES:
        ways = list(make_ways(width, steps))
        measure(ways)
        for way in ways:
            ratios = (s / plain for s, plain in zip(way.seconds, ways[0].seconds, strict=True))
            yield (
                f"| {width} | {steps:,} | {way.name} | {way.peak / MIB:.2f} "
                f"| {way.peak / ways[0].peak:.3f} | {statistics.median(way.seconds):.2f} "
                f"| {statistics.median(ratios):.2f} |"
            )


HOW_MEASURED = f"""
## How it was measured

    python scripts/bench_loops.py --docs

A cell `tanh(h @ w + gelu(x @ v))` of {ROWS} rows runs over the slices, forward and backward, on one
core of a CPU. The peak is of live bytes beside inputs and weights, gradients of weights included.
Ways take turns in {ROUNDS} rounds; seconds and ratios are medians. A checkpoint is
`torch.utils.checkpoint`. The budget of a scan is that of so many states. The bits of all gradients
are those of the Python loop, as tests check.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", action="store_true", help="write docs/measured/loops.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for row in rows():
        print(row, flush=True)
        lines.append(row)
    if options.docs:
        PAGE.write_text("\n".join(["# Loops of many steps\n", *lines, HOW_MEASURED]))


if __name__ == "__main__":
    main()
