"""Tensors that are sharded over processes: a graph computes with the shard of this process.

A `DTensor` among the inputs of a trace is unwrapped where the graph is called, and wrapped again
inside the trace. So the graph has the operators of one process, and the collectives between them.
A policy decides on these as on all others.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True)
class Sharding:
    """How a tensor is spread over a mesh: `shape` and `stride` are those of the whole."""

    mesh: "DeviceMesh"
    placements: "tuple[Placement, ...]"
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Sharding | None":
        if not is_sharded(tensor):
            return None
        spread: DTensor = tensor  # type: ignore[assignment]
        return cls(spread.device_mesh, tuple(spread.placements), spread.shape, spread.stride())

    def wrap(self, local: Tensor) -> Tensor:
        whole: Tensor = _dtensor().from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return whole


class CotangentPlacements:
    """How the cotangents of the inputs of a trace are spread, by the number of the input.

    The trace finds it out, and calls of the graph go by it.
    """

    def __init__(self) -> None:
        self.found: dict[int, tuple[Placement, ...]] = {}


def is_sharded(tensor: object) -> bool:
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def _dtensor() -> Any:
    """The class, unless nothing has imported it yet, so that there are no tensors of it."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def local_part(tensor: Tensor) -> Tensor:
    """The shard of a `DTensor` in this process, differentiably; any other tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_tensor(tensor: Tensor) -> Tensor:
    """The tensor that a `DTensor` holds; any other is itself. No operator runs."""
    if not is_sharded(tensor):
        return tensor
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    part: Tensor = getattr(tensor, names[0])  # the mesh may come after it
    return part


def unwrap_inputs(tensors: Sequence[Tensor], placements: CotangentPlacements) -> list[Tensor]:
    return [
        _Unwrap.apply(tensor, placements, number) if is_sharded(tensor) else tensor  # type: ignore[no-untyped-call]
        for number, tensor in enumerate(tensors)
    ]


def wrap_local(
    local: Tensor, sharding: Sharding | None, number: int, placements: CotangentPlacements
) -> Tensor:
    """The tensor that stands in a trace for an input; how its cotangent is spread is noted."""
    if sharding is None:
        return local
    return _Wrap.apply(local, sharding, placements, number)  # type: ignore[no-untyped-call,no-any-return]


# PyTorch's own `to_local` and `from_local` sum a cotangent that is spread as summands (`Partial`)
# at once, which plain autograd leaves to whoever reads it.


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, placements: CotangentPlacements, number: int) -> Tensor:
        ctx.sharding, ctx.placements, ctx.number = Sharding.of(whole), placements, number
        return local_part(whole)

    @staticmethod
    def backward(ctx: Any, local: Tensor) -> tuple[Tensor, None, None]:
        own = ctx.sharding
        spread = Sharding(own.mesh, ctx.placements.found[ctx.number], own.shape, own.stride)
        return spread.wrap(local), None, None


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, sharding: Sharding, placements: CotangentPlacements, number: int
    ) -> Tensor:
        ctx.placements, ctx.number = placements, number
        return sharding.wrap(local)

    @staticmethod
    def backward(ctx: Any, whole: Any) -> tuple[Tensor, None, None, None]:
        placements = ctx.placements.found.setdefault(ctx.number, tuple(whole.placements))
        if placements != tuple(whole.placements):  # another trace of the function found them so
            whole = whole.redistribute(placements=placements)
        return local_part(whole), None, None, None
