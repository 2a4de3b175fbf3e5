"""The named axes in scope: what `vmap(..., axis_name="i")` binds, and collectives reduce over.

While a function runs under `torch.func.vmap`, the level of that is what the name stands for. A
trace sets the levels around it aside, since the function that it traces sees one example. There the
name stands for an axis of known size that nobody can reach yet. A collective over it is recorded as
an operator, which is computed when the graph itself is mapped over the axis.

An axis may also be one of processes: those of a group of `torch.distributed`, each an example. Then
the operator names the group, and can be computed wherever it runs: in a trace's graph, and in a
backward pass that runs when the axis is no longer in scope.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, fx

from torchremat import _torch
from torchremat.core.upper_rooms import load_rooms
from torchremat.errors import AxisNameError

AxisName = Any
"""The name that a user gives an axis: any hashable value that is not a tuple, mostly a string."""


@dataclass(frozen=True, slots=True)
class AxisFrame:
    """One named axis; `level` is that of `torch.func` that maps over it, if it can be reached."""

    name: AxisName
    size: int
    level: int | None
    spmd_axis_name: Any = None
    """The axis of a device mesh that the examples are spread over, or several."""
    group: str | None = None
    """The name of the group of processes that are the examples, if they are processes."""
    parts: tuple[AxisName, ...] = ()
    """The axes that it is made of, the last varying fastest: processes, and devices of each."""
    num_devices: int = 0
    """Over how many devices of this process a `pmap` spreads it."""


class _Frames(threading.local):
    def __init__(self) -> None:
        self.innermost_last: tuple[AxisFrame, ...] = ()


_frames = _Frames()


_has_processes = distributed.is_available()


class _Mesh:
    find_axes: Callable[[], tuple[AxisFrame, ...]] | None = None


def register_mesh_axes(find_axes: Callable[[], tuple[AxisFrame, ...]]) -> None:
    """Let `find_axes` return the axes of PyTorch's device mesh, which are around all others."""
    _Mesh.find_axes = find_axes


def axes_in_scope() -> tuple[AxisFrame, ...]:
    """The axes in scope, outermost first."""
    frames = _frames.innermost_last
    # each steady call of a checkpoint comes here, and one process alone has no mesh
    if _has_processes and distributed.is_initialized():
        load_rooms("mesh axes")
        assert _Mesh.find_axes is not None
        names = {frame.name for frame in frames}
        around = (frame for frame in _Mesh.find_axes() if frame.name not in names)
        frames = (*around, *frames)
    return frames


def axis_environment() -> tuple[AxisFrame, ...]:
    """The axes in scope, outermost first, without levels: what a trace depends on."""
    frames = axes_in_scope()
    return tuple(
        replace(f, level=None) for f in frames if f.name is not None or f.num_devices
    ) if frames else ()  # fmt: skip


def axis_frame(name: AxisName) -> AxisFrame:
    """The innermost axis of that name.

    In a rule for `vmap`, which runs below its level, the axis of that level is an axis of tensors.

    Raises:
        NameError: if there is none.
    """
    depth = _torch.transform_depth()
    in_scope = [f for f in axes_in_scope() if f.level is None or f.level <= depth]
    for frame in reversed(in_scope):
        if frame.name == name:
            return frame
    names = dict.fromkeys(frame.name for frame in in_scope if frame.name is not None)
    known = ", ".join(map(repr, names))
    bound = f"the axes in scope are {known}" if known else "no axis has a name here"
    raise AxisNameError(
        f"unbound axis name: {name}. Bind the name by vmap(fun, axis_name={name!r}) or pmap around "
        f"the function that uses it, or by a device mesh in scope (mesh_axes); {bound}."
    )


def group_of(name: AxisName) -> str | None:
    if name is None or not (frames := axes_in_scope()):
        return None
    depth = _torch.transform_depth()
    for frame in reversed(frames):
        if frame.name == name and (frame.level is None or frame.level <= depth):
            return frame.group
    return None


def parts_of(name: AxisName) -> tuple[AxisName, ...]:
    """The axes that the axis of that name is made of: mostly itself."""
    return axis_frame(name).parts or (name,)


def frame_at(level: int) -> AxisFrame | None:
    return next((f for f in reversed(_frames.innermost_last) if f.level == level), None)


def frame_being_mapped() -> AxisFrame | None:
    """In a rule for `vmap`, which runs below its level: the named axis of that level."""
    return frame_at(_torch.transform_depth() + 1)


@contextmanager
def _in_scope(frames: tuple[AxisFrame, ...]) -> Iterator[None]:
    before, _frames.innermost_last = _frames.innermost_last, frames
    try:
        yield
    finally:
        _frames.innermost_last = before


def in_scope(*frames: AxisFrame) -> AbstractContextManager[None]:
    return _in_scope((*_frames.innermost_last, *frames))


def out_of_reach() -> AbstractContextManager[None]:
    """A block in which the axes in scope keep their names, and no level can be reached."""
    return _in_scope(tuple(replace(f, level=None) for f in _frames.innermost_last))


def restore_axes(axes: tuple[AxisFrame, ...]) -> AbstractContextManager[None]:
    """A block with the axes of an earlier trace, inside them those that this trace maps over."""
    reached = tuple(f for f in _frames.innermost_last if f.level is not None)
    return _in_scope((*axes, *reached))


def bind_at_innermost(frame: AxisFrame) -> AbstractContextManager[None]:
    reached = replace(frame, level=_torch.transform_depth())
    return _in_scope((*_frames.innermost_last, reached))


def as_names(axis_name: AxisName | Sequence[AxisName]) -> tuple[AxisName, ...]:
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def axis_names_in(module: fx.GraphModule) -> frozenset[AxisName]:
    """The axes that operators in a graph, and in the bodies of its operators, are over.

    Without those of processes, which need no level to be computed.
    """
    found: set[AxisName] = set()
    for node in module.graph.nodes:
        if getattr(node.target, "is_over_axis", False):
            if "group" not in node.kwargs:
                found.add(node.kwargs["axis_name"])
        elif node.op == "get_attr" and isinstance(
            body := getattr(module, str(node.target), None), fx.GraphModule
        ):
            found |= axis_names_in(body)
    return frozenset(found)


def map_over(names: Iterable[AxisName], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """`tensors`, of which for each axis that can be reached one at least varies along it.

    `torch.vmap` leaves out a function none of whose arguments varies, and with it the operators
    over the axis in it. One of the tensors, the smallest, is repeated along the axis then.
    """
    tensors = list(tensors)
    for name in names:
        level = axis_frame(name).level
        if not tensors or level is None or any(_torch.is_mapped_at(t, level) for t in tensors):
            continue
        i = min(range(len(tensors)), key=lambda i: tensors[i].numel())
        same = torch.zeros(axis_frame(name).size, dtype=torch.bool, device=tensors[i].device)
        tensors[i] = torch.where(_torch.add_batch_dim(same, 0, level), tensors[i], tensors[i])
    return tensors
