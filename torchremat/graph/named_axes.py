"""The named axes in scope: what `vmap(..., axis_name="i")` binds, and collectives reduce over.

While a function runs under `torch.func.vmap`, the level of that is what the name stands for. A
trace sets the levels around it aside (the function that it traces sees one example), so the name
stands there for an axis of known size that nobody can reach yet: a collective over it is written
down as an operator, which is worked out when the graph itself is mapped over the axis.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.errors import AxisNameError

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

    In a rule for `vmap`, which runs below its level, the axis of that level is an axis of tensors.

    Raises:
        NameError: if there is none.
    """
    depth = _torch.transform_depth()
    in_scope = [f for f in _frames.innermost_last if f.level is None or f.level <= depth]
    for frame in reversed(in_scope):
        if frame.name == name:
            return frame
    known = ", ".join(repr(frame.name) for frame in in_scope if frame.name is not None)
    bound = f"the axes in scope are {known}" if known else "no axis has a name here"
    raise AxisNameError(
        f"unbound axis name: {name}. A name is bound by vmap(fun, axis_name={name!r}) around the "
        f"function that uses it; {bound}."
    )


def frame_at(level: int) -> AxisFrame | None:
    """The named axis that this level of `torch.func` maps over."""
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


def out_of_reach() -> AbstractContextManager[None]:
    """A block in which the axes in scope keep their names, and no level can be reached."""
    return _in_scope(tuple(replace(f, level=None) for f in _frames.innermost_last))


def restored(axes: tuple[tuple[AxisName, int], ...]) -> AbstractContextManager[None]:
    """A block with the axes of an earlier trace, inside them those that this trace maps over."""
    outer = tuple(AxisFrame(name, size, None) for name, size in axes)
    reached = tuple(f for f in _frames.innermost_last if f.level is not None)
    return _in_scope((*outer, *reached))


def _bound(frame: AxisFrame) -> AbstractContextManager[None]:
    """A block in which the axis is that of the innermost level, a `vmap`."""
    reached = replace(frame, level=_torch.transform_depth())
    return _in_scope((*_frames.innermost_last, reached))


@cache
def _let_functions_know_axes() -> None:
    _torch.let_functions_know_axes(_with_named_axis)


def _with_named_axis(function: Any) -> Any:
    """`function`, an `autograd.Function` that is about to be mapped, with the name of the axis."""
    frame = frame_at(_torch.transform_depth())
    if frame is None:
        return function
    varies = False

    def forward(*args: Any) -> Any:
        nonlocal varies
        varies = any(isinstance(a, Tensor) and _is_mapped(a) for a in args)
        return function.forward(*args)

    def backward(ctx: Any, *cotangents: Any) -> Any:
        if varies:  # what is one for all examples is the sum of their cotangents: each gets a part
            cotangents = tuple(
                ct / frame.size if isinstance(ct, Tensor) and not _is_mapped(ct) else ct
                for ct in cotangents
            )
        return function.backward(ctx, *cotangents)

    def named(method: Callable[..., Any]) -> Any:
        def call(*args: Any) -> Any:
            with _bound(frame):
                return method(*args)

        return staticmethod(call)

    methods = {"forward": named(forward), "backward": named(backward)}
    methods |= {key: named(getattr(function, key)) for key in ("setup_context", "jvp")}
    return type(function.__name__, (function,), methods)


def _is_mapped(x: Tensor) -> bool:
    return _torch.is_mapped_at(x, _torch.transform_depth())


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
        _let_functions_know_axes()
        with _bound(AxisFrame(name, axis_size, None, spmd_axis_name)):
            return function(*values)

    return _torch.restore_vmap(named, in_dims, axis_size, randomness)


def as_names(axis_name: AxisName | Sequence[AxisName]) -> tuple[AxisName, ...]:
    """One name or several, as several."""
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


# --- operators over an axis in graphs ------------------------------------------------------------


def axis_names_in(module: fx.GraphModule) -> frozenset[AxisName]:
    """The axes that operators in a graph, and in the bodies of its operators, are over."""
    found: set[AxisName] = set()
    for node in module.graph.nodes:
        if getattr(node.target, "is_over_axis", False):
            found.add(node.kwargs["axis_name"])
        elif node.op == "get_attr" and isinstance(
            body := getattr(module, str(node.target), None), fx.GraphModule
        ):
            found |= axis_names_in(body)
    return frozenset(found)


def mapped_over(names: Iterable[AxisName], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
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
        tensors[i] = torch.where(_torch.mapped_at(same, 0, level), tensors[i], tensors[i])
    return tensors
