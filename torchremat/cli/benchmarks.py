"""`torchremat bench`: steps of each policy in turn, so that what slows the machine slows all."""

import gc
import random
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import click
import torch

from torchremat.cli.decisions import read_policies, under
from torchremat.cli.output import check_writable, show, working, write_json
from torchremat.cli.targets import Target, load_target
from torchremat.planning.plan import human_seconds
from torchremat.planning.progress import shown_progress
from torchremat.remat.bound import BoundCall
from torchremat.remat.held import Observation, is_real, observe
from torchremat.remat.policies import Policy
from torchremat.remat.report import human_bytes, table
from torchremat.remat.steps import Step, restored

PLAIN, AGAIN = "plain", "plain again"


@dataclass(frozen=True)
class BenchOptions:
    """What the command was given; see its help."""

    target: str
    policies: tuple[str, ...] = ()
    budgets: tuple[str, ...] = ()
    select: str | None = None
    rounds: int = 10
    device: str | None = None
    json_path: str | None = None


@dataclass
class Measured:
    """The figures of one policy: the peak in bytes, and the seconds of each step."""

    peak: int
    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The shortest step."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The step in the middle."""
        return statistics.median(self.seconds)


def run_bench(options: BenchOptions) -> None:
    """Measure, and print a table."""
    chosen = read_policies(options.policies, options.budgets)
    check_writable(json=options.json_path)
    with working(f"loading {options.target}"):
        target = load_target(options.target, options.device)
    measured = measure(target, chosen, options.select, options.rounds)
    if options.json_path != "-":
        show(_text(measured))
    if options.json_path is not None:
        write_json(_figures(measured, options), options.json_path)


def measure(
    target: Target, chosen: Mapping[str, Policy], select: str | None, rounds: int
) -> dict[str, Measured]:
    """The figures of each policy, of plain first and again last, by name."""
    asked = {PLAIN: None, **chosen, AGAIN: None}
    with working("tracing"):
        plain = observe(BoundCall(target.fun, target.args, target.kwargs))
    if not all(is_real(i.tensor) for i in plain.inputs):
        raise click.ClickException(
            f"bench runs the step, and {target.text} has tensors without values (meta or fake). "
            "Make it on a real device (--device cpu), or use compare, which runs nothing"
        )
    steps = {
        name: Step(BoundCall(under(target, policy, select), target.args, target.kwargs), plain)
        for name, policy in asked.items()
    }
    with restored(plain), shown_progress("measuring") as tell:
        measured = {}
        for name, step in steps.items():
            measured[name] = Measured(_peak(step, plain))  # traces, and fills caches
            tell(0.3 * len(measured) / len(steps))
        for number, name in enumerate(_turns(list(steps), rounds), 1):
            measured[name].seconds.append(steps[name].seconds())
            tell(0.3 + 0.7 * number / (rounds * len(steps)))
    return measured


def _turns(names: list[str], rounds: int) -> Iterator[str]:
    """Each name once a round, in an order that changes; nothing is collected while one runs."""
    shuffle = random.Random(0).shuffle
    with _no_collection():
        for _ in range(rounds):
            gc.collect()
            shuffle(names)
            yield from names


@contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _peak(step: Step, plain: Observation) -> int:
    """Bytes of live storages, or on a GPU what its allocator says."""
    gpus = sorted({i.tensor.device.index for i in plain.inputs if i.tensor.device.type == "cuda"})
    counted = step.peak()
    if not gpus:
        return counted
    before = {gpu: torch.cuda.memory_allocated(gpu) for gpu in gpus}
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    step.seconds()
    return sum(torch.cuda.max_memory_allocated(gpu) - before[gpu] for gpu in gpus)


def _text(measured: Mapping[str, Measured]) -> str:
    plain = measured[PLAIN]
    rows = [("policy", "peak", "of plain", "best step", "median", "of plain")]
    for name, found in measured.items():
        share = f"{100 * found.peak / plain.peak:.0f} %" if plain.peak else "-"
        rows.append((
            name, human_bytes(found.peak), share, human_seconds(found.best),
            human_seconds(found.median), f"x {found.best / plain.best:.2f}",
        ))  # fmt: skip
    return "\n".join(table(rows, numeric=(1, 2, 3, 4, 5), indent=""))


def _figures(measured: Mapping[str, Measured], options: BenchOptions) -> dict[str, Any]:
    rows = [
        {
            "policy": name,
            "peak_bytes": found.peak,
            "best_seconds": found.best,
            "median_seconds": found.median,
            "seconds": found.seconds,
        }
        for name, found in measured.items()
    ]
    return {"target": options.target, "select": options.select, "torch": torch.__version__,
            "threads": torch.get_num_threads(), "rows": rows}  # fmt: skip
