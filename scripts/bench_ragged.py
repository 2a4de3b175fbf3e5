"""The cost of raggedness: ours, padding to the longest, and `torch.nested`, forward and backward.

The tasks are softmax over each sequence, their sums, attention, and a transformer layer (layer
norm, attention, MLP). They run over 256 sequences of 1 to 512 rows. Each variant gets its inputs in
its own form: nothing is packed, padded or unpacked while the clock runs. Outputs and gradients of
the real rows are compared. The variants take turns; medians are printed, and ours over each. Then a
call of `torchremat.vmap` that repeats is timed over one of `torch.func.vmap`.

    python scripts/bench_ragged.py            takes ten minutes or more on a core
    python scripts/bench_ragged.py --quick    a minute: 64 sequences of 1 to 128 rows
"""

import argparse
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from planning_report import print_tables
from ragged_ways import TASKS, Batch, Run
from rich.console import Console
from torch import Tensor

import torchremat as tr

Record = dict[str, Any]
VMAP_TARGET = 1.5
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""How far, of the greatest number, outputs and gradients may be from ours; beyond, one is wrong."""


# --- the ways ------------------------------------------------------------------------------------


def compare(batch: Batch, task: str, rounds: int) -> Record:
    """The seconds of each way, or the error of one that cannot do it, and what differs."""
    record: Record = {"task": task, "seconds": {}, "errors": {}, "differs": {}}
    runs: dict[str, Run] = {}
    expected: list[Tensor] = []
    for name, make in TASKS[task].items():
        print(f"... {task}: {name}", file=sys.stderr, flush=True)
        try:
            run = make(batch)
            actual = run.packed()
        except Exception as error:
            text = " ".join(str(error).split())
            record["errors"][name] = f"{type(error).__name__}: {text[:160]}"
            continue
        expected = expected or actual
        record["differs"][name] = max(map(difference, actual, expected))
        runs[name] = run
        record["seconds"][name] = []
    for _ in range(rounds):
        for name, run in runs.items():
            record["seconds"][name].append(seconds_of(run.step, batch.device))
    return record


def difference(actual: Tensor, expected: Tensor) -> float:
    """The greatest difference, over the greatest number."""
    return float((actual - expected).abs().max() / expected.abs().max())


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


# --- vmap ----------------------------------------------------------------------------------------


def tiny(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(torch.tanh(x @ w))


def mlp(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return torch.relu(x @ w) @ u


def block(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """A transformer block of 4 heads, on `[length, width]`."""
    normed = torch.nn.functional.layer_norm(x, x.shape[-1:])
    q, k, v = (y.unflatten(-1, (4, -1)).transpose(0, 1) for y in (normed @ w).chunk(3, -1))
    x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
    return x + torch.nn.functional.gelu(x @ u) @ u.t()


def vmap_cases(device: torch.device) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device) / shape[-1] ** 0.5

    return {
        "tiny: sin(tanh(x @ w))": (tiny, (rand(8, 16), rand(16, 16))),
        "MLP of 2 layers": (mlp, (rand(32, 64), rand(64, 256), rand(256, 64))),
        "transformer block": (block, (rand(8, 16, 64), rand(64, 192), rand(64, 256))),
    }


def compare_vmap(device: torch.device, rounds: int) -> list[Record]:
    """Microseconds of a call that repeats, of each."""
    records = []
    for name, (function, args) in vmap_cases(device).items():
        axes = (0, *(None for _ in args[1:]))
        calls = {
            "ours": tr.vmap(function, axes),
            "torch.func.vmap": torch.func.vmap(function, axes),
        }
        expected = calls["torch.func.vmap"](*args)
        for call in calls.values():
            for _ in range(5):  # traced, caches filled
                torch.testing.assert_close(call(*args), expected)
        found: dict[str, list[float]] = {which: [] for which in calls}
        for _ in range(rounds):
            for which, call in calls.items():
                found[which].append(1e6 * seconds_of(partial(call, *args), device))
        records.append({"function": name, "microseconds": found})
    return records


# --- what is printed -----------------------------------------------------------------------------


def tables_of(results: Record) -> list[tuple[str, list[str], list[list[str]]]]:
    rows = []
    for record in results["tasks"]:
        medians = {name: statistics.median(s) for name, s in record["seconds"].items()}
        for name in [*medians, *record["errors"]]:
            if name in record["errors"]:
                rows.append([f"{record['task']}: {name}", "cannot", "", ""])
                continue
            rows.append(
                [
                    f"{record['task']}: {name}",
                    f"{1e3 * medians[name]:.1f}",
                    "" if name == "ours" else f"{medians['ours'] / medians[name]:.3f}",
                    f"{record['differs'][name]:.0e}" + _verdict(record["differs"][name], results),
                ]
            )
    mapped = []
    for record in results["vmap"]:
        ours, torchs = (statistics.median(x) for x in record["microseconds"].values())
        verdict = "met" if ours <= VMAP_TARGET * torchs else "MISSED"
        cells = (f"{ours:.0f}", f"{torchs:.0f}", f"{ours / torchs:.2f}", f"{VMAP_TARGET} {verdict}")
        mapped.append([record["function"], *cells])
    return [
        (results["title"], ["forward and backward", "ms", "ours over it", "differs by"], rows),
        ("vmap", ["a call that repeats", "ours (us)", "torch's (us)", "ratio", "target"], mapped),
    ]


def _verdict(differs: float, results: Record) -> str:
    return "" if differs <= TOLERANCE[results["dtype"]] else " WRONG"


def run(options: argparse.Namespace) -> Record:
    """All figures."""
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(options.threads)
    longest, num = (128, 64) if options.quick else (512, 256)
    batch = Batch.of(num, longest, device, getattr(torch, options.dtype))
    started = time.monotonic()
    tasks = [compare(batch, task, options.rounds) for task in options.tasks or TASKS]
    return {
        "title": f"{num} sequences of 1 to {longest} rows ({batch.total} in all), {options.dtype}",
        "dtype": options.dtype,
        "tasks": tasks,
        "vmap": compare_vmap(device, 50 if options.quick else 300),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": time.monotonic() - started,
    }


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--device", default="cpu")
    add("--dtype", default="float32", choices=["float32", "float64", "float16", "bfloat16"])
    add("--tasks", nargs="*", choices=list(TASKS), metavar="NAME", help=", ".join(TASKS))
    add("--rounds", type=int, default=5, help="samples of each, %(default)s")
    add("--threads", type=int, default=1, help="%(default)s")
    add("--quick", action="store_true", help="64 sequences of 1 to 128 rows")
    add("--json", metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = run(options)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    console = Console(width=110)
    print_tables(console, tables_of(results))
    for record in results["tasks"]:
        for name, error in record["errors"].items():
            console.print(f"{record['task']}: {name} cannot: {error}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
