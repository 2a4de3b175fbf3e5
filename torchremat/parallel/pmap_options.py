"""The options of `pmap`, checked against the devices that there are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.batching.vmappable import is_spec
from torchremat.core.avals import Aval
from torchremat.core.source import current_source
from torchremat.errors import ArgumentValueError, AxisError, AxisTypeError, DeviceError
from torchremat.parallel.devices import Device, local_device_count, process_count, process_index
from torchremat.tracing.axes.named_axes import AxisName


@dataclass(frozen=True)
class PmapOptions:
    axis_name: AxisName
    in_axes: Any
    out_axes: Any
    static: tuple[int, ...]
    num_devices: int | None
    """How many of this process's devices; `None`: as many as it has."""


def number_of_own(devices: Sequence[Any]) -> int:
    if not devices:
        raise ArgumentValueError("'devices' argument to pmap must be non-empty, or None.")
    here = process_index()
    of_process = [d.process_index if isinstance(d, Device) else here for d in devices]
    counts = [of_process.count(i) for i in range(process_count())]
    if sum(counts) != len(devices) or not (sum(counts) == counts[here] or len(set(counts)) == 1):
        others = [d for d, i in zip(devices, of_process, strict=True) if i != here]
        raise DeviceError(
            f"pmap was given devices={list(devices)}, of which {others} are not of process {here}: "
            "give each process its own (tr.local_devices()), or all as many of each process"
        )
    kinds = {
        str((d.torch_device if isinstance(d, Device) else torch.device(d)).type) for d in devices
    }
    available = sum(local_device_count(kind) for kind in kinds)
    if counts[here] > available:
        raise DeviceError(
            f"pmap was given devices={list(devices)}, and process {here} has only {available} of "
            "that kind"
        )
    return counts[here]


def check_whole(out_axes: Any) -> None:
    """Raise for axes of a ragged batch, which no outputs of `pmap` have."""
    leaves = _torch.tree_flatten(out_axes, is_leaf=is_spec)[0]
    for axis in leaves:
        if is_spec(axis):
            raise AxisTypeError(
                f"pmap was given {axis!r} in out_axes at {current_source()}: the examples that "
                "devices give back are of one shape, so their axis is an int. Use vmap inside for "
                "a ragged batch"
            )


def num_devices_for(tensor: Tensor | None) -> int:
    kind = None if tensor is None else tensor.device.type
    try:
        return local_device_count(kind)
    except DeviceError:  # meta
        return local_device_count()


def check_devices(
    fun: Any, options: PmapOptions, size: int, available: int, num_processes: int
) -> None:
    name, at = name_of(fun), current_source() or "an unknown line"
    given = options.num_devices is not None
    if given and size != available:
        raise AxisError(
            "Leading axis size of input to pmapped function must equal the number of local devices "
            f"passed to pmap. Got axis_size={size}, num_local_devices={available}, in pmap({name}) "
            f"at {at}."
        )
    if size > available:
        raise AxisError(
            f"pmap({name}) at {at} requires {size} logical devices, but only {available} "
            f"{'is' if available == 1 else 'are'} available in process {process_index()}: the "
            "mapped axis has one example for each device of the process. For more examples on a "
            "device use vmap inside; start more processes with torchrun; or on CPUs set "
            "tr.config.num_cpu_devices."
        )
    if num_processes > 1 and size != available:
        raise AxisError(
            f"pmap({name}) at {at}: where several processes take part, the mapped axis must be of "
            "the size of the number of local devices if no `devices` argument is specified. Got "
            f"axis_size={size}, num_local_devices={available}"
        )


def describe_call(fun: Any, options: PmapOptions, args: Any, kwargs: Any) -> str:
    """Describe a call: the text is the same in processes that make the same call."""
    leaves, spec = _torch.tree_flatten((args, kwargs))
    shown = [_describe(leaf) for leaf in leaves]
    code = getattr(fun, "__code__", None)
    line = "" if code is None else f":{code.co_firstlineno}"
    return (
        f"pmap({name_of(fun)}{line}, axis_name={options.axis_name!r}, in_axes={options.in_axes}) "
        f"of ({', '.join(shown)}), {spec.num_leaves} leaves"
        + ("" if torch.is_grad_enabled() else ", without gradients")
    )


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        grad = " that requires a gradient" if _torch.requires_grad_at_any_level(leaf) else ""
        return f"{Aval.of(leaf)}{grad}"
    return (
        repr(leaf) if isinstance(leaf, str | int | float | complex | None) else type(leaf).__name__
    )


def name_of(fun: Any) -> str:
    return getattr(fun, "__name__", type(fun).__name__)
