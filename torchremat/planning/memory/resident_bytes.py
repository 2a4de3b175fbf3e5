"""The bytes that are there before a step: parameters, buffers, inputs, an optimizer's state."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.errors import ArgumentTypeError, OptionError, nearest_names
from torchremat.remat.program.region import Region

OptimizerLike = torch.optim.Optimizer | type[torch.optim.Optimizer] | None
"""An optimizer, its class, or none."""


def resident_tensors(region: Region, optimizer: OptimizerLike) -> list[int]:
    """The bytes of each input, parameter and tensor of the optimizer's state.

    There are none without an optimizer: only what the step makes is counted then.
    """
    if optimizer is None:
        return []
    return input_tensors(region) + state_tensors(region, optimizer)


def input_tensors(region: Region) -> list[int]:
    """The bytes of each input of a step; parameters are inputs too."""
    return [_nbytes(node.meta["val"]) for node in region.joint.inputs]


def parameter_nbytes(region: Region) -> int:
    """The bytes of those inputs that get a gradient."""
    return sum(map(_nbytes, _trainable(region)))


def state_tensors(region: Region, optimizer: OptimizerLike) -> list[int]:
    """The bytes of each tensor in the state of `optimizer` for what gets a gradient.

    One step of an optimizer of the same class and settings is taken on meta tensors, and what it
    keeps is counted. Raises `TypeError` for what is no optimizer.
    """
    if optimizer is None:
        return []
    if isinstance(optimizer, str):
        cure = f"torch.optim.{find_optimizer(optimizer).__name__}"
        raise ArgumentTypeError(f"optimizer={optimizer!r} is text: give its class, {cure}")
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(kind, torch.optim.Optimizer):
        raise ArgumentTypeError(
            f"optimizer={optimizer!r} is none: give a torch.optim.Optimizer or its class, such as "
            "torch.optim.AdamW"
        )
    parameters = [
        torch.empty(
            [*map(_torch.hint_of, value.shape)],
            dtype=value.dtype,
            device="meta",
            requires_grad=True,
        )
        for value in _trainable(region)
    ]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    copy = (
        _make_optimizer(optimizer, parameters)
        if isinstance(optimizer, type)
        else _copy_optimizer(optimizer, parameters)
    )
    with torch.device("cpu"):  # where a count of steps is: it may be read, as no meta tensor can
        copy.step()
    leaves, _ = _torch.tree_flatten(list(copy.state.values()))
    return [leaf.untyped_storage().nbytes() for leaf in leaves if isinstance(leaf, Tensor)]


def find_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """The class of `torch.optim` of that name, in upper or lower case.

    Raises `OptionError` (a `ValueError`) with the nearest names if there is none.

    >>> find_optimizer("adamw").__name__
    'AdamW'
    """
    known = {
        key.lower(): kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    if name.lower() not in known:
        names = [kind.__name__ for kind in known.values()]
        raise OptionError(f"torch.optim has no {name!r}; {nearest_names(name, names)}")
    return known[name.lower()]


def _make_optimizer(
    kind: type[torch.optim.Optimizer], parameters: list[Tensor]
) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": 1e-3} if kind is torch.optim.SGD else {}
    return kind(parameters, **settings)


def _copy_optimizer(
    optimizer: torch.optim.Optimizer, parameters: list[Tensor]
) -> torch.optim.Optimizer:
    """An optimizer with the settings of another, but those that forbid meta tensors.

    Its class does not make it, since the settings that an optimizer has are not always those that
    its class takes: `AdamW` has `decoupled_weight_decay`, and takes none.
    """
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(vars(optimizer))
    settings = optimizer.defaults | {k: False for k in _NOT_ON_META if k in optimizer.defaults}
    torch.optim.Optimizer.__init__(copy, parameters, settings)
    return copy


_NOT_ON_META = ("fused", "foreach", "capturable")


def _trainable(region: Region) -> Iterable[Tensor]:
    return [region.joint.inputs[i].meta["val"] for i in region.wrt]


def _nbytes(value: Tensor) -> int:
    return _torch.hint_of(value.untyped_storage().nbytes())
