"""The bytes that are there before a step: parameters, buffers, inputs, an optimizer's state."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.storages import storages_in
from torchremat.errors import ArgumentTypeError, OptionError, nearest_names
from torchremat.optim.per_parameter import copy_optimizer
from torchremat.optim.state_on_host import count_state_bytes
from torchremat.optim.step_in_backward import stepping_of
from torchremat.remat.program.region import Region
from torchremat.tracing.dtensors import local_tensor

OptimizerLike = torch.optim.Optimizer | type[torch.optim.Optimizer] | None
"""An optimizer, its class, or none."""


@dataclass(frozen=True)
class Resident:
    """The bytes that are there before a step.

    Attributes:
        tensors: the bytes of each input, parameter and tensor of the optimizer's state.
        on_host: the bytes of the state that lies in the host's memory.
    """

    tensors: Sequence[int] = ()
    on_host: int = 0

    @classmethod
    def of(cls, region: Region, optimizer: OptimizerLike, *, on_host: bool = False) -> "Resident":
        """There is nothing without an optimizer: only what the step makes is counted then.

        With `on_host` the optimizer's state counts as on the host; else it is where it is now.
        """
        if optimizer is None:
            return cls()
        state = sum(state_tensors(region, optimizer, on_host=False))
        here = state_tensors(region, optimizer, on_host=on_host or None)
        return cls(input_tensors(region) + here, state - sum(here))


def input_tensors(region: Region) -> list[int]:
    """The bytes of each input of a step; parameters are inputs too."""
    return [_nbytes(node.meta["val"]) for node in region.joint.inputs]


def parameter_nbytes(region: Region) -> int:
    """The bytes of those inputs that get a gradient."""
    return sum(map(_nbytes, _trainable(region)))


def state_tensors(
    region: Region, optimizer: OptimizerLike, *, on_host: bool | None = None
) -> list[int]:
    """The bytes of each tensor in the state of `optimizer` for what gets a gradient.

    Whether it is in the host's memory the optimizer says, unless `on_host` does. Raises
    `TypeError` for what is not an optimizer.
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
    made = copy_on_meta(optimizer, list(_trainable(region)))
    if not (leaves_state_to_host(optimizer) if on_host is None else on_host):
        return _state_after_step(made)
    take_step(made)
    return list(count_state_bytes(made.state))


def leaves_state_to_host(optimizer: OptimizerLike) -> bool:
    """Whether it steps in the backward pass with its state in the host's memory."""
    stepping = stepping_of(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
    return stepping is not None and stepping.offload


def copy_on_meta(
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer],
    values: Sequence[Tensor],
    group: int | None = None,
) -> torch.optim.Optimizer:
    """An optimizer of parameters of the shapes of `values`, which take no memory.

    Its settings are the defaults, or those of that `group`.
    """
    parameters = list(map(_on_meta, values))
    if isinstance(optimizer, type):
        return _make_optimizer(optimizer, parameters)
    settings = {} if group is None else optimizer.param_groups[group]
    names = {} if "param_names" not in settings else {"param_names": ["parameter"]}
    return _copy_on_meta(optimizer, [{**settings, "params": parameters, **names}])


def resident_bytes(*things: Any, gradients: bool = False) -> int:
    """The bytes of what is there before a step: for the `resident` of a budget.

    Each storage counts once, at its full size, on whatever device. Of sharded tensors the shards of
    this process count. Of an optimizer, the state that it has not yet counts, too: one step of it
    is taken on meta tensors. Of state in the host's memory, that of three parameters counts.

    Args:
        things: modules, for their parameters and buffers; optimizers, for their parameters and
            state; and trees of tensors, such as a batch.
        gradients: whether a gradient of each trainable parameter counts, as it is there before a
            step where gradients are accumulated, or set to zero in place.

    Raises:
        TypeError: for a thing in which there is no tensor.

    >>> model = torch.nn.Linear(256, 64)                        # 64 KiB and 256 bytes
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> resident_bytes(model), resident_bytes(model, optimizer)  # two moments, and two counts
    (65792, 197384)
    >>> resident_bytes(model, gradients=True)
    131584
    """
    sizes: dict[int, int] = {}
    parameters: dict[int, Tensor] = {}
    alive, to_come = [], 0
    for thing in things:
        found, tree = _parameters_of(thing), thing
        parameters |= {id(p): p for p in found if p.requires_grad}
        if isinstance(thing, torch.optim.Optimizer):
            state, of_state_to_come = _split_state(thing)
            tree = [found, state]
            to_come += of_state_to_come
        storages = list(storages_in(tree))
        if not storages:
            raise ArgumentTypeError(
                f"resident_bytes({thing!r}): there is no tensor in it. Give modules, optimizers, "
                "and trees of tensors"
            )
        alive += storages  # so that no id is used again
        sizes |= {id(storage): storage.nbytes() for storage in storages}
    if gradients:
        to_come += sum(_nbytes_of_gradient(p) for p in parameters.values())
    return sum(sizes.values()) + to_come


def _split_state(optimizer: torch.optim.Optimizer) -> tuple[list[Any], int]:
    """The state that is there, and the bytes of what else is there during a step."""
    made = _without_state(optimizer)
    sizes = _state_after_step(made)
    if leaves_state_to_host(optimizer):
        return [], sum(count_state_bytes({**optimizer.state, **made.state}))
    return list(optimizer.state.values()), sum(sizes)


def _parameters_of(thing: Any) -> list[Tensor]:
    if isinstance(thing, torch.optim.Optimizer):
        return [p for group in thing.param_groups for p in group["params"]]
    leaves, _ = _torch.tree_flatten(thing)
    modules = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Module)]
    return [p for module in modules for p in module.parameters()]


def _nbytes_of_gradient(parameter: Tensor) -> int:
    local = local_tensor(parameter)
    return local.numel() * local.element_size()


def _without_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy, on meta tensors, with the parameters that have no state yet."""
    groups = [
        {
            **group,
            "params": [
                _on_meta(local_tensor(p))
                for p in group["params"]
                if p.requires_grad and p not in optimizer.state
            ],
        }
        for group in optimizer.param_groups
    ]
    return _copy_on_meta(optimizer, groups)


def _state_after_step(optimizer: torch.optim.Optimizer) -> list[int]:
    """The bytes of each tensor of the state that an optimizer of meta tensors gets in a step."""
    take_step(optimizer)
    leaves, _ = _torch.tree_flatten(list(optimizer.state.values()))
    return [leaf.untyped_storage().nbytes() for leaf in leaves if isinstance(leaf, Tensor)]


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of meta tensors step."""
    with torch.device("cpu"):  # where a count of steps is: it may be read, as no meta tensor can
        optimizer.step()


def _on_meta(value: Tensor) -> Tensor:
    """A parameter of the same shape, with a gradient, that takes no memory."""
    shape = [*map(_torch.hint_of, value.shape)]
    parameter = torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=True)
    parameter.grad = torch.empty_like(parameter)
    return parameter


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


def _copy_on_meta(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """A copy without the settings that forbid meta tensors."""
    plain = {k: False for k in _NOT_ON_META if k in optimizer.defaults}
    return copy_optimizer(optimizer, [group | plain for group in groups], **plain)


_NOT_ON_META = ("fused", "foreach", "capturable")


def _trainable(region: Region) -> Iterable[Tensor]:
    return [region.joint.inputs[i].meta["val"] for i in region.wrt]


def _nbytes(value: Tensor) -> int:
    return _torch.hint_of(value.untyped_storage().nbytes())
