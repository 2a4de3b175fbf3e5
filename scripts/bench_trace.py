"""The cost of the first step, in which layers are traced, for stacks of alike layers.

Layers of a Llama, of tiny sizes, are each under a checkpoint. Those that are alike share one trace,
so the first step should grow little with their number. Seconds are of this process's processor.
The first row is a stack that nothing is shared in, since each layer reads a number of its own.

Beside it stand `torch.export` and the first step of `torch.compile(backend="aot_eager")`, on the
same stacks. The last three columns divide by the operators that a plain step calls: those of the
forward pass for `torch.export`, which traces nothing else, and those of both passes for the others.
A later step is taken off the first ones, since it runs the operators and traces none.

    python scripts/bench_trace.py
    python scripts/bench_trace.py --layers 2 32 --policy dots --repeats 5
"""

import argparse
import gc
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import torchremat as tr

WIDTH = 32
COLUMNS = (
    "layers",
    "first step, s",
    "torch.export, s",
    "aot_eager, s",
    "later steps, ms",
    "traces",
    "operators",
    "first step, µs each",
    "torch.export, µs each",
    "aot_eager, µs each",
)


class Layer(nn.Module):
    def __init__(self, index: int, factor: float) -> None:
        super().__init__()
        self.index, self.factor = index, factor
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        names = ("q", "k", "v", "o")
        self.attention = nn.ModuleDict({n: nn.Linear(WIDTH, WIDTH, bias=False) for n in names})
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (self.attention[n](y).unflatten(-1, (4, -1)).transpose(1, 2) for n in "qkv")
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention["o"](y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.factor * self.down(F.silu(self.gate(y)) * self.up(y))


class Stack(nn.Module):
    def __init__(self, count: int, *, is_alike: bool) -> None:
        super().__init__()
        factors = [1.0 if is_alike else 1.0 + i for i in range(count)]
        self.layers = nn.ModuleList(Layer(i, factor) for i, factor in enumerate(factors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 2 * x
        for layer in self.layers:
            x = layer(x)
        return x


def make_input() -> torch.Tensor:
    return torch.ones(2, 16, WIDTH, requires_grad=True)


def time_step(model: nn.Module) -> float:
    x = make_input()
    start = time.process_time()
    model(x).sum().backward()
    return time.process_time() - start


class Count(TorchDispatchMode):
    """Counts the operators that are called within it."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def count_operators(model: nn.Module) -> tuple[int, int]:
    """How many operators a plain step calls: in its forward pass, and in both passes."""
    with Count() as count:
        loss = model(make_input()).sum()
        forward = count.number
        loss.backward()
    return forward, count.number


@dataclass(frozen=True)
class Costs:
    """Seconds of one stack; `later` and `compiled_later` are those of the best later step."""

    first: float
    later: float
    exported: float
    compiled: float
    compiled_later: float
    traces: int


def measure_compiled(model: nn.Module) -> tuple[float, float]:
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    first = time_step(compiled)
    return first, min(time_step(compiled) for _ in range(20))


def measure_export(model: nn.Module) -> float:
    start = time.process_time()
    torch.export.export(model, (make_input(),))
    return time.process_time() - start


def measure(count: int, policy: str, *, is_alike: bool) -> Costs:
    """Measure the three ways in turn, each on a stack of its own."""
    gc.collect()  # alike layers of the model before would serve this one
    model = tr.nn.wrap(Stack(count, is_alike=is_alike), policy, select="layers.*")
    first = time_step(model)
    later = min(time_step(model) for _ in range(20))
    exported = measure_export(Stack(count, is_alike=is_alike))
    compiled = measure_compiled(Stack(count, is_alike=is_alike))
    return Costs(first, later, exported, *compiled, tr.nn.report(model).traces)


def describe(name: str, rows: list[Costs], operators: tuple[int, int]) -> list[str]:
    """The cells of a stack: of each number the least of its repeats."""
    forward, both = operators
    first, exported, compiled = (
        min(getattr(row, part) for row in rows) for part in ("first", "exported", "compiled")
    )
    later, compiled_later = (
        min(getattr(row, part) for row in rows) for part in ("later", "compiled_later")
    )
    each = (first - later) / both, exported / forward, (compiled - compiled_later) / both
    seconds = [f"{x:.3f}" for x in (first, exported, compiled)]
    return [
        name,
        *seconds,
        f"{1e3 * later:.2f}",
        str(rows[0].traces),
        str(both),
        *(f"{1e6 * x:.0f}" for x in each),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 16])
    parser.add_argument("--policy", default="full")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure(1, options.policy, is_alike=True)  # what PyTorch does once in a process
    table = Table(*COLUMNS, title="tracing a stack")
    cases = [(options.layers[0], False), *((count, True) for count in options.layers)]
    for count, is_alike in cases:
        rows = [measure(count, options.policy, is_alike=is_alike) for _ in range(options.repeats)]
        name = str(count) if is_alike else f"{count}, not alike"
        operators = count_operators(Stack(count, is_alike=is_alike))
        table.add_row(*describe(name, rows, operators))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
