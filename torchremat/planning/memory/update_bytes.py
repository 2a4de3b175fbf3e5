"""The gradients that an optimizer can consume in the backward pass, and the bytes of its updates.

AdamW      sqrt of the second moment, divided: two tensors as large as the parameter
SGD        none
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchremat._torch import TorchDispatchMode
from torchremat.autodiff.bodies import FunctionBody
from torchremat.core.storages import storages_in
from torchremat.optim.per_parameter import find_objection
from torchremat.optim.step_in_backward import (
    find_stepping,
    shares_gradients,
    stepping_of,
)
from torchremat.planning.memory.resident_bytes import OptimizerLike, copy_on_meta, take_step
from torchremat.remat.program.region import Region


def find_updates(region: Region, optimizer: OptimizerLike) -> Mapping[int, int]:
    """The inputs whose updates can run in the backward pass, each with the bytes that one needs.

    They are the parameters that a module closes over, if no argument gets a gradient: only then
    does a checkpoint hand out gradients while its backward pass runs. There are none where
    gradients are accumulated, clipped or summed over processes, and where one parameter cannot be
    updated without the others.
    """
    if optimizer is None or region.argument_has_gradient or not _may_step_early(optimizer):
        return {}
    body = region.body
    captured = body.captured() if isinstance(body, FunctionBody) and body.captured else ()
    first = len(region.specs) - len(captured)
    known: dict[tuple[Any, ...], int] = {}
    found = {}
    for i in region.wrt:
        parameter = captured[i - first]
        number = _group_of(optimizer, parameter)
        if number is None or not region.specs[i].is_leaf:
            continue
        value = region.joint.inputs[i].meta["val"]
        kind = number, tuple(value.shape), value.dtype
        if kind not in known:
            known[kind] = _count_update_bytes(copy_on_meta(optimizer, [value], number))
        found[i] = known[kind]
    return found


def find_updates_now(region: Region) -> Mapping[int, int]:
    """`find_updates` of all optimizers that step in the backward pass now."""
    handles = (handle() for handle in find_stepping())
    found: dict[int, int] = {}
    for handle in handles:
        if handle is not None:
            found |= find_updates(region, handle.optimizer)
    return found


def steps_already(optimizer: OptimizerLike) -> bool:
    """Whether the optimizer updates parameters in the backward pass now."""
    return isinstance(optimizer, torch.optim.Optimizer) and stepping_of(optimizer) is not None


def _may_step_early(optimizer: OptimizerLike) -> bool:
    if shares_gradients():
        return False
    if not isinstance(optimizer, torch.optim.Optimizer):
        return True
    stepping = stepping_of(optimizer)
    if stepping is not None:
        return stepping.max_norm is None and stepping.accumulate == 1
    return find_objection(optimizer) is None


def _group_of(optimizer: OptimizerLike, parameter: Tensor) -> int | None:
    """The number of the group of a parameter, `None` for one that is not the optimizer's."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return 0
    groups = (group["params"] for group in optimizer.param_groups)
    return next((n for n, group in enumerate(groups) if any(p is parameter for p in group)), None)


def _count_update_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The most bytes that a step makes at one time, when there is a state already."""
    take_step(optimizer)
    groups = [group["params"] for group in optimizer.param_groups]
    old = [groups, [p.grad for group in groups for p in group], list(optimizer.state.values())]
    counter = _NewBytes(old)
    with counter:
        take_step(optimizer)
    return counter.peak


class _NewBytes(TorchDispatchMode):
    """Counts the bytes of live storages on the meta device that are not of `old`."""

    def __init__(self, old: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._old = list(storages_in(old))
        self._seen: dict[int, object] = {id(storage): storage for storage in self._old}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in storages_in(result):
            if id(storage) not in self._seen and storage.device.type == "meta":
                self._watch(storage)
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()

        def forget() -> None:
            self._seen.pop(key, None)
            self.live -= nbytes

        self._seen[key] = weakref.finalize(storage, forget)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
