"""The dimensions of a device mesh as named axes, outside of any `vmap` or `pmap`."""

import weakref
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from torchremat import _torch
from torchremat.errors import AxisNameError
from torchremat.tracing.axes.named_axes import AxisFrame, in_scope, register_mesh_axes


def mesh_axes(mesh: DeviceMesh) -> AbstractContextManager[None]:
    """A block in which collectives know the dimensions of `mesh` by their names.

    Each process is one example: `psum(x, "dp")` is the sum over those that differ from this one in
    the dimension `dp` alone. A `with mesh:` of PyTorch does the same. Inside, the names of a `vmap`
    or `pmap` hide those of the mesh.

    Args:
        mesh: a `torch.distributed.device_mesh.DeviceMesh` that this process is part of, whose
            dimensions have names.

    Raises:
        AxisNameError: (a `NameError`) if they have none, or this process is not part of it.

    >>> import torch, torchremat as tr
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> def step(x, mesh):  # each process calls it
    ...     with mesh_axes(mesh):
    ...         return tr.psum(x, ("dp", "tp")) / tr.axis_size("dp")
    """
    if not mesh.mesh_dim_names:
        raise AxisNameError(
            f"the dimensions of {mesh} have no names: init_device_mesh(..., "
            "mesh_dim_names=('dp', 'tp')) names them"
        )
    if mesh.get_coordinate() is None:
        raise AxisNameError(f"this process is not part of {mesh}: only those that are use its axes")
    return in_scope(*_frames_of(mesh))


def _frames_of(mesh: DeviceMesh) -> tuple[AxisFrame, ...]:
    frames = _known.get(mesh)
    if frames is None:
        frames = _known[mesh] = tuple(
            AxisFrame(name, mesh.size(i), None, group=mesh.get_group(i).group_name)
            for i, name in enumerate(mesh.mesh_dim_names or ())
        )
    return frames


_known: weakref.WeakKeyDictionary[Any, tuple[AxisFrame, ...]] = weakref.WeakKeyDictionary()


def _frames_around() -> tuple[AxisFrame, ...]:
    mesh = _torch.current_mesh()
    if mesh is None or not mesh.mesh_dim_names or mesh.get_coordinate() is None:
        return ()
    return _frames_of(mesh)


register_mesh_axes(_frames_around)
