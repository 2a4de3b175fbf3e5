"""Two processes train one model with checkpoints in it, under `DistributedDataParallel`.

    python examples/07_distributed.py

Each has half of a batch; their gradients are those of one process with the whole batch.
"""

import tempfile

import torch
import torch.distributed as dist

# Before a group exists: its default arguments would keep the group, whose threads then run while
# the process ends, and may abort it.
import torch.distributed.nn.functional
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchremat as tr


def make() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    return nn.Sequential(*blocks), torch.randn(8, 16)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def train(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, batch = make()
    tr.nn.wrap(model, "full", select="*")
    found = gradients(DistributedDataParallel(model), batch.chunk(2)[rank])
    if rank == 0:
        error = max(
            (a - b).abs().max().item() for a, b in zip(found, gradients(*make()), strict=True)
        )
        print(f"{tr.process_count()} processes; gradients differ by at most {error:.1e}")
        print(tr.nn.report(model).by_decision())
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (f"{folder}/store",), nprocs=2)


if __name__ == "__main__":
    main()
