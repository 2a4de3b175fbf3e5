#!/usr/bin/env python
"""DistributedDataParallel over a slow network: a model wrapped as a whole beside wrapped layers.

One process trains. A hook in place of the sum over processes ends each bucket a while after it was
given the one before: a network that sends one bucket after another, with a time for each byte. The
time for all buckets is that of the plain backward pass. If buckets begin early, sending costs
little; if they begin at the end of the backward pass, a step takes that much longer.

    python scripts/bench_overlap.py
    python scripts/bench_overlap.py --layers 16 --width 256 --steps 20

It prints the seconds of a step and its ratio to that of the layers wrapped, and exits with status 1
if the model wrapped as a whole takes more than 1.05 of it.
"""

import argparse
import copy
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchremat as tr

MOST = 1.05
"""The ratio to wrapped layers that a whole model may have."""
BUCKETS = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class SlowNetwork:
    """Ends each bucket after the ones before it, and then a time for its bytes."""

    def __init__(self, seconds_per_byte: float) -> None:
        self.seconds_per_byte = seconds_per_byte
        self.is_free_at = 0.0

    def send(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradients: Tensor = bucket.buffer()
        begin = max(time.perf_counter(), self.is_free_at)
        self.is_free_at = begin + gradients.nbytes * self.seconds_per_byte
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        delay = self.is_free_at - time.perf_counter()
        threading.Timer(delay, future.set_result, (gradients,)).start()
        return future


def measure(step: Callable[[], None], count: int) -> float:
    for _ in range(4):  # traces, and DDP's second arrangement of its buckets
        step()
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block(options.width) for _ in range(options.layers)))
    x = torch.randn(2, options.length, options.width)
    nbytes = sum(p.nbytes for p in plain.parameters())

    def step_of(model: nn.Module) -> Callable[[], None]:
        return lambda: model(x).square().mean().backward()

    alone = measure(step_of(copy.deepcopy(plain)), options.steps) * 2 / 3
    print(f"{nbytes / 2**20:.1f} MiB of gradients, {alone * 1e3:.0f} ms to send them")
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        wrapped = {
            "plain": copy.deepcopy(plain),
            "layers": tr.nn.wrap(copy.deepcopy(plain), "full", select="*"),
            "whole": tr.nn.wrap(copy.deepcopy(plain), "full"),
            "whole, budget:60%": tr.nn.wrap(copy.deepcopy(plain), "budget:60%"),
        }
        seconds = {}
        for name, model in wrapped.items():
            bucket_mb = nbytes / 2**20 / BUCKETS
            parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
            network = SlowNetwork(alone / nbytes)
            parallel.register_comm_hook(None, network.send)
            seconds[name] = measure(step_of(parallel), options.steps)
        dist.destroy_process_group()
    for name, found in seconds.items():
        print(f"{name:20} {found * 1e3:8.1f} ms {found / seconds['layers']:6.2f} of layers")
    return int(seconds["whole"] > MOST * seconds["layers"])


if __name__ == "__main__":
    sys.exit(main())
