"""The places of values in autograd's graph, which a second derivative must reach."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.tracing.input_spec import InputSpec


class Edges:
    """The places of tensors in autograd's graph, without their data.

    A leaf, such as a parameter, lives anyway and is saved itself. A node of autograd's graph leads
    to the others; hooks empty the tensors that it saves. The node lives with its output.
    """

    __slots__ = ("_leaves", "_output")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._leaves = [t if t.is_leaf else None for t in tensors]
        inner = [t for t in tensors if not t.is_leaf]
        self._output: Any = None
        if inner:
            hooks = torch.autograd.graph.saved_tensors_hooks(_forget, _stand_in)
            with torch.enable_grad(), _torch.set_saved_tensors_hooks_aside(), hooks:
                self._output = _EdgeHolder.apply(*inner)  # type: ignore[no-untyped-call]

    def tensors(self) -> list[Tensor]:
        """Tensors at these places; only leaves have the values that they had."""
        inner = iter(self._output.grad_fn.saved_tensors if self._output is not None else ())
        return [next(inner) if leaf is None else leaf for leaf in self._leaves]


class _EdgeHolder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("nothing flows through a node that only leads to others")


def _forget(tensor: Tensor) -> InputSpec:
    # not of tensor.detach(): autograd passes a tensor of its own, which a trace would take for one
    # that the traced function closes over
    return InputSpec.of(tensor)


def _stand_in(spec: InputSpec) -> Tensor:
    return torch.empty((), dtype=spec.dtype, device=spec.device).expand(spec.shape)
