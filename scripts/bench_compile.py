#!/usr/bin/env python
"""The backend "torchremat" side by side with `torch.compile`'s own, in one run.

With the policy "none" against the default: seconds of a step (forward and backward), of a cold
compilation, bytes saved between the passes, peak bytes. Then the measured peaks of each
`activation_memory_budget`, and of `torch.utils.checkpoint` on each block. At each of them: the
seconds of a step, over those of our fastest plan whose measured peak is no higher.

    python scripts/bench_compile.py --quick                     on the CPU, small models, 3 minutes
    python scripts/bench_compile.py --json compile.json --docs  7 minutes; a GPU if there is one
    python scripts/bench_compile.py --from compile.json --docs  docs/measured/compile.md of these

Variants of a model are timed in turn, round after round. Variants that are not done in `--seconds`
are left out, and counted.
"""

import argparse
import copy
import json
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from compile_measure import (
    Subject,
    Variant,
    activation_budget,
    checkpointed,
    cold_caches,
    whole_graphs_uncached,
)
from compile_models import MODELS
from compile_report import print_report, write_docs

import torchremat as tr
from torchremat.compile.dynamo.backend import torchremat as backend

BUDGETS = (0.5, 0.25, 0.75, 0.1, 0.0, 0.9, 0.35)
"""Of `torch._functorch.config.activation_memory_budget`, the telling ones first."""
QUICK_BUDGETS = (0.5, 0.0)
ALIKE = 0.001
"""Peaks that differ by no more of the larger are one."""
NEAR = 0.02
"""A plan whose peak is so little below that of a peer is not replaced by a larger one."""
TRIES = 3
"""Plans that are compiled, at most, for each peak of a peer."""
ROUNDS = 40
TIMING_FRACTION = 0.2
"""Of the time for a model's budgets, what is left for timing."""

Record = dict[str, Any]


def ours(subject: Subject, policy: Any, name: str) -> Variant:
    """`subject` compiled by our backend."""
    return subject.compile(name, is_ours=True, backend=backend, options={"policy": policy})


def compare_plain(subject: Subject, repeats: int, rounds: int) -> Record:
    """The default and the policy "none", each compiled `repeats` times from cold."""
    _compile_something(subject.device)
    cold: dict[str, list[float]] = {"default": [], "none": []}
    kept: dict[str, Variant] = {}
    for i in range(repeats):
        for name in ("default", "none") if i % 2 == 0 else ("none", "default"):
            with cold_caches():
                kept[name] = subject.weigh(_plain(subject, name))
            cold[name].append(kept[name].compile_seconds)
    subject.time(list(kept.values()), rounds, time.monotonic() + 30)
    return {name: kept[name].record() | {"compiled": cold[name]} for name in cold}


def _plain(subject: Subject, name: str) -> Variant:
    return subject.compile(name) if name == "default" else ours(subject, "none", name)


def _compile_something(device: torch.device) -> None:
    """So that what a compiler does once in a process is not of the first variant's time."""
    with cold_caches():
        x = torch.ones(8, 8, device=device, requires_grad=True)
        torch.compile(lambda x: (x @ x).sin().sum())(x).backward()


class Pool:
    """The variants of a model that are compared at equal peaks."""

    def __init__(self, subject: Subject, blocks: tuple[str, ...], until: float) -> None:
        self.subject, self.blocks, self.until = subject, blocks, until
        self.peers: list[Variant] = []
        self.own: list[Variant] = []
        self.notes: list[str] = []
        self._tried: dict[float, Variant | None] = {}

    def fill(self, budgets: tuple[float, ...]) -> None:
        """Compile peers, and plans of ours for the peak of each, while there is time."""
        self.own.append(self.subject.weigh(ours(self.subject, "none", "none")))
        for name in [*budgets[:1], "checkpoint", *budgets[1:]]:
            if time.monotonic() > self.until:
                self.notes.append(f"no time for {name}")
                continue
            peer = self._peer(name)
            if any(_alike(peer, other) for other in self.peers):
                self.notes.append(f"{peer.name} is as another peer")
                continue
            self.peers.append(peer)
            self._meet(peer.peak_bytes)

    def _peer(self, name: str | float) -> Variant:
        if isinstance(name, float):
            with activation_budget(name):
                return self.subject.weigh(self.subject.compile(f"budget {name:g}"))
        module = checkpointed(copy.deepcopy(self.subject.module), self.blocks)
        return self.subject.weigh(self.subject.compile(name, module))

    def _meet(self, peak: int) -> None:
        """Search for the largest budget whose plan has at most this measured peak."""
        for _ in range(TRIES):
            fraction = self._fraction_for(peak)
            if not 0 < fraction < 1 or fraction in self._tried or time.monotonic() > self.until:
                return
            variant = self._planned(fraction)
            if variant is None or (1 - NEAR) * peak <= variant.peak_bytes <= peak:
                return

    def _fraction_for(self, peak: int) -> float:
        """By a line through the plans on both sides of `peak`: those that there are, and 0."""
        known = [(1.0, self.own[0].peak_bytes), (0.0, 0)]
        known += [(f, v.peak_bytes) for f, v in self._tried.items() if v is not None]
        above = min((k for k in known if k[1] > peak), key=lambda k: (k[1], k[0]), default=known[0])
        below = max((k for k in known if k[1] <= peak), key=lambda k: (k[1], k[0]))
        share = ((1 - NEAR / 2) * peak - below[1]) / max(above[1] - below[1], 1)
        return round(below[0] + share * (above[0] - below[0]), 3)

    def _planned(self, fraction: float) -> Variant | None:
        self._tried[fraction] = None
        try:
            variant = ours(self.subject, tr.checkpoint_policies.memory_budget(fraction), "")
        except Exception as error:
            lines = [line for line in str(error).splitlines() if "cannot be met" in line]
            self.notes.append(f"plan {fraction:g}: {(lines or [repr(error)])[0][:200]}")
            return None
        variant.name = f"plan {fraction:g}"
        self.own.append(self.subject.weigh(variant))
        self._tried[fraction] = variant
        return variant

    def pairs(self) -> Iterator[Record]:
        """Each peer with the fastest of ours that needs no more, if any does."""
        records = [variant.record() for variant in self.own]
        for peer in sorted(self.peers, key=lambda p: -p.peak_bytes):
            most = peer.peak_bytes * (1 + ALIKE)
            fits = [record for record in records if record["peak_bytes"] <= most]
            best = min(fits, key=lambda record: record["seconds"], default=None)
            least = min(record["peak_bytes"] for record in records)
            yield {"peer": peer.record(), "ours": best, "least_peak": least}


def _alike(one: Variant, other: Variant) -> bool:
    near = abs(one.peak_bytes - other.peak_bytes) <= ALIKE * max(one.peak_bytes, other.peak_bytes)
    return near and one.saved_bytes == other.saved_bytes


def compare_budgets(
    subject: Subject, blocks: tuple[str, ...], budgets: tuple[float, ...], share: float
) -> Record:
    """Peers and plans at equal peaks, in `share` seconds."""
    started = time.monotonic()
    torch.compiler.reset()
    pool = Pool(subject, blocks, started + (1 - TIMING_FRACTION) * share)
    with tempfile.TemporaryDirectory() as folder, whole_graphs_uncached(folder):
        pool.fill(budgets)
    subject.time([*pool.peers, *pool.own], ROUNDS, started + share)
    return {
        "pairs": list(pool.pairs()),
        "plans": [variant.record() for variant in pool.own],
        "notes": pool.notes,
    }


def run(options: argparse.Namespace) -> Record:
    """All figures, written to the file of `--json` as they come."""
    started = time.monotonic()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    names = options.models or (["gpt"] if options.quick else list(MODELS))
    budgets = QUICK_BUDGETS if options.quick else BUDGETS
    results: Record = _surroundings(device) | {"models": []}
    subjects = {name: Subject(*MODELS[name].make(device)) for name in names}
    for name, subject in subjects.items():
        print(f"... {name}: policy none", file=sys.stderr, flush=True)
        figures = compare_plain(subject, 1 if options.quick else 2, ROUNDS)
        results["models"].append({"model": name, "plain": figures})
    for i, name in enumerate(names):
        print(f"... {name}: budgets", file=sys.stderr, flush=True)
        share = (started + options.seconds - time.monotonic()) / (len(names) - i)
        figures = compare_budgets(subjects[name], MODELS[name].blocks, budgets, share)
        results["models"][i] |= figures
        results["seconds"] = time.monotonic() - started
        if options.json:
            Path(options.json).write_text(json.dumps(results, indent=1))
    return results


def _surroundings(device: torch.device) -> Record:
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": f"python scripts/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip(),
    }


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", choices=list(MODELS), metavar="NAME")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one model, two budgets")
    parser.add_argument("--seconds", type=float, help="420, or 150 with --quick")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--from", dest="source", metavar="FILE", help="figures of an earlier run")
    parser.add_argument("--docs", action="store_true", help="write docs/measured/compile.md")
    options = parser.parse_args()
    options.seconds = options.seconds or (150.0 if options.quick else 420.0)
    warnings.simplefilter("ignore")
    results = json.loads(Path(options.source).read_text()) if options.source else run(options)
    print_report(results)
    if options.docs:
        write_docs(results, Path(__file__).resolve().parents[1] / "docs" / "measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
