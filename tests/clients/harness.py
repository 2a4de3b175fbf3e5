"""A training by a client, in five ways: compared to the bit, its peak and its time measured.

    check_client("Trainer, packed", train)

`train(way, recorder)` runs a training in one of the ways of `WAYS` and returns what it leaves: a
dict of tensors. In each step it calls the recorder, with which `measured_training` wraps a loop of
PyTorch. The ways are `plain`, `own` (the client's checkpointing, or PyTorch's where it has none),
and policies of torchremat: per layer, except a budget, which is for the model as a whole.
"""

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchremat.measure import LiveBytes

WAYS = ("plain", "own", "full", "dots", "budget:60%")
ROWS = "TORCHREMAT_CLIENTS_ROWS"
"""The environment variable that names the file for the rows of docs/measured/clients.md."""

# what clients and their libraries warn of is not ours; what torchremat warns of is an error
MARKS = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),
    *(
        pytest.mark.filterwarnings(f"error::torchremat.errors.{name}Warning")
        for name in ("Retrace", "Effect", "Unmatched", "Budget", "Override", "Compiler", "Loop")
    ),
]


@dataclass
class Recorder:
    """The losses, the seconds and the measured step of one training.

    The step `measured` counts bytes, which takes time, so it is not among the seconds. Those before
    `warm` trace and plan.
    """

    measured: int
    warm: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    _step: int = 0
    _start: float = 0.0
    _memory: LiveBytes | None = None

    def step_begins(self) -> None:
        if self._step == self.measured:
            gc.collect()
            self._memory = LiveBytes()
            self._memory.__enter__()
        self._start = time.perf_counter()

    def passes_end(self) -> None:
        """Called after each of the backward passes of a step, before the optimizer."""
        if self._memory is not None:
            memory, self._memory = self._memory, None
            memory.__exit__(None, None, None)
            self.peak = memory.peak
        elif self._step >= self.warm:
            self.seconds.append(time.perf_counter() - self._start)

    def step_ends(self) -> None:
        self._step += 1


@dataclass(frozen=True)
class Row:
    """A way beside `plain`: whether equal to the bit, its peak and its time as parts of plain's."""

    client: str
    way: str
    is_equal: bool
    peak_bytes: int
    peak: float
    time: float


def check_client(
    client: str,
    train: Callable[[str, Recorder], Mapping[str, Tensor]],
    *,
    steps: int = 8,
    warm: int = 3,
    ways: Sequence[str] = WAYS,
    excess: float = 0.0,
    most: float = 1.0,
    is_written: bool = True,
) -> None:
    """Each way trains as `plain` does, to the bit, and nothing kept has no higher peak than `own`.

    `excess` is the part by which it may be higher, and `most` the part of plain's peak that a way
    may take; the caller gives the reason. Of several processes one writes the rows (`is_written`).

    Raises:
        AssertionError: with the rows of all ways.
    """
    recorders, left = {}, {}
    for way in ways:
        torch.manual_seed(0)
        recorders[way] = Recorder(measured=steps - 1, warm=warm)
        left[way] = {name: t.detach().clone() for name, t in train(way, recorders[way]).items()}
        assert recorders[way].peak > 0, f"{client}, {way}: step {steps - 1} was not measured"
    rows = [_compare(client, way, recorders, left) for way in ways]
    if is_written and ROWS in os.environ:
        with Path(os.environ[ROWS]).open("a") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    told = "\n".join(map(str, rows))
    print(told)
    found = {row.way: row for row in rows}
    assert all(row.is_equal for row in rows), told
    assert all(row.peak <= most for row in rows), told
    if "own" in found and "full" in found:
        assert found["full"].peak_bytes <= (1 + excess) * found["own"].peak_bytes, told


def _compare(
    client: str,
    way: str,
    recorders: Mapping[str, Recorder],
    left: Mapping[str, Mapping[str, Tensor]],
) -> Row:
    plain, this = recorders["plain"], recorders[way]
    assert plain.losses, f"{client} recorded no losses"
    is_equal = this.losses == plain.losses and left[way].keys() == left["plain"].keys()
    is_equal = is_equal and all(
        torch.equal(tensor, left["plain"][name]) for name, tensor in left[way].items()
    )
    return Row(
        client,
        way,
        is_equal,
        this.peak,
        round(this.peak / plain.peak, 3),
        round(statistics.median(this.seconds) / statistics.median(plain.seconds), 2),
    )


def run_steps(
    parameters: Sequence[Tensor],
    loss_of: Callable[[int], Tensor],
    recorder: Recorder,
    *,
    steps: int = 8,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """A plain loop of PyTorch, with AdamW unless another optimizer is given."""
    optimizer = optimizer or torch.optim.AdamW(parameters, 1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        recorder.step_begins()
        loss = loss_of(step)
        loss.backward()
        recorder.passes_end()
        recorder.losses.append(loss.item())
        del loss
        optimizer.step()
        recorder.step_ends()
