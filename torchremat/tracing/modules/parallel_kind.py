"""Modules that talk to other processes in their hooks or in their forward, as no graph can."""

import sys

from torch import nn

_KINDS = (
    ("torch.distributed.fsdp", "FSDPModule", "is sharded by fully_shard"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "is a FullyShardedDataParallel"),
    ("torch.nn.parallel", "DistributedDataParallel", "is a DistributedDataParallel"),
)


def parallel_kind(module: nn.Module) -> str | None:
    """In which way `module` gathers its parameters, or sums their gradients, over processes."""
    for package, name, said in _KINDS:
        kind = getattr(sys.modules.get(package), name, None)  # of one not imported there is none
        if kind is not None and isinstance(module, kind):
            return said
    return None
