#!/usr/bin/env python
"""Compare simulated peaks with the bytes requested from the allocator of an accelerator.

    .venv/bin/python scripts/check_device_memory.py        a line for each model and policy

`requested` is "requested_bytes.all.peak" of the allocator's statistics in a step, above the bytes
that were there before. Kernels also allocate workspaces (cuBLAS, cuDNN, sorts, reductions in
blocks). A step of its own measures what each operator allocates and frees while it runs. These
bytes are added to the simulated ones of that operator. The two must be equal then, to the byte. The
exit status is 1 if they are not. Without an accelerator nothing is checked, and it is 0.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerator import find_device, measure_peak, synchronize

import torchremat as tr
from torchremat.core.accelerators import read_allocated_bytes
from torchremat.planning.memory.simulate import simulate

POLICIES = ("none", "full", "dots", "dots_with_no_batch_dims_saveable")


@dataclass(frozen=True)
class Row:
    """Bytes at the peak of a step; `workspaces`: the most that one operator asks for besides."""

    model: str
    policy: str
    simulated: int
    requested: int
    workspaces: int
    operators: tuple[str, ...]


def main() -> int:
    """Print a line for each model and policy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=torch.device, default=find_device())
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    if args.device.type == "cpu":
        print("no accelerator: nothing is checked")
        return 0
    rows = check_all(args.device, args.models)
    for row in rows:
        verdict = "equal" if row.simulated == row.requested else "NOT EQUAL"
        print(
            f"{row.model:12} {row.policy:32} simulated {row.simulated:>12,} "
            f"requested {row.requested:>12,} {verdict}; workspaces up to {row.workspaces:,}"
            f" ({', '.join(row.operators)})"
        )
    return int(any(row.simulated != row.requested for row in rows))


def check_all(device: torch.device, models: list[str]) -> list[Row]:
    """The figures of each model and policy."""
    return [check(name, policy, device) for name in models for policy in POLICIES]


def check(name: str, policy: str, device: torch.device) -> Row:
    """The figures of one model under one policy."""
    torch.manual_seed(0)
    module, x = MODELS[name]()
    module, x = module.to(device), x.to(device)
    parameters = list(module.parameters())
    fun = tr.checkpoint(lambda: module(x).float().square().mean(), policy=policy)

    def step() -> None:
        torch.autograd.grad(fun(), parameters)

    step()
    step()  # handles and their workspaces are there from now on
    peak = measure_peak(step, device)
    with Workspaces(device) as mode:
        step()
    program = fun.last_program
    needed = tuple(spec.requires_grad for spec in program.region.specs)
    backward = program.backward((True,), needed, with_states=True)
    timeline = simulate(program.runtime_forward.module, backward.module, device=device.type)
    points = [p for p in timeline if "generator_state" not in p.name]
    spaces = list(mode.without_the_rest(sum(p.phase == "forward" for p in points)))
    assert len(spaces) == len(points), (len(spaces), len(points))
    with_spaces = [p.live + space for p, (_, space) in zip(points, spaces, strict=True)]
    return Row(
        name,
        policy,
        max(with_spaces),
        peak,
        max(space for _, space in spaces),
        tuple(sorted({op for op, space in spaces if space})),
    )


class Workspaces(TorchDispatchMode):
    """Notes what each operator asks for while it runs, above what is there before and after."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = self._read("current")
        torch.accelerator.reset_peak_memory_stats(self._device)
        out = func(*args, **(kwargs or {}))
        most = max(before, self._read("current"))
        is_token = func == torch.ops.aten.empty.memory_format and args[0] == [0]  # of a stage
        if func.namespace == "aten" and not is_token:
            self.found.append((str(func), self._read("peak") - most))
        return out

    def _read(self, which: str) -> int:
        synchronize(self._device)
        return read_allocated_bytes(self._device, which)

    def without_the_rest(self, num_forward: int) -> Iterator[tuple[str, int]]:
        """The operators of the graphs, without writes to buffers and `ones_like`, the cotangent."""
        ran = [entry for entry in self.found if entry[0] != "aten.copy_.default"]
        for i, entry in enumerate(ran):
            if i != num_forward:
                yield entry


# --- models --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(tr.checkpoint_name(y, "attn").transpose(1, 2).flatten(2))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, dropout: float = 0.0, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, 256), nn.Linear(256, 512)
        self.blocks = nn.Sequential(*(Block(256, dropout) for _ in range(3)))
        self.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype is not None):
            return self.head(self.blocks(self.embed(tokens)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.norm1, self.norm2, self.fc = nn.BatchNorm2d(32), nn.BatchNorm2d(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x))) + x
        return self.fc(F.adaptive_avg_pool2d(F.max_pool2d(x, 2), 1).flatten(1))


def tokens() -> Tensor:
    return torch.randint(512, (4, 128))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "gpt": lambda: (GPT(), tokens()),
    "gpt dropout": lambda: (GPT(0.1), tokens()),
    "gpt bf16": lambda: (GPT(dtype=torch.bfloat16), tokens()),
    "convnet": lambda: (ConvNet(), torch.randn(8, 3, 32, 32)),
    "mlp": lambda: (
        nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)),
        torch.randn(32, 64),
    ),
}

if __name__ == "__main__":
    sys.exit(main())
