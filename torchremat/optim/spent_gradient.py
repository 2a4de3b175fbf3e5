"""The tensor in `parameter.grad` when an update has consumed the gradient.

`None` would not do. `clip_grad_norm_` skips a parameter without a gradient, and a second backward
pass begins a new one. Both would give other results than the plain loop, without a word. So a
tensor without memory lies there, and an error meets whoever computes with it.

It may know its norm, which trainers log. Then `clip_grad_norm_` works while it would clip nothing.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.source import warn_user
from torchremat.errors import StepInBackwardError, StepInBackwardWarning

aten = torch.ops.aten


class SpentGradient(Tensor):
    """A tensor of a gradient's shape that has no values, perhaps a norm, and takes no memory."""

    norm_of_gradient: Tensor | None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SpentGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0]
        if func is aten.detach.default:
            return spend(first, first.norm_of_gradient)
        if func is aten.linalg_vector_norm.default and not args[2:] and not kwargs:
            norm = first.norm_of_gradient
            if args[1:] in ((), (2,)) and norm is not None:
                return norm.clone()
        if func is aten.mul_.Tensor and isinstance(first, SpentGradient) and args[1] == 1:
            warn_user(_SCALED_BY_ONE, StepInBackwardWarning)
            return first
        _refuse(func)


def spend(parameter: Tensor, norm: Tensor | None) -> Tensor:
    """Make the tensor that the gradient of `parameter`, which had this norm, leaves behind."""
    spent: SpentGradient = _torch.without_memory(SpentGradient, parameter)  # type: ignore[assignment]
    spent.norm_of_gradient = norm
    return spent


_SCALED_BY_ONE = (
    "gradients were scaled by 1 after step_in_backward had consumed them, as clip_grad_norm_ does "
    "while their norm is below its limit. That changes nothing, but a norm above the limit will be "
    "an error: give the limit to step_in_backward (max_norm=), or clip no more"
)


def _refuse(func: Any) -> NoReturn:
    raise StepInBackwardError(
        f"{func} reads a gradient that step_in_backward has consumed: its parameter was updated in "
        "the backward pass. To clip by the global norm, give step_in_backward max_norm=; for "
        "several backward passes a step, accumulate=; to log norms, norms=True. It cannot "
        "be scaled, or set to zero in place: zero_grad() must set it to None"
    )
