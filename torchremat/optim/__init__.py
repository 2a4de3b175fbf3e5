"""Updates of parameters inside the backward pass, so that gradients are not all alive at once.

Begin with `step_in_backward.py`, which users call: each parameter is updated as soon as its
gradient is there. `per_parameter.py` updates one parameter, and tries whether an optimizer can do
that. `spent_gradient.py` has the tensor that lies in `parameter.grad` afterwards. A plan with
`optimizer=` counts on such updates where a budget needs them.
"""

from torchremat.optim.step_in_backward import StepInBackward, step_in_backward

__all__ = ["StepInBackward", "step_in_backward"]


def __dir__() -> list[str]:
    return sorted(__all__)
