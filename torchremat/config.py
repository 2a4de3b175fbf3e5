"""Settings of the whole library, read by the public functions only.

>>> import torchremat as tr
>>> tr.config.log_checkpoint_residuals
False
"""

import os
from typing import Literal

__all__ = [
    "host_pool_nbytes",
    "least_offload_nbytes",
    "log_checkpoint_residuals",
    "num_cpu_devices",
    "offload_copies_at_once",
    "offload_prefetch",
    "verify_recomputation",
]


def __dir__() -> list[str]:
    return sorted(__all__)


log_checkpoint_residuals: bool = os.environ.get(
    "TORCHREMAT_LOG_CHECKPOINT_RESIDUALS", "0"
).lower() in {"1", "true", "yes", "on"}
"""Log what each differentiated checkpoint saves at WARNING rather than DEBUG."""

num_cpu_devices: int = int(os.environ.get("TORCHREMAT_NUM_CPU_DEVICES", "1"))
"""How many devices the CPU counts as, for `devices` and `pmap`: several show on one machine what a
program does on several accelerators. Set it before devices are first asked for."""

verify_recomputation: Literal["bitwise"] | None = None
"""`"bitwise"`: compare each value that a backward pass computes again with what it was, and raise
`errors.RecomputationError` at the first that differs, with its module and source line. It keeps
what it compares. Off, it costs nothing."""

host_pool_nbytes: int | None = None
"""The most bytes of host memory that hold what policies offload; `None`: half of the host's. What
finds no room stays on its device, with a warning. On a GPU they are pinned, in blocks of powers of
two."""

least_offload_nbytes: int = 64 << 10
"""Bytes below which a policy's `Offloadable` value stays on its device: a copy takes some ten
microseconds to begin. Read when a function is traced."""

offload_copies_at_once: int = 2
"""How many values may be on their way to the host at one time. Their memory on the device is held
until their copies are done; operators that follow wait for the oldest if there would be more. Plans
say themselves when each is done."""

offload_prefetch: int = 8
"""How many operators of the backward pass run between when an offloaded value begins to come back
and when it is read; at least 1. More hides slower copies, and holds more. Read when a backward
pass is compiled; plans say themselves when."""
