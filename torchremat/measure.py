"""Counts of bytes: alive at each moment, before a step, saved by autograd or on the host.

>>> import torch
>>> model, x = torch.nn.Linear(256, 256), torch.ones(16, 256)
>>> with LiveBytes() as memory:
...     with HeldBytes(model, x) as held:
...         loss = model(x).exp().sum()
...     loss.backward()
>>> held.total, memory.peak  # the exp; its gradient and those of the parameters
(16384, 279560)
"""

from torchremat.planning.memory.resident_bytes import resident_bytes
from torchremat.remat.offload.host_pool import HostStats
from torchremat.remat.offload.host_pool import reset_counts as reset_host_counts
from torchremat.remat.offload.host_pool import stats as host_stats
from torchremat.report.live_bytes import HeldBytes, HeldTensor, LiveBytes

__all__ = [
    "HeldBytes",
    "HeldTensor",
    "HostStats",
    "LiveBytes",
    "host_stats",
    "reset_host_counts",
    "resident_bytes",
]


def __dir__() -> list[str]:
    return sorted(__all__)
