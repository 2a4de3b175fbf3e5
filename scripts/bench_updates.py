"""A step whose parameters are updated in the backward pass: its peak and its time, beside others.

A GPT takes training steps with AdamW on this machine, the update included. The peak is what the
allocator tells PyTorch's profiler, beside parameters, states and inputs; seconds are of this
process's processor. The ways take turns, and ratios are the median over rounds. One way is that of
PyTorch's tutorial: an optimizer for each parameter, stepped by a hook. Then plans of a model shaped
like Llama 3 8B, on the meta device, say what it is worth on an H100.

    python scripts/bench_updates.py
    python scripts/bench_updates.py --width 256 --rounds 9 --llama-layers 0
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
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torchremat as tr
from tests.helpers import peak_of
from tests.planning import llama, models
from torchremat.errors import BudgetError
from torchremat.measure import resident_bytes
from torchremat.optim import step_in_backward

Step = Callable[[Tensor], Tensor]


@dataclass
class Way:
    name: str
    prepare: Callable[[nn.Module, Tensor], Step]
    step: Step | None = None
    model: nn.Module | None = None
    seconds: list[float] = field(default_factory=list)
    peak: int = 0


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def prepare_plain(model: nn.Module, tokens: Tensor) -> Step:
    return make_step(model, torch.optim.AdamW(model.parameters()))


def prepare_tutorial(model: nn.Module, tokens: Tensor) -> Step:
    """An optimizer for each parameter, as PyTorch's tutorial has it."""
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        return loss.detach()

    return step


def prepare_stepping(model: nn.Module, tokens: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters())
    step_in_backward(optimizer)
    return make_step(model, optimizer)


def prepare_clipped(model: nn.Module, tokens: Tensor) -> Step:
    """Clipped by the global norm in two passes."""
    optimizer = torch.optim.AdamW(model.parameters())
    stepping = step_in_backward(optimizer, max_norm=1.0)

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        stepping.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def prepare_clipped_plain(model: nn.Module, tokens: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters())

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def prepare_plan(part: float, model: nn.Module, tokens: Tensor) -> Step:
    """A plan for a part of the plain step's peak, or for the least."""
    optimizer = torch.optim.AdamW(model.parameters())
    resident = resident_bytes(model, optimizer, tokens)
    plain = tr.plan(model, tokens, budget=1.0, optimizer=optimizer).baseline.peak_bytes - resident
    budget = resident + int(part * plain)
    try:
        plan = tr.plan(model, tokens, budget=budget, optimizer=optimizer)
    except BudgetError as error:
        plan = tr.plan(model, tokens, budget=error.least_bytes, optimizer=optimizer)
    tr.nn.wrap(model, tr.checkpoint_policies.from_plan(plan))
    return make_step(model, optimizer)


def prepare_budget(model: nn.Module, tokens: Tensor) -> Step:
    """A budget as a policy, which counts on updates that begin before its first step."""
    optimizer = torch.optim.AdamW(model.parameters())
    step_in_backward(optimizer)
    tr.nn.wrap(model, "budget:30%")
    return make_step(model, optimizer)


CLIPPED = "plain PyTorch, gradients clipped"
WAYS = {
    "plain PyTorch": prepare_plain,
    "an optimizer for each parameter (tutorial)": prepare_tutorial,
    "`step_in_backward`": prepare_stepping,
    CLIPPED: prepare_clipped_plain,
    "`step_in_backward(max_norm=1.0)`, two passes": prepare_clipped,
    '`step_in_backward` and `wrap(model, "budget:30%")`': prepare_budget,
    "a plan for 0.3 of the peak": partial(prepare_plan, 0.3),
    "the plan of the least peak": partial(prepare_plan, 0.0),
}


def measure(ways: list[Way], model: nn.Module, tokens: Tensor, rounds: int) -> None:
    for way in ways:
        way.model = copy.deepcopy(model)
        way.step = way.prepare(way.model, tokens)
        for _ in range(2):  # the first makes states
            way.step(tokens)
        _, way.peak = peak_of(partial(way.step, tokens))
    for _ in range(rounds):
        for way in ways:
            assert way.step is not None
            start = time.process_time()
            way.step(tokens)
            way.seconds.append(time.process_time() - start)


def show_steps(console: Console, ways: list[Way]) -> None:
    table = Table("way", "peak (MiB)", "of plain", "time / plain", "parameters as plain's")
    plain = ways[0]
    clipped = next(way for way in ways if way.name == CLIPPED)
    for way in ways:
        like = clipped if "max_norm" in way.name else plain
        assert way.model is not None and like.model is not None
        pairs = zip(like.model.parameters(), way.model.parameters(), strict=True)
        ratios = [a / b for a, b in zip(way.seconds, plain.seconds, strict=True)]
        table.add_row(
            way.name,
            f"{way.peak / 2**20:.1f}",
            f"{way.peak / plain.peak:.3f}",
            f"{statistics.median(ratios):.2f}",
            "yes" if all(torch.equal(a, b) for a, b in pairs) else "no",
        )
    console.print(table)


def show_plans(console: Console, layers: int) -> None:
    """Plans of a Llama with AdamW; bytes beside parameters, states and inputs."""
    model, tokens = llama.llama_loss(layers)
    table = Table("GiB beside", "tiles", "updates", "peak (GiB)", "added", "at least", "seconds")
    resident = tr.measure.resident_bytes(model, tokens)
    resident += 2 * sum(p.nbytes for p in model.parameters())
    cases = [(None, False), (6.0, False), (4.0, False), (4.0, True), (3.0, True)]
    for gib, tile in cases:
        budget = 1.0 if gib is None else resident + int(gib * 2**30)
        start = time.perf_counter()
        plan = tr.plan(
            model, tokens, budget=budget, optimizer=torch.optim.AdamW, device="h100", tile=tile
        )
        whole = plan.baseline.seconds
        table.add_row(
            "plain" if gib is None else f"{gib:g}",
            str(plan.tiling.num_tiles) if plan.tiling else "-",
            str(plan.updates_in_backward or "-"),
            f"{(plan.peak_bytes - resident) / 2**30:.2f}",
            f"{100 * plan.recompute_seconds / whole:.1f} %",
            f"{100 * plan.lower_bound_seconds / whole:.1f} %",
            f"{time.perf_counter() - start:.0f}",
        )
    console.print(table)


def show_state(console: Console, layers: int) -> None:
    """Plans of all that a device must have, which may leave the optimizer's state to the host."""
    model, tokens = llama.llama_loss(layers)
    table = Table(
        "GiB in all", "offload", "peak (GiB)", "state on the host (GiB)", "added", "copies"
    )
    for gib, offload in [(None, False), (52, False), (32, True), (26, True)]:
        plan = tr.plan(
            model,
            tokens,
            budget=1.0 if gib is None else f"{gib}GiB",
            optimizer=torch.optim.AdamW,
            device="h100",
            offload=offload,
        )
        table.add_row(
            "plain" if gib is None else str(gib),
            "yes" if offload else "no",
            f"{plan.peak_bytes / 2**30:.2f}",
            f"{plan.state_on_host_bytes / 2**30:.1f}",
            f"{100 * plan.recompute_seconds / plan.baseline.seconds:.1f} %",
            f"{plan.state_link_seconds:.2f} s",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of each sequence")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--llama-layers", type=int, default=32, help="0 for no plans")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = models.GPT(options.layers, options.width)
    tokens = torch.randint(0, 64, (options.batch, options.tokens))
    ways = [Way(name, prepare) for name, prepare in WAYS.items()]
    measure(ways, model, tokens, options.rounds)
    console = Console(width=110)
    show_steps(console, ways)
    if options.llama_layers:
        show_plans(console, options.llama_layers)
        show_state(console, options.llama_layers)


if __name__ == "__main__":
    main()
