"""FSDP2 with one budget of memory for the whole step: each layer is sharded, and has a share.

    torchrun --nproc-per-node 2 examples/18_fsdp_budget.py
    python examples/18_fsdp_budget.py --budget 45%        # starts two processes itself

The budget is split on the meta device, before anything is sharded or has memory. Each process then
wraps the layers, shards them, and trains, once with the shares and once without. The losses are the
same to the bit, and fewer bytes are alive at the peak. Process 0 prints both.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchremat as tr
from torchremat.measure import LiveBytes

WIDTH, TOKENS = 64, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def sharded(split: tr.nn.BudgetSplit | None) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    if split is not None:
        tr.nn.wrap(model, split)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, steps: int) -> tuple[list[float], int, int]:
    """The losses; for the last step, the bytes saved between its passes, and the peak."""
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(TOKENS, WIDTH, generator=generator)
        with LiveBytes() as memory:
            loss = model(x)
            held = memory.live
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, held, memory.peak


def run(budget: str, steps: int) -> None:
    with torch.device("meta"):
        whole, x = Model(), torch.empty(TOKENS, WIDTH)
    split = tr.nn.split_budget(whole, x, budget=budget, select="layers.*")
    plain, shared = train(sharded(None), steps), train(sharded(split), steps)
    if dist.get_rank() == 0:
        print(split)
        for name, (losses, held, peak) in (("without", plain), ("with", shared)):
            print(
                f"{name} the budget: loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
                f"{held / 2**10:.0f} KiB held, peak {peak / 2**10:.0f} KiB"
            )
        print(f"losses are bit-equal: {plain[0] == shared[0]}")


def start(rank: int, store: str, budget: str, steps: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    run(budget, steps)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", default="60%", help="'2GiB', or '60%%' of the peak without")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        run(options.budget, options.steps)
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", options.budget, options.steps)
        torch.multiprocessing.spawn(start, arguments, nprocs=2)


if __name__ == "__main__":
    main()
