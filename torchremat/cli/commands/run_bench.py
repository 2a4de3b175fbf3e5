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
from torch import Tensor

from torchremat.cli.arguments.read_policies import apply_policy, read_policies
from torchremat.cli.arguments.targets import Target, load_target
from torchremat.cli.terminal.output import check_writable, show, show_progress_of, write_json
from torchremat.core.accelerators import has_streams
from torchremat.core.avals import Aval
from torchremat.core.formatting import human_bytes, human_seconds, table
from torchremat.core.progress import show_progress
from torchremat.policies.policy import Policy
from torchremat.remat.tracing.input_labels import BoundCall
from torchremat.report.measured_step import MeasuredStep, restore_after
from torchremat.report.observe import Observation, is_real, observe_saved

PLAIN, AGAIN = "plain", "plain again"


@dataclass(frozen=True)
class BenchOptions:
    """The arguments of `torchremat bench`."""

    target: str
    policies: tuple[str, ...] = ()
    budgets: tuple[str, ...] = ()
    select: str | None = None
    rounds: int = 10
    device: str | None = None
    json_path: str | None = None


@dataclass
class Measured:
    """`difference`: how results first differ from plain's; `None` if no bit does."""

    peak: int
    difference: str | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def run_bench(options: BenchOptions) -> None:
    """Time steps under each policy beside plain PyTorch, and show peaks and times."""
    chosen = read_policies(options.policies, options.budgets)
    check_writable(json=options.json_path)
    with show_progress_of(f"loading {options.target}"):
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
    policies = {PLAIN: None, **chosen, AGAIN: None}
    with show_progress_of("tracing"):
        plain = observe_saved(BoundCall(target.fun, target.args, target.kwargs))
    if not all(is_real(i.tensor) for i in plain.inputs):
        raise click.ClickException(
            f"bench runs the step, and {target.text} has tensors without values (meta or fake). "
            "Make it on a real device (--device cpu), or use compare, which runs nothing"
        )
    steps = {
        name: MeasuredStep(
            BoundCall(apply_policy(target, policy, select), target.args, target.kwargs), plain
        )
        for name, policy in policies.items()
    }
    with restore_after(plain), show_progress("measuring") as tell:
        differences = _find_differences(steps, plain)  # traces, and fills caches
        measured = {}
        for name, step in steps.items():
            measured[name] = Measured(_measure_peak(step, plain), differences[name])
            tell(0.3 * len(measured) / len(steps))
        for number, name in enumerate(_turns(list(steps), rounds), 1):
            measured[name].seconds.append(steps[name].seconds())
            tell(0.3 + 0.7 * number / (rounds * len(steps)))
    return measured


def _find_differences(
    steps: Mapping[str, MeasuredStep], plain: Observation
) -> dict[str, str | None]:
    """How the results of each step first differ from plain's, at the same random state."""
    found: dict[str, str | None] = {}
    expected: dict[str, Tensor | None] = {}
    for name, step in steps.items():
        with restore_after(plain):
            results = step.results()
        expected = expected or results  # plain is the first
        found[name] = describe_difference(expected, results)
    return found


def describe_difference(
    expected: Mapping[str, Tensor | None], results: Mapping[str, Tensor | None]
) -> str | None:
    """Say how `results` first differ from `expected`; `None` if no bit does.

    >>> x = torch.ones(2)
    >>> describe_difference({"grad of x": x}, {"grad of x": x + 0.5})
    'grad of x differs by 0.5'
    """
    for name in {**expected, **results}:
        a, b = expected.get(name), results.get(name)
        if a is None or b is None:
            if a is not b:
                return f"{name} is {'missing' if b is None else 'there, which plain has not'}"
        elif a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {Aval.of(b)}, not {Aval.of(a)}"
        elif not torch.equal(a, b) and not torch.equal(_bits(a), _bits(b)):
            return f"{name} differs by {_distance(a, b):.2g}"
    return None


def _bits(tensor: Tensor) -> Tensor:
    """Its bytes, by which two that are not a number may be equal."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _distance(a: Tensor, b: Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return float((a.to(wide) - b.to(wide)).abs().max())


def _turns(names: list[str], rounds: int) -> Iterator[str]:
    """Each name once a round, in an order that changes, without garbage collection in between."""
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


def _measure_peak(step: MeasuredStep, plain: Observation) -> int:
    """Bytes of live storages, or on a GPU what its allocator says."""
    gpus = {i.tensor.device for i in plain.inputs if has_streams(i.tensor.device)}
    counted = step.peak()
    if not gpus:
        return counted
    before = {gpu: torch.accelerator.memory_allocated(gpu) for gpu in gpus}
    for gpu in gpus:
        torch.accelerator.reset_peak_memory_stats(gpu)
    step.seconds()
    return sum(torch.accelerator.max_memory_allocated(gpu) - before[gpu] for gpu in gpus)


def _text(measured: Mapping[str, Measured]) -> str:
    plain = measured[PLAIN]
    rows = [("policy", "peak", "of plain", "best step", "median", "of plain", "bit-equal")]
    for name, found in measured.items():
        share = f"{100 * found.peak / plain.peak:.0f} %" if plain.peak else "-"
        rows.append((
            name, human_bytes(found.peak), share, human_seconds(found.best),
            human_seconds(found.median), f"x {found.best / plain.best:.2f}",
            "yes" if found.difference is None else f"no: {found.difference}",
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
            "bit_equal": found.difference is None,
            "difference": found.difference,
        }
        for name, found in measured.items()
    ]
    return {"target": options.target, "select": options.select, "torch": torch.__version__,
            "threads": torch.get_num_threads(), "rows": rows}  # fmt: skip
