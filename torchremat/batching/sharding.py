"""`with_sharding_constraint`: how a tensor is spread over a device mesh, also under `vmap`.

vmap(f, spmd_axis_name="data")       each example: [Replicate(), Shard(0)] on ("data", "model")
                                     all of them:  [Shard(0), Shard(1)]
"""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchremat.errors import AxisError, NotAvailableError
from torchremat.tracing.axes.named_axes import frame_being_mapped
from torchremat.tracing.tracing import current_tracing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


@cache
def _dtensors() -> Any:
    """`torch.distributed.tensor`, which takes half a second to import."""
    try:
        return importlib.import_module("torch.distributed.tensor")
    except ImportError as error:  # a PyTorch without torch.distributed
        raise NotAvailableError(
            "with_sharding_constraint needs a PyTorch with torch.distributed"
        ) from error


def with_sharding_constraint(
    x: Tensor, mesh: "DeviceMesh", placements: "Sequence[Placement]"
) -> Any:
    """`x` spread over the devices of `mesh` as `placements` say: a `DTensor`.

    Under `vmap(..., spmd_axis_name="data")` it is the tensor of one example: the dimension of the
    examples is spread over the axis `"data"` of the mesh, on which `placements` must say
    `Replicate()`. Its derivative is under the same constraint.

    Args:
        x: a tensor, the same in all processes, or a `DTensor`.
        mesh: a device mesh.
        placements: one for each axis of the mesh.

    Raises:
        AxisError: (a `ValueError`) if there is not one placement for each axis. Also if the mesh
            has no axis `spmd_axis_name`, or the tensor is spread over it already.
        NotAvailableError: inside a trace (a checkpoint, `jit`), and without `torch.distributed`.

    >>> import torch, torch.distributed as dist
    >>> from torch.distributed.tensor import Shard, init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    >>> with_sharding_constraint(torch.zeros(4, 2), mesh, [Shard(0)]).placements
    (Shard(dim=0),)
    >>> dist.destroy_process_group()

    After `jax.lax.with_sharding_constraint`.
    """
    if current_tracing() is not None:
        raise NotAvailableError(
            "with_sharding_constraint cannot be traced: call it outside of checkpoint, jit and "
            "make_graph"
        )
    if len(placements) != mesh.ndim:
        raise AxisError(
            f"with_sharding_constraint needs a placement for each axis of the mesh, which has "
            f"{mesh.ndim} ({mesh.mesh_dim_names}), but {len(placements)} were given"
        )
    return _Constraint.apply(x, mesh, tuple(placements))  # type: ignore[no-untyped-call]


class _Constraint(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, mesh: Any, placements: tuple[Any, ...]) -> Any:
        if isinstance(x, _dtensors().DTensor):
            return x.redistribute(mesh, placements)
        return _dtensors().distribute_tensor(x, mesh, placements)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.layout = inputs[1:]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return _Constraint.apply(cotangent, *ctx.layout), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        return _Constraint.apply(tangent, *ctx.layout)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, mesh: Any, placements: tuple[Any, ...]) -> Any:
        dim = in_dims[0]
        frame = frame_being_mapped()
        names = () if frame is None else _as_names(frame.spmd_axis_name)
        return _Constraint.apply(x, mesh, _add_dim(mesh, placements, dim, names)), dim  # type: ignore[no-untyped-call]


def spread_examples(x: Any, dim: int, spmd_axis_name: Any) -> Any:
    """Spread `dim` of a `DTensor` over the named axes of its mesh; leave other values."""
    if not isinstance(x, _dtensors().DTensor):
        return x
    shard = _dtensors().Shard
    placements = list(x.placements)
    for name in _as_names(spmd_axis_name):
        axis = _axis_of(x.device_mesh, name)
        if placements[axis] == shard(dim):
            continue
        _refuse_used(placements[axis], name)
        placements[axis] = shard(dim)
    return x.redistribute(x.device_mesh, placements)


def _add_dim(mesh: Any, placements: Sequence[Any], dim: int, names: Sequence[Any]) -> Any:
    """The placements of all examples, whose dimension is `dim`, from those of one."""
    shard = _dtensors().Shard
    moved = [
        shard(p.dim + (p.dim >= dim)) if isinstance(p, shard) and p.dim >= 0 else p
        for p in placements
    ]
    for name in names:
        axis = _axis_of(mesh, name)
        _refuse_used(placements[axis], name)
        moved[axis] = shard(dim)
    return tuple(moved)


def _axis_of(mesh: Any, name: Any) -> int:
    names = mesh.mesh_dim_names or ()
    if name not in names:
        raise AxisError(
            f"spmd_axis_name={name!r} is not an axis of the mesh, whose axes are {names}"
        )
    return names.index(name)


def _refuse_used(placement: Any, name: Any) -> None:
    if placement != _dtensors().Replicate():
        raise AxisError(
            f"spmd_axis_name={name!r} spreads the examples over that axis of the mesh, but the "
            f"tensor of one example is spread over it already: {placement}. Say Replicate() there."
        )


def _as_names(name: Any) -> tuple[Any, ...]:
    if name is None:
        return ()
    return tuple(name) if isinstance(name, tuple | list) else (name,)
