"""The named axes in scope: what `vmap(..., axis_name="i")` binds, and collectives reduce over.

While a function runs under `torch.func.vmap`, the level of that is what the name stands for. A
trace sets the levels around it aside (the function that it traces sees one example), so the name
stands there for an axis of known size that nobody can reach yet: a collective over it is written
down as an operator, which is worked out when the graph itself is mapped over the axis.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torchremat import _torch

AxisName = Any
"""What a user calls an axis: any hashable value that is no tuple, mostly a string."""


@dataclass(frozen=True, slots=True)
class AxisFrame:
    """One named axis; `level` is that of `torch.func` that maps over it, if it can be reached."""

    name: AxisName
    size: int
    level: int | None
    spmd_axis_name: Any = None
    """The axis of a device mesh that the examples are spread over, or several."""


class _Frames(threading.local):
    def __init__(self) -> None:
        self.innermost_last: tuple[AxisFrame, ...] = ()


_frames = _Frames()


def axis_environment() -> tuple[tuple[AxisName, int], ...]:
    """Names and sizes of the axes in scope, outermost first: what a trace depends on."""
    frames = _frames.innermost_last
    return tuple((frame.name, frame.size) for frame in frames if frame.name is not None)


def axis_frame(name: AxisName) -> AxisFrame:
    """The innermost axis of that name.

    Raises:
        NameError: if there is none.
    """
    for frame in reversed(_frames.innermost_last):
        if frame.name == name:
            return frame
    known = ", ".join(repr(n) for n, _ in axis_environment())
    bound = f"the axes in scope are {known}" if known else "no axis has a name here"
    raise NameError(
        f"unbound axis name: {name}. A name is bound by vmap(fun, axis_name={name!r}) around the "
        f"function that uses it; {bound}."
    )


def frame_at(level: int) -> AxisFrame | None:
    """The named axis that this level of `torch.func` maps over."""
    return next((f for f in _frames.innermost_last if f.level == level), None)


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


def out_of_reach() -> AbstractContextManager[None]:
    """A block in which the axes in scope keep their names, and no level can be reached."""
    return _in_scope(tuple(replace(f, level=None) for f in _frames.innermost_last))


def restored(axes: tuple[tuple[AxisName, int], ...]) -> AbstractContextManager[None]:
    """A block with the axes of an earlier trace, inside them those that this trace maps over."""
    outer = tuple(AxisFrame(name, size, None) for name, size in axes)
    reached = tuple(f for f in _frames.innermost_last if f.level is not None)
    return _in_scope((*outer, *reached))


def run_mapped(
    function: Callable[..., Any],
    in_dims: tuple[int | None, ...],
    axis_size: int,
    randomness: str,
    name: AxisName = None,
    spmd_axis_name: Any = None,
) -> Callable[..., tuple[Any, Any]]:
    """Map `function` over an axis, called `name` while it runs.

    What is returned takes the tensors, and gives the outputs and where the axis is in each.
    """

    def named(*values: Any) -> Any:
        if name is None and spmd_axis_name is None:
            return function(*values)
        frame = AxisFrame(name, axis_size, _torch.transform_depth(), spmd_axis_name)
        with _in_scope((*_frames.innermost_last, frame)):
            return function(*values)

    return _torch.restore_vmap(named, in_dims, axis_size, randomness)


def as_names(axis_name: AxisName | Sequence[AxisName]) -> tuple[AxisName, ...]:
    """One name or several, as several."""
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
