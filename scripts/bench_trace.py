"""The cost of the first step, in which layers are traced, for stacks of alike layers.

Layers of a Llama, of tiny sizes, are each under a checkpoint. Those that are alike share one trace,
so the first step should grow little with their number. Seconds are of this thread's processor. The
first row is a stack that nothing is shared in, since each layer reads a number of its own.

    python scripts/bench_trace.py
    python scripts/bench_trace.py --layers 2 32 --policy dots --repeats 5
"""

import argparse
import gc
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import torchremat as tr

WIDTH = 32


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


def time_step(model: nn.Module) -> float:
    x = torch.ones(2, 16, WIDTH, requires_grad=True)
    start = time.thread_time()
    model(x).sum().backward()
    return time.thread_time() - start


def measure(count: int, policy: str, *, is_alike: bool) -> tuple[float, float, int]:
    """Seconds of the first step and of the best later one, and how many traces were made."""
    gc.collect()  # alike layers of the model before would serve this one
    model = tr.nn.wrap(Stack(count, is_alike=is_alike), policy, select="layers.*")
    first = time_step(model)
    steady = min(time_step(model) for _ in range(20))
    return first, steady, tr.nn.report(model).traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 16])
    parser.add_argument("--policy", default="full")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure(1, options.policy, is_alike=True)  # what PyTorch does once in a process
    table = Table("layers", "first step, s", "later steps, ms", "traces", title="tracing a stack")
    cases = [(options.layers[0], False), *((count, True) for count in options.layers)]
    for count, is_alike in cases:
        rows = [measure(count, options.policy, is_alike=is_alike) for _ in range(options.repeats)]
        first, steady, traces = min(rows)
        name = str(count) if is_alike else f"{count}, not alike"
        table.add_row(name, f"{first:.3f}", f"{1e3 * steady:.2f}", str(traces))
    Console().print(table)


if __name__ == "__main__":
    main()
