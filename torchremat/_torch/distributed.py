"""Process groups, their store, and the device mesh in scope."""

from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import device_mesh

if distributed.is_available():
    from torch.distributed import distributed_c10d


process_collectives = torch.ops._c10d_functional
"""Collectives of processes that take the name of their group; `wait_tensor` gives the result."""


def group_named(name: str) -> Any:
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,attr-defined]


def store_of_processes() -> Any:
    return distributed_c10d._get_default_store()


def timeout_of_processes() -> timedelta:
    group: Any = distributed.group.WORLD
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    found = getattr(options, "_timeout", None)
    return distributed_c10d.default_pg_timeout if found is None else found


def current_mesh() -> Any:
    resources = getattr(device_mesh, "_mesh_resources", None)  # none without torch.distributed
    return resources.mesh_stack[-1] if resources is not None and resources.mesh_stack else None
