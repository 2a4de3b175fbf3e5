"""Updates of one parameter by an optimizer, and whether those are what one step does.

    step of all         p1, p2, p3 <- g1, g2, g3
    one at a time       p3 <- g3;  p2 <- g2;  p1 <- g1       as a backward pass has them

Equal for optimizers whose rule reads one parameter, its gradient and its state. That is tried on
small tensors, not read from a list of names.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchremat import _torch

Group = Mapping[str, Any]
"""A parameter group, as an optimizer has it."""


def update_parameter(optimizer: Optimizer, group: Group, parameter: Tensor) -> None:
    """Do for one parameter of `group` what `optimizer.step()` does for all; its hooks do not run.

    The state is that of `optimizer`, and the settings are those of `group` now.
    """
    _torch.step_without_hooks(_take_one(optimizer, group, parameter))


def _take_one(optimizer: Optimizer, group: Group, parameter: Tensor) -> Optimizer:
    """An optimizer of one parameter that shares its state with `optimizer`."""
    one = object.__new__(type(optimizer))
    one.__dict__.update(vars(optimizer))
    one.param_groups = [_only(group, parameter)]
    return one


def _only(group: Group, parameter: Tensor) -> dict[str, Any]:
    found = {**group, "params": [parameter]}
    if "param_names" in group:
        place = next(i for i, other in enumerate(group["params"]) if other is parameter)
        found["param_names"] = [group["param_names"][place]]
    return found


def copy_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]], **changes: Any) -> Optimizer:
    """An optimizer without state, of other parameters, with the settings of another.

    Its class does not make it, since the settings that an optimizer has are not always those that
    its class takes: `AdamW` has `decoupled_weight_decay`, and takes none.
    """
    made = object.__new__(type(optimizer))
    made.__dict__.update(vars(optimizer))
    Optimizer.__init__(made, groups, optimizer.defaults | changes)
    return made


# Chosen by hand: two parameters show what goes from one to the other, two steps what a state does.
_TRIED = 2
# Entries of a stand-in in each dimension, at most.
_SMALL = 3


def find_objection(optimizer: Optimizer) -> str | None:
    """Why parameters cannot be updated one at a time; `None` if they can.

    Two copies of the optimizer update small tensors: all at once, and one by one, the last first.
    The results must be equal to the bit, and nothing may be noted for all parameters together.
    """
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            return f"it steps another optimizer, .{name}: give that one"
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        generator = torch.Generator().manual_seed(0)
        at_once, groups = _copy_with_stand_ins(optimizer)
        alone, same = _copy_with_stand_ins(optimizer)
        try:
            for _ in range(_TRIED):
                for one, other in zip(_each(groups), _each(same), strict=True):
                    one.grad = torch.randn(one.shape, generator=generator).to(one)
                    other.grad = one.grad.clone()
                at_once.step()
                if not _step_one_by_one(alone):
                    return "its step writes settings that all parameters share"
        except Exception as error:  # whatever it raises, this optimizer cannot be used
            return f"its step raised {type(error).__name__}: {error}"
    pairs = zip(_each(groups), _each(same), strict=True)
    if all(torch.equal(one, other) for one, other in pairs):
        return None
    return "its step gives one parameter another value when the others are not there"


def _step_one_by_one(optimizer: Optimizer) -> bool:
    """Update each parameter; whether none wrote what all share, which would be lost."""
    for group in reversed(optimizer.param_groups):
        for parameter in reversed(group["params"]):
            one = _take_one(optimizer, group, parameter)
            before = _describe_shared(one)
            _torch.step_without_hooks(one)
            if _describe_shared(one) != before:
                return False
    return True


def _describe_shared(optimizer: Optimizer) -> list[str]:
    """The settings of all groups, and the plain attributes, as text."""
    found = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    plain = (int, float, str, bool, type(None))
    attributes = {k: v for k, v in vars(optimizer).items() if isinstance(v, plain)}
    return [repr(found), repr(attributes)]


def _copy_with_stand_ins(optimizer: Optimizer) -> tuple[Optimizer, list[dict[str, Any]]]:
    generator = torch.Generator().manual_seed(0)
    groups = []
    for group in optimizer.param_groups:
        kinds = _kinds_of(group["params"])
        made = [_stand_in(kind, generator) for kind in kinds for _ in range(_TRIED)]
        if made:
            settings = {k: copy.copy(v) for k, v in group.items() if k != "param_names"}
            groups.append({**settings, "params": made})
    return copy_optimizer(optimizer, groups), groups


def _kinds_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """A parameter for each number of dims, dtype and device."""
    kinds = {(p.ndim, p.dtype, p.device): p for p in parameters}
    return list(kinds.values())


def _stand_in(parameter: Tensor, generator: torch.Generator) -> Tensor:
    shape = [min(size, _SMALL) for size in parameter.shape]
    device = "cpu" if parameter.device.type == "meta" else parameter.device
    values = torch.randn(shape, generator=generator)
    return values.to(device, parameter.dtype).requires_grad_()


def _each(groups: list[dict[str, Any]]) -> Iterator[Tensor]:
    for group in groups:
        yield from group["params"]
