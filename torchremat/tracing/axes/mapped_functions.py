"""Functions mapped over an axis that has a name while they run, `autograd.Function`s among them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchremat import _torch
from torchremat.tracing.axes.named_axes import AxisFrame, AxisName, bind_at_innermost, frame_at


def _with_named_axis(function: Any) -> Any:
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

    def call_with_axis(method: Callable[..., Any]) -> Any:
        def call(*args: Any) -> Any:
            with bind_at_innermost(frame):
                return method(*args)

        return staticmethod(call)

    methods = {"forward": call_with_axis(forward), "backward": call_with_axis(backward)}
    methods |= {key: call_with_axis(getattr(function, key)) for key in ("setup_context", "jvp")}
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

    def call_with_axis(*values: Any) -> Any:
        if name is None and spmd_axis_name is None:
            return function(*values)
        _torch.let_functions_know_axes(_with_named_axis)
        with bind_at_innermost(AxisFrame(name, axis_size, None, spmd_axis_name)):
            return function(*values)

    return _torch.restore_vmap(call_with_axis, in_dims, axis_size, randomness)
