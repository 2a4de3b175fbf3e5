"""The gradient of a tile for the cotangent that there is, in the memory of that for 1.

    dw1 = tiled_p(...)[2]             kept from the forward pass
    dw = scale_gradient(dw1, ct)      dw1 * ct, where dw1 was

A gradient of a weight is as large as the weight, and would be there twice. Nobody reads `dw1` after
a backward pass that frees what it read. With `retain_graph=True` the result has memory of its own.
"""

import torch
from torch import Tensor

from torchremat import _torch

_library = torch.library.Library("torchremat", "FRAGMENT")


def _scale(unit: Tensor, cotangent: Tensor) -> Tensor:
    if _torch.keeps_graph_after_backward():
        return torch.mul(unit, cotangent)
    # so autograd raises, if a backward pass that was interrupted here is begun again
    torch.autograd.graph.increment_version(unit)
    # an alias: autograd takes over a gradient that nobody else holds, and copies others
    return unit.mul_(cotangent).detach()


def _run_autograd(unit: Tensor, cotangent: Tensor) -> Tensor:
    is_recorded = unit.requires_grad or cotangent.requires_grad
    if (is_recorded and torch.is_grad_enabled()) or _torch.in_dual_level():
        return torch.mul(unit, cotangent)
    with _torch.below_autograd():
        result: Tensor = scale_gradient(unit, cotangent)
    return result


def _multiply(unit: Tensor, cotangent: Tensor) -> Tensor:
    return torch.mul(unit, cotangent)


_library.define("scale_gradient(Tensor(a) unit, Tensor cotangent) -> Tensor(a)")
_library.impl("scale_gradient", _scale, "CompositeExplicitAutograd")
_library.impl("scale_gradient", _multiply, "FuncTorchBatched")
_library.impl("scale_gradient", lambda unit, cotangent: unit.detach(), "Meta")
_library.impl("scale_gradient", _run_autograd, "Autograd")
scale_gradient = torch.ops.torchremat.scale_gradient.default
