"""Settings of the whole library, read by the public functions only.

>>> import torchremat as tr
>>> tr.config.log_checkpoint_residuals
False
"""

import os
import sys
from types import ModuleType
from typing import Any, Literal

from torchremat.errors import OptionError, nearest_names

__all__ = [
    "host_pool_nbytes",
    "least_offload_nbytes",
    "log_checkpoint_residuals",
    "num_cpu_devices",
    "offload_copies_at_once",
    "offload_prefetch",
    "untraceable",
    "verify_recomputation",
]


def __dir__() -> list[str]:
    return sorted(__all__)


log_checkpoint_residuals: bool = os.environ.get(
    "TORCHREMAT_LOG_CHECKPOINT_RESIDUALS", "0"
).lower() in {"1", "true", "yes", "on"}
"""Log what each differentiated checkpoint saves at WARNING rather than DEBUG."""

num_cpu_devices: int = int(os.environ.get("TORCHREMAT_NUM_CPU_DEVICES", "1"))
"""The number of devices that the CPU counts as, for `devices` and `pmap`. Several show on one
machine what a program does on several accelerators. Set it before the first call of `devices`."""

verify_recomputation: Literal["bitwise"] | None = None
"""`"bitwise"`: compare each value that a backward pass recomputes with that of the forward pass.
`errors.RecomputationError` names the first that differs, with its module and source line. The
values to compare are saved. Off, it costs nothing."""

host_pool_nbytes: int | None = None
"""The most bytes of host memory for values that policies offload; `None`: half of the host's. A
value that finds no room stays on its device, with a warning. On a GPU the memory is pinned, in
blocks of powers of two."""

least_offload_nbytes: int = 64 << 10
"""Bytes below which a plan offloads no value: a copy takes some ten microseconds to begin. A
policy that says `Offloadable` of a value is honoured at any size."""

offload_copies_at_once: int = 2
"""The number of values that may be on their way to the host at one time. Their memory on the device
is freed when their copies are done; if there would be more, operators wait for the oldest. Plans
say themselves when each copy is done."""

offload_prefetch: int = 8
"""The number of operators of the backward pass between the start of a copy from the host and its
first reader; at least 1. More operators hide slower copies, and need more memory. Read when a
backward pass is compiled; plans say themselves when each copy starts."""


untraceable: Literal["modules", "tape", "error"] = "modules"
"""How a checkpoint treats what cannot be one graph, for a branch on values say. `"modules"`:
modules and their methods run on a tape; for other functions the reason is raised, with the user's
line. `"tape"`: every function runs so. `"error"`: none does. On a tape the function runs as it is,
and the backward pass runs its operators again; a budget saves nothing there."""


class _Settings(ModuleType):
    """The module itself, to which nothing but a setting can be assigned."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in __all__ and not name.startswith("__"):
            raise OptionError(
                f"torchremat.config has no setting {name!r}; {nearest_names(name, __all__)}"
            )
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Settings
