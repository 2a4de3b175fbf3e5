"""Trains a model of the zoo for three steps in one way, and says how that compares with plain."""

import contextlib
import functools
import gc
import random
import signal
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from tests.helpers import allocated_peak, bits, memory_profiler
from tests.zoo.zoo_model import Arguments, CannotBeMadeError, ZooModel, find_blocks
from torchremat.measure import LiveBytes
from torchremat.nn import report, wrap

WAYS = ("checkpoint", "blocks", "whole", "budget", "compile", "compiled budget")
STEPS = 3
MEASURED = 1
"""The step whose bytes are counted; the one after it is timed.

A compiled way takes it once more after the others, where its bytes are counted.
"""
_COMPILED = {"codegen": "eager"}
SECONDS = 240
"""After which a way counts as one that does not end."""
RELATIVE = 1e-3
"""What rounding may add up to in three steps, of the largest entry of a tensor."""
OF_ALL = 1e-5
"""The same, of the largest entry of all gradients: a gradient that is nothing but rounding."""


@dataclass
class Trained:
    """What three steps leave, and what they took."""

    losses: list[Tensor] = field(default_factory=list)
    left: dict[str, Tensor] = field(default_factory=dict)
    peak: int = 0
    """Of `LiveBytes`; with `torch.compile` the allocator's, since no mode sees its graphs."""
    allocated: int = 0
    """The peak that the allocator tells of the plain way."""
    seconds: list[float] = field(default_factory=list)
    parts: str = ""
    """Whether what is wrapped ran as `graph`, on a `tape`, or both."""


def train(zoo: ZooModel, way: str, budget: int | None = None) -> Trained:
    """Three steps with SGD in this way: `plain`, `aot_eager` or one of `WAYS`.

    `budget` is the bytes of the ways with a budget. `aot_eager` is the backend of `torch.compile`
    of that name, which `compile` is to be as good as.

    Raises:
        TimeoutError: if it takes more than `SECONDS`.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = zoo.build().train()
    model = _prepare(zoo, plain, way, budget)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    trained = Trained()
    with _limited(SECONDS):
        for step in range(STEPS):
            is_measured = step == MEASURED and not _compiles(way)
            _train_one_step(zoo, model, way, step, trained, is_measured=is_measured)
            if step < STEPS - 1:
                optimizer.step()
    gradients = {f"gradient of {n}": p.grad for n, p in plain.named_parameters()}
    buffers = {f"buffer {n}": b for n, b in plain.named_buffers()}
    trained.left = {
        name: t.detach().clone() for name, t in (gradients | buffers).items() if t is not None
    }
    trained.left["random state"] = torch.get_rng_state()
    if _compiles(way):  # once more: the steps before compile, for which PyTorch has tensors too
        again = Trained()
        with _limited(SECONDS):
            _train_one_step(zoo, model, way, MEASURED, again, is_measured=True)
        trained.peak = again.peak
    if way in ("blocks", "whole", "budget"):
        trained.parts = "+".join(sorted({row.way for row in report(model)}))
    return trained


def _train_one_step(
    zoo: ZooModel, model: nn.Module, way: str, step: int, trained: Trained, *, is_measured: bool
) -> None:
    torch.manual_seed(step)
    np.random.seed(step)
    random.seed(step)
    batch = zoo.batch()
    model.zero_grad()
    gc.collect()
    memory, profiler = _meters(way) if is_measured else (None, None)
    start = time.perf_counter()
    with memory or contextlib.nullcontext(), profiler or contextlib.nullcontext():
        loss = model(batch) if "budget" in way else zoo.loss_of(model, batch)
        loss.backward()
    trained.seconds.append(time.perf_counter() - start)
    if profiler is not None:
        trained.allocated = trained.peak = allocated_peak(profiler)
    if memory is not None:
        trained.peak = memory.peak
    trained.losses.append(loss.detach())


def _meters(way: str) -> tuple[LiveBytes | None, profile | None]:
    """A mode turns Dynamo off, so compiled ways are measured by the profiler; plain by both."""
    memory = None if _compiles(way) else LiveBytes()
    return memory, memory_profiler() if _compiles(way) or way == "plain" else None


def _compiles(way: str) -> bool:
    return way.startswith("compile") or way == "aot_eager"


def _prepare(zoo: ZooModel, model: nn.Module, way: str, budget: int | None) -> Any:
    names = zoo.blocks or find_blocks(model)
    if way == "checkpoint":
        for name in names:
            block = model.get_submodule(name)
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    elif way == "blocks":
        wrap(model, select=", ".join(names))
    elif way == "whole":
        wrap(model)
    elif way == "budget":
        return wrap(_WithLoss(zoo, model), f"budget:{budget}B")
    elif way == "compile":
        return torch.compile(model, backend="torchremat", options=_COMPILED | {"policy": "full"})
    elif way == "compiled budget":
        options = _COMPILED | {"policy": f"budget:{budget}B"}
        return torch.compile(_WithLoss(zoo, model), backend="torchremat", options=options)
    elif way == "aot_eager":
        return torch.compile(model, backend="aot_eager")
    return model


class _WithLoss(nn.Module):
    """A model and its loss: a budget is that of what is wrapped."""

    def __init__(self, zoo: ZooModel, model: nn.Module) -> None:
        super().__init__()
        self.zoo = zoo
        self.model = model

    def forward(self, batch: Arguments) -> Tensor:
        return self.zoo.loss_of(self.model, batch)


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Row:
    """One model in one way, beside plain."""

    model: str
    library: str
    way: str
    result: str
    """`bits`, `rounding`, `wrong` or `refused`."""
    reason: str = ""
    parts: str = ""
    peak: float = 0.0
    first_seconds: float = 0.0
    time: float = 0.0
    """Of the last step. It and the peak are parts of plain's."""


def compare_ways(name: str, zoo: ZooModel, ways: tuple[str, ...] = WAYS) -> list[Row]:
    """Train in these ways, and in the plain one.

    A budget is half way between the peaks of plain and of `checkpoint`.

    Raises:
        CannotBeMadeError: if the plain way does not end.
    """
    try:
        plain = train(zoo, "plain")
    except Exception as error:
        raise CannotBeMadeError(f"plain PyTorch: {error}") from error
    rows, budget = [], plain.peak
    for way in ways:
        outcome = _train_or_refuse(zoo, way, budget)
        row = _compare(name, zoo, way, outcome, plain)
        if way == "checkpoint" and isinstance(outcome, Trained):
            budget = (outcome.peak + plain.peak) // 2
        if way.startswith("compile") and row.result != "bits":
            row = _blame_compiler(row, zoo, outcome, plain)
        rows.append(row)
    return rows


def _blame_compiler(row: Row, zoo: ZooModel, found: Trained | str, plain: Trained) -> Row:
    """The row, which says so if another backend of `torch.compile` does the same."""
    peer = _train_or_refuse(zoo, "aot_eager", None)
    if isinstance(found, str):
        is_same = isinstance(peer, str)
    else:
        is_same = (
            not isinstance(peer, str) and judge(_leavings(found), _leavings(peer))[0] == "bits"
        )
    if not is_same:
        return row
    return replace(row, reason=f"so does aot_eager: {row.reason}")


def _train_or_refuse(zoo: ZooModel, way: str, budget: int | None) -> Trained | str:
    try:
        return train(zoo, way, budget)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text} ({last.filename.rpartition('/')[2]}:{last.lineno})"


def _compare(name: str, zoo: ZooModel, way: str, found: Trained | str, plain: Trained) -> Row:
    if isinstance(found, str):
        return Row(name, zoo.library, way, "refused", found)
    result, reason = judge(_leavings(found), _leavings(plain))
    return Row(
        name,
        zoo.library,
        way,
        result,
        reason,
        found.parts,
        round(found.peak / (plain.allocated if way.startswith("compile") else plain.peak), 3),
        round(found.seconds[0], 2),
        round(found.seconds[-1] / plain.seconds[-1], 2),
    )


def _leavings(trained: Trained) -> dict[str, Tensor]:
    return {"losses": torch.stack(trained.losses), **trained.left}


def judge(found: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> tuple[str, str]:
    """How equal two trainings are: `bits`, `rounding` or `wrong`, and where they differ most."""
    if found.keys() != plain.keys():
        return "wrong", f"there or not: {sorted(found.keys() ^ plain.keys())[:3]}"
    names = [name for name, tensor in plain.items() if bits(tensor) != bits(found[name])]
    if not names:
        return "bits", ""
    largest = max((_size(t) for n, t in plain.items() if n.startswith("gradient")), default=0.0)
    worst, excess = "", 0.0
    for name in names:
        difference = _size(found[name].double() - plain[name].double())
        allowed = max(RELATIVE * _size(plain[name]), OF_ALL * largest)
        if not difference / allowed <= excess:
            worst, excess = name, difference / allowed
    return ("rounding" if excess <= 1 else "wrong"), f"{worst}, {excess * RELATIVE:.1e}"


def _size(tensor: Tensor) -> float:
    """The largest entry; infinite if one is not a number."""
    if not tensor.numel():
        return 0.0
    return float(torch.nan_to_num(tensor.double().abs(), nan=torch.inf).max())
