"""`pmap`: a function of one example, run on the devices of every process.

With one device a process, which is how `torchrun` starts them, the function runs as it is. Over
several the process maps it, as `vmap` does, and collectives reduce in the process first.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from torchremat import _torch
from torchremat.api_util import flatten_axes
from torchremat.api_util.static_arguments import as_argnums
from torchremat.batching.mapped_arguments import MappedLeaves, check_axes
from torchremat.batching.vmap_level import Mapping
from torchremat.batching.vmappable import is_vmappable
from torchremat.compile.jit.jit import jit
from torchremat.core.source import current_source
from torchremat.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    AxisError,
    AxisTypeError,
    NotAvailableError,
)
from torchremat.parallel.devices import process_count
from torchremat.parallel.pmap_options import (
    PmapOptions,
    check_devices,
    check_whole,
    describe_call,
    name_of,
    num_devices_for,
    number_of_own,
)
from torchremat.parallel.process_axes import ALONE
from torchremat.parallel.process_failures import agree, publish_error
from torchremat.tracing.axes.named_axes import AxisFrame, AxisName, axes_in_scope, in_scope


class ProcessMapped:
    def __init__(
        self, fun: Callable[..., Any], options: PmapOptions, donated: tuple[int, ...]
    ) -> None:
        functools.update_wrapper(self, fun, updated=())
        self.fun = fun
        # names that no other wrapper uses: `jit` of this takes its attributes over
        self._pmap_options = options
        self._pmap_run: Callable[..., Any] = functools.partial(_run, fun, options)
        if donated:
            run = functools.wraps(fun, updated=())(
                lambda *args, **kw: _run(fun, options, *args, **kw)
            )
            self._pmap_run = jit(
                run, static_argnums=options.static, donate_argnums=donated, backend="eager"
            )

    def __repr__(self) -> str:
        return f"pmap({self.fun!r}, axis_name={self._pmap_options.axis_name!r})"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            raise NotAvailableError(
                "torch.compile cannot capture a torchremat.pmap: call it outside, or compile the "
                "function inside"
            )
        if process_count() == 1 or _torch.is_faking():
            return self._pmap_run(*args, **kwargs)
        agree(
            describe_call(self.fun, self._pmap_options, args, kwargs), f"pmap({name_of(self.fun)})"
        )
        try:
            return self._pmap_run(*args, **kwargs)
        except Exception as error:
            publish_error(error)
            raise


def pmap(
    fun: Callable[..., Any],
    axis_name: AxisName = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Sequence[int] = (),
    devices: Sequence[Any] | None = None,
    donate_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """Run `fun`, a function of one example, on the devices of all processes, one example on each.

    One program runs in every process, as `torchrun` starts them, and makes the same calls in each.
    A process is given the examples of its own devices (by default along the first axis, whose size
    is `local_device_count()`: mostly 1) and has their results. Collectives inside, over
    `axis_name`, go over the devices of all processes: `axis_size` is their number, and `axis_index`
    that of the device, those of process 0 first. Without a process group there is one process.

    Everything nests: `vmap` inside and around, `grad`, `checkpoint` (which keeps what collectives
    returned, since recomputing them would communicate again), `make_graph`. A derivative is that of
    the sum of what all processes differentiate, so all of them must: where each has
    `y = psum(f(x))` and calls `y.backward()`, each gets the sum of their cotangents times its f'.

    Tensors stay on the devices where they are, those that `fun` closes over too, and `fun` runs
    there. For several devices of one process it is mapped as by `vmap(randomness="different")`. A
    `pmap` inside another maps over the devices of its process that the outer one left.

    Args:
        fun: a function of trees of tensors, or an `nn.Module`.
        axis_name: what collectives inside (`psum`, ...) call the axis.
        in_axes: where the examples are in each argument, as for `vmap`. `None` is for what the
            devices of the process share. Keyword arguments are mapped along their first axis.
        out_axes: where they must be in the outputs, as a tree prefix. `None` leaves the axis out,
            for what is the same on each of the process's devices.
        static_broadcasted_argnums: positions of arguments that are any Python values, and not
            mapped.
        devices: those of this process's devices that take part (also `torch.device`s), by default
            all; or those of all processes, as many of each.
        donate_argnums: positions of arguments that the call may use up, as in `jit`.

    Returns:
        The mapped function.

    Raises:
        TypeError: if `fun` cannot be called, and for axes that are none. At the call
            (`AxisTypeError`) for values that have no axes, and for ragged batches (`Pile`).
        ValueError: for an empty `devices`. At the call (`AxisError`) for axes that do not fit,
            sizes that disagree, and more examples than devices, or fewer where several processes
            take part.
        DeviceError: (a `RuntimeError`) for devices that this process does not have.
        ProcessError: (a `RuntimeError`) at the call, if another process is called with other
            shapes, or stops.

    After `jax.pmap`.

    >>> import torch, torchremat as tr
    >>> share = pmap(lambda x: x / tr.psum(x, "i"), axis_name="i")
    >>> share(torch.tensor([[2.0, 4.0]]))  # in each of several processes: the share in the sum
    tensor([[1., 1.]])
    """
    if not callable(fun):
        raise ArgumentTypeError(
            f"pmap takes a function or an nn.Module, but it was given {fun!r} "
            f"({type(fun).__name__})"
        )
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    check_axes(in_axes, out_axes, "pmap")
    check_whole(out_axes)
    static = _as_argnums(static_broadcasted_argnums, "static_broadcasted_argnums")
    donated = _as_argnums(donate_argnums, "donate_argnums")
    if both := set(static) & set(donated):
        raise ArgumentValueError(
            "static_broadcasted_argnums and donate_argnums cannot intersect, and both contain "
            f"{sorted(both)}: a static argument has no storage to donate"
        )
    number = None if devices is None else number_of_own(devices)
    return ProcessMapped(fun, PmapOptions(axis_name, in_axes, out_axes, static, number), donated)


def _as_argnums(given: Any, what: str) -> tuple[int, ...]:
    return as_argnums(tuple(given) if isinstance(given, list) else given, what)


def _run(fun: Callable[..., Any], options: PmapOptions, /, *args: Any, **kwargs: Any) -> Any:
    call = _bind_static(fun, options, args, kwargs)
    _refuse_containers(call)
    size = call.size(None)
    frame = _frame(call, options, size)
    if frame.group is not None and not frame.parts and size == 1:
        with in_scope(frame):
            return _run_one(call, options)
    name = options.axis_name
    scope = [frame]
    if frame.parts:
        processes, name = frame.parts
        group = replace(frame, name=processes, size=frame.size // size, parts=(), num_devices=0)
        scope = [group, replace(frame, group=None)]
    mapping = Mapping(options.in_axes, options.out_axes, name, randomness="different")
    with in_scope(*scope):
        return mapping.run(call, size)


def _bind_static(
    fun: Callable[..., Any], options: PmapOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> MappedLeaves:
    in_axes = options.in_axes
    if not options.static:
        return MappedLeaves.of(fun, in_axes, args, kwargs, "pmap")
    count = len(args)
    if any(not -count <= i < count for i in options.static):
        raise ArgumentValueError(
            f"pmapped function has static_broadcasted_argnums={options.static} but was called with "
            f"only {count} positional argument{'s' * (count != 1)}. All static broadcasted "
            "arguments must be passed positionally."
        )
    static = {i % count: args[i] for i in options.static}
    mapped = [i for i in range(count) if i not in static]
    if isinstance(in_axes, tuple) and len(in_axes) == count:
        in_axes = tuple(in_axes[i] for i in mapped)

    @functools.wraps(fun, updated=())
    def call_mapped(*rest: Any, **named: Any) -> Any:
        given = static | dict(zip(mapped, rest, strict=True))
        return fun(*(given[i] for i in range(count)), **named)

    del call_mapped.__wrapped__
    return MappedLeaves.of(call_mapped, in_axes, tuple(args[i] for i in mapped), kwargs, "pmap")


def _refuse_containers(call: MappedLeaves) -> None:
    for leaf, axis in zip(call.leaves, call.axes, strict=True):
        if axis is not None and (is_vmappable(leaf) or not isinstance(axis, int)):
            raise AxisTypeError(
                f"pmap({name_of(call.fun)}) was given a {type(leaf).__name__} to map along {axis} "
                f"at {current_source()}. Devices get examples of one shape: no ragged batch (a "
                "Pile), nor types that vmap maps by rules of their own. Pad it; or give each "
                "device a batch of its own with in_axes None, and use vmap inside"
            )


def _frame(call: MappedLeaves, options: PmapOptions, size: int) -> AxisFrame:
    """The axis of such a call, after a check that there are devices for it."""
    outer = [f.num_devices for f in axes_in_scope() if f.num_devices]
    tensor = next((t for t in call.leaves if isinstance(t, Tensor)), None)
    present = num_devices_for(tensor) if options.num_devices is None else options.num_devices
    left = present // math.prod(outer)
    num_processes = 1 if outer else process_count()
    check_devices(call.fun, options, size, left, num_processes)
    name = options.axis_name
    if num_processes == 1:
        group = ALONE if size == 1 else None
        return AxisFrame(name, size, None, group=group, num_devices=size)
    world = distributed.group.WORLD
    assert world is not None
    parts = () if size == 1 else (f"{name} (processes)", f"{name} (local)")
    return AxisFrame(
        name, size * num_processes, None, group=world.group_name, parts=parts, num_devices=size
    )


def _run_one(call: MappedLeaves, options: PmapOptions) -> Any:
    leaves = [
        leaf if axis is None or leaf is None else leaf.select(axis, 0)
        for leaf, axis in zip(call.leaves, call.axes, strict=True)
    ]
    args, kwargs = _torch.tree_unflatten(leaves, call.spec)
    outputs, spec = _torch.tree_flatten(call.fun(*args, **kwargs))
    axes = flatten_axes("pmap out_axes", spec, options.out_axes)
    placed = [_add_axis(out, axis, call.fun) for out, axis in zip(outputs, axes, strict=True)]
    return _torch.tree_unflatten(placed, spec)


def _add_axis(value: Any, axis: Any, fun: Any) -> Any:
    if axis is None or value is None:
        return value
    if not isinstance(value, Tensor | bool | int | float | complex):
        raise AxisTypeError(
            f"pmap({name_of(fun)}) returns {value!r} ({type(value).__name__}) where out_axes is "
            f"{axis}: only tensors and numbers have an axis. Give None for it in out_axes, or "
            "return tensors."
        )
    tensor = torch.as_tensor(value)
    if not -tensor.dim() - 1 <= axis <= tensor.dim():
        raise AxisError(
            f"pmap({name_of(fun)}) was given {axis} in out_axes for an output of shape "
            f"{tuple(tensor.shape)}, which with the axis of examples has {tensor.dim() + 1} "
            "dimensions"
        )
    return tensor.unsqueeze(axis)
