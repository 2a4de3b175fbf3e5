"""The tensor in `parameter.grad` when an update has consumed the gradient.

`None` would not do. `clip_grad_norm_` skips a parameter without a gradient, and a second backward
pass begins a new one. Both would give other results than the plain loop, without a word. So a
tensor without memory lies there, and an error meets whoever computes with it.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.errors import StepInBackwardError

aten = torch.ops.aten


class SpentGradient(Tensor):
    """A tensor of a gradient's shape that has no values, and takes no memory."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SpentGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        if func is aten.detach.default:
            return spend(args[0])
        _refuse(func)


def spend(parameter: Tensor) -> Tensor:
    """Make the tensor that the gradient of `parameter` leaves behind."""
    return _torch.without_memory(SpentGradient, parameter)


def _refuse(func: Any) -> NoReturn:
    raise StepInBackwardError(
        f"{func} reads a gradient that step_in_backward has consumed: its parameter was updated in "
        "the backward pass. To clip by the global norm, give step_in_backward max_norm=; for "
        "several backward passes a step, accumulate=. Gradients are there no more to be logged, "
        "scaled, or set to zero in place: zero_grad() must set them to None."
    )
