"""Batch normalisation of cuDNN and MIOpen that gives the new running statistics as results.

PyTorch's operators write them to their arguments, which their schemas do not say. Run again in the
backward pass, they would update the statistics twice. Those here update copies, in training.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch

aten = torch.ops.aten

# `custom_op` would compare the memory of all results and arguments at each call.
_LIBRARY = torch.library.Library("torchremat", "FRAGMENT")

_ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? bias, Tensor running_mean, Tensor running_var, "
    "bool training, float momentum, float epsilon"
)


@dataclass(frozen=True)
class _Kernel:
    """PyTorch's operator, its derivative, and how many results it has."""

    forward: _torch.OpOverload
    backward: _torch.OpOverload
    num_results: int

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        *options: Any,
    ) -> Any:
        statistics = mean.clone(), var.clone()
        return (*self.forward(x, weight, bias, *statistics, *options), *statistics)

    def make_fakes(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, var: Tensor, *_: Any
    ) -> Any:
        statistics = [torch.empty_like(t) for t in (mean, var)]
        saved = [weight.new_empty((x.shape[1],)) for _ in range(2)]
        reserve = [x.new_empty((0,), dtype=torch.uint8)] * (self.num_results - len(saved) - 1)
        return (torch.empty_like(x), *saved, *reserve, *statistics)

    def save(self, ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, mean, var, _, _, ctx.eps = inputs
        ctx.save_for_backward(x, weight, mean, var, *output[1 : self.num_results])
        ctx.set_materialize_grads(False)

    def differentiate(self, ctx: Any, cotangent: Tensor | None, *_: Any) -> Any:
        if cotangent is None:
            return (None,) * 8
        x, weight, mean, var, *saved = ctx.saved_tensors
        reserve = saved[2:]
        grads = self.backward(x, cotangent, weight, mean, var, *saved[:2], ctx.eps, *reserve)
        return (*grads, *(None,) * 5)


_KERNELS = (
    _Kernel(aten.cudnn_batch_norm.default, aten.cudnn_batch_norm_backward.default, 4),
    _Kernel(aten.miopen_batch_norm.default, aten.miopen_batch_norm_backward.default, 3),
)


def _define(kernel: _Kernel) -> _torch.OpOverload:
    name = f"functional_{kernel.forward.name().removeprefix('aten::')}"
    results = ", ".join(["Tensor"] * (kernel.num_results + 2))
    _LIBRARY.define(f"{name}({_ARGUMENTS}) -> ({results})")
    _LIBRARY.impl(name, kernel.run, "CompositeExplicitAutograd")
    qualified = f"torchremat::{name}"
    torch.library.register_fake(qualified, kernel.make_fakes, lib=_LIBRARY)
    torch.library.register_autograd(
        qualified, kernel.differentiate, setup_context=kernel.save, lib=_LIBRARY
    )
    overload: _torch.OpOverload = getattr(torch.ops.torchremat, name).default
    return overload


_FUNCTIONAL: Mapping[object, tuple[_torch.OpOverload, int]] = MappingProxyType(
    {
        aten.native_batch_norm.default: (aten._native_batch_norm_legit_functional.default, 3),
        **{kernel.forward: (_define(kernel), kernel.num_results) for kernel in _KERNELS},
    }
)
# By operator: the one that gives the statistics too, and the place of the first of them.


def find_functional(node: fx.Node) -> tuple[_torch.OpOverload, int] | None:
    """The operator for one that hides a write to statistics, with the place where they begin."""
    found = _FUNCTIONAL.get(node.target)
    if found is None:
        return None
    mean, training = node.args[3], node.args[5]
    return found if training and mean is not None else None
