"""Costs and savings of offloading: time of a step, peak of the device, bytes of the host.

A stack of blocks (LayerNorm, Linear, GELU, Linear, tanh, residual) is trained in three variants.
One is plain, one saves the results of its matrix products, and one saves one value of each block.
The values are saved on the device or offloaded, in one checkpoint or in one a block. The variants
take turns, each after steps that are not timed; the best time is printed.

On a GPU the link is measured, and each line says how long the copies alone take. Where the step
without copies takes at least twice as long as they do, a step with them must take at most 1.10 of
it. On a CPU nothing overlaps, and the times say what the copies cost; the bytes are the same
numbers.

    python scripts/bench_offload.py
    python scripts/bench_offload.py --width 4096 --blocks 12 --rows 8192 --json
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerator import find_device, measure_peak, synchronize

import torchremat as tr
from torchremat.remat.offload import host_pool

TARGET = 1.10  # of the step without offload, where that takes twice as long as the copies
POLICIES = tr.checkpoint_policies
HOST = ("device", "pinned_host")
PAIRS = {
    "dots": (
        POLICIES.dots_with_no_batch_dims_saveable,
        POLICIES.offload_dot_with_no_batch_dims(*HOST),
    ),
    "one a block": (
        POLICIES.save_only_these_names("mlp"),
        POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["mlp"],
            offload_src=HOST[0],
            offload_dst=HOST[1],
        ),
    ),
}
VARIANTS = {"plain": (None, None)} | {
    f"{name} {kept}{of}": (policy, select)
    for name, pair in PAIRS.items()
    for of, select in (("", None), (", a block each", "blocks.*"))
    for kept, policy in zip(("saved", "offloaded"), pair, strict=True)
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + tr.checkpoint_name(self.down(hidden), "mlp").tanh()


class Stack(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass
class Run:
    """A variant: the seconds of its steps, its peak, and the bytes that it saved on the host."""

    name: str
    model: nn.Module
    seconds: list[float] = field(default_factory=list)
    peak_nbytes: int = 0
    host_nbytes: int = 0
    loss: float = 0.0

    def step(self, x: torch.Tensor) -> None:
        """One step, which is timed."""
        self.model.zero_grad()
        synchronize(x.device)
        start = time.perf_counter()
        loss = self.model(x).square().mean()
        loss.backward()
        synchronize(x.device)
        self.seconds.append(time.perf_counter() - start)
        self.loss = loss.item()

    def weigh(self, x: torch.Tensor) -> None:
        """One step, of which the bytes are counted: above what was there before."""
        self.model.zero_grad()
        host_pool.reset_counts()
        self.peak_nbytes = measure_peak(lambda: self.model(x).square().mean().backward(), x.device)
        self.host_nbytes = host_pool.stats().peak_nbytes


def link_seconds(nbytes: int, device: torch.device) -> float:
    """How long so many bytes take to the host and back, in blocks of 64 MiB."""
    block = min(nbytes, 64 << 20)
    there = torch.empty(block, dtype=torch.uint8, device=device)
    here = torch.empty(block, dtype=torch.uint8, pin_memory=device.type != "cpu")

    def copy() -> None:
        for _ in range(max(nbytes // block, 1)):
            here.copy_(there, non_blocking=True)
            there.copy_(here, non_blocking=True)
        synchronize(device)

    return _best(copy)


def _best(work: Callable[[], None], rounds: int = 3) -> float:
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def measure(args: argparse.Namespace) -> list[Run]:
    """The variants at one size; the steps of all take turns."""
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype)
    runs = []
    for name, (policy, select) in VARIANTS.items():
        torch.manual_seed(0)
        model = Stack(args.blocks, args.width).to(device, dtype)
        if policy is not None:
            tr.nn.wrap(model, policy, select=select)
        runs.append(Run(name, model))
    x = torch.randn(args.rows, args.width, device=device, dtype=dtype)
    for run in runs:
        for _ in range(2):  # it is traced, memory is pinned, and known what is read first
            run.step(x)
        run.weigh(x)
        run.seconds.clear()
    for _ in range(args.steps):
        for run in runs:
            run.step(x)
    return runs


def main() -> int:
    """Print a line for each variant. The status is 1 if they differ, or miss the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    device = find_device()
    is_gpu = device.type == "cuda"
    parser.add_argument("--device", default=str(device))
    parser.add_argument("--blocks", type=int, default=8 if is_gpu else 3)
    parser.add_argument("--width", type=int, default=4096 if is_gpu else 128)
    parser.add_argument("--rows", type=int, default=8192 if is_gpu else 2048)
    parser.add_argument("--dtype", default="bfloat16" if is_gpu else "float32")
    parser.add_argument("--steps", type=int, default=20 if is_gpu else 3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runs = measure(args)
    rows = rows_of(runs, torch.device(args.device))
    same = len({run.loss for run in runs}) == 1
    judged = [row for row in rows if row["is_judged"]]
    missed = [row["variant"] for row in judged if row["of_saved"] > TARGET]
    if args.json:
        said = {"options": vars(args), "same": same, "missed": missed}
        print(json.dumps({**said, "rows": rows}, indent=1))
        return int(bool(missed) or not same)
    print(f"{args.device}, {args.blocks} blocks of {args.width}, {args.rows} rows, {args.dtype}")
    for row in rows:
        peak, host = (f"{row[key] / 2**20:9.1f} MiB" for key in ("peak_nbytes", "host_nbytes"))
        of_step = f"{1e3 * row['seconds']:9.2f} ms  x {row['of_saved']:.2f} of saved"
        link = f"copies alone {1e3 * row['link_seconds']:.2f} ms" if row["host_nbytes"] else ""
        print(f"{row['variant']:35} {of_step}  peak {peak}  host {host}  {link}")
    print(f"losses {'equal' if same else 'DIFFER'}")
    if args.device.startswith("cuda"):
        met = f"{len(judged) - len(missed)} of {len(judged)} whose step takes twice their copies"
        print(f"at most {TARGET} of the step without: {met}")
    return int(bool(missed) or not same)


def rows_of(runs: list[Run], device: torch.device) -> list[dict[str, Any]]:
    """The figures of each variant, beside those of the one that saves the same on the device."""
    by_name = {run.name: run for run in runs}
    rows = []
    for run in runs:
        base = min(by_name[run.name.replace("offloaded", "saved")].seconds)
        link = link_seconds(run.host_nbytes, device) if run.host_nbytes else 0.0
        rows.append(
            {
                "variant": run.name,
                "seconds": min(run.seconds),
                "of_saved": min(run.seconds) / base,
                "peak_nbytes": run.peak_nbytes,
                "host_nbytes": run.host_nbytes,
                "link_seconds": link,
                "is_judged": device.type == "cuda" and run.host_nbytes > 0 and base >= 2 * link,
                "loss": run.loss,
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
