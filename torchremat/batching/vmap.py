"""`vmap`: a function of one example becomes one of many.

It runs on PyTorch's own batching, one level of `torch.func.vmap`. A call that repeats is traced
once, as a checkpoint that saves what plain autograd saves: from then on the batched operators run,
and no batching.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.api_util import StaticArguments, WrapHashably, flatten_axes
from torchremat.batching import attention_rule
from torchremat.batching.mapped_arguments import MappedLeaves, check_axes, check_randomness
from torchremat.batching.vmap_level import Mapping
from torchremat.batching.vmappable import holds_containers, is_axis_size, is_spec, is_vmappable
from torchremat.core.accelerators import get_all_generator_states, set_all_generator_states
from torchremat.core.interrupts import hold_interrupts
from torchremat.errors import (
    ArgumentTypeError,
    AxisError,
    AxisTypeError,
    LoopWarning,
    NotAvailableError,
)
from torchremat.policies.builtin import plain_autograd
from torchremat.remat.checkpointed import Checkpointed
from torchremat.remat.tracing.calls import Call
from torchremat.tracing.axes.mapped_operators import let_vmap_decompose, let_vmap_scatter
from torchremat.tracing.checks.mapped_checks import let_vmap_check

# Calls of so many kinds are remembered: ever new static values must not fill the memory. Chosen by
# hand, as is the next one.
_MOST_KINDS = 128
# Traces of one function, each of which takes time and memory: ever new shapes are not all traced.
_MOST_TRACES = 8
_log = logging.getLogger("torchremat")


class Mapped(Checkpointed):
    """The function that `vmap` returns: it is traced for each kind of call, and run mapped."""

    may_write_tape = False

    def __init__(self, fun: Callable[..., Any], mapping: Mapping) -> None:
        self._mapping = mapping
        statics = StaticArguments(fun, (), (), lenient=True)
        super().__init__(fun, plain_autograd, True, statics, lenient=True)
        axes = _torch.tree_flatten((mapping.in_axes, mapping.out_axes), is_leaf=is_spec)[0]
        # a trace does not know the tensors of containers, nor where those of a mesh are
        self._is_never_traced = any(map(is_spec, axes)) or mapping.spmd_axis_name is not None

    @property
    def around(self) -> Callable[..., Any]:  # type: ignore[override]
        return self._mapping

    def __repr__(self) -> str:
        return f"vmap({self.fun!r})"

    def _cache_key(self) -> tuple[Any, ...]:
        return (*super()._cache_key(), WrapHashably(self._mapping))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _call_in_compiler(self.fun, self._mapping, None, *args, **kwargs)
        if self._is_never_traced or holds_containers((args, kwargs)):
            return self._mapping(self.fun, *args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _slow_call(self, call: Call, args: Any, kwargs: Any) -> Any:
        inside = (
            _torch.functorch_is_active()
            or _torch.in_dual_level()
            or _torch.innermost_proxy_mode() is not None
        )
        if inside or not self._is_traced(call, args, kwargs):
            return self._mapping(self.fun, *args, **kwargs)
        return super()._slow_call(call, args, kwargs)

    def _is_traced(self, call: Call, args: Any, kwargs: Any) -> bool:
        """A call that cannot be traced, since Python asks for values, runs as the first time."""
        own = self._trace_cache
        if (call.key,) in own.untraceable_keys:
            return False
        if call.key not in own.seen_keys:
            if len(own.seen_keys) < _MOST_KINDS:
                own.seen_keys.add(call.key)
            return False
        if self._find(call) is None and len(own.traces) >= _MOST_TRACES:
            return False
        with hold_interrupts(), _torch.dispatch_restored(), warnings.catch_warnings():
            warnings.simplefilter("error", LoopWarning)  # a trace would not be short
            try:
                trace, _ = self.prepare(call, args, kwargs)
            except Exception as error:
                _log.debug("%r stays untraced: %s", self, error)
                own.untraceable_keys.add((call.key,))
                return False
        if trace.escapes:  # what a level left is not a tensor of the graph
            own.untraceable_keys.add((call.key,))
        return not trace.escapes


def _call_in_compiler(
    fun: Callable[..., Any], mapping: Mapping, chunk_size: int | None, *args: Any, **kwargs: Any
) -> Any:
    ours = (mapping.axis_name, mapping.axis_size, mapping.spmd_axis_name, mapping.sum_match or None)
    if any(option is not None for option in ours):
        raise NotAvailableError(
            "torch.compile cannot capture a torchremat.vmap with axis_name, axis_size, "
            "spmd_axis_name or sum_match, which torch.func.vmap has not: call it outside, or "
            "compile the function inside"
        )
    in_axes = mapping.in_axes
    return torch.func.vmap(
        lambda args, kwargs: fun(*args, **kwargs),
        in_dims=(in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args), 0),
        out_dims=mapping.out_axes,
        randomness=mapping.randomness,
        chunk_size=chunk_size,
    )(args, kwargs)


def vmap(  # noqa: PLR0913, PLR0917 (the signature of jax.vmap)
    fun: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: Any = None,
    spmd_axis_name: Any = None,
    sum_match: bool = False,
    randomness: str = "error",
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Map `fun`, a function of one example, over an axis of its arguments.

    Batching is PyTorch's own (`torch.func.vmap`), with the rules that are registered in
    `torchremat.batching` where there are some. It nests with every other transformation, and with
    autograd. A function that is called a second time alike is traced: from then on its batched
    operators run without batching, and without its Python. What cannot be traced runs as it is. An
    operator for which PyTorch has no batching rule runs in a loop, with a `LoopWarning`.

    Args:
        fun: a function of trees of tensors, or an `nn.Module`.
        in_axes: where the mapped axis is in each argument: an int (negative ones count from the
            end), or `None` for what all examples share. A tuple has a tree prefix of these for each
            positional argument. Keyword arguments are mapped along their first axis.
        out_axes: where the outputs have it, as a tree prefix. An output that does not vary
            is repeated; `None` leaves it without the axis.
        axis_name: what collectives inside (`psum`, ...) call the axis: any hashable value.
        axis_size: its size, where no argument says it; also of a type that was registered for
            containers (`register_vmappable`).
        spmd_axis_name: the axis of a device mesh that the examples are spread over.
        sum_match: sum an output that varies where `out_axes` is `None`.
        randomness: what random operators do: `"error"`, draw `"different"` numbers for each
            example, or the `"same"`.
        chunk_size: map at most so many examples at a time, to save memory.

    Returns:
        The mapped function.

    Raises:
        TypeError: if `fun` cannot be called, for axes that are none, and (`AxisTypeError`) at the
            call for values that have no axes.
        ValueError: (`AxisError`) at the call, for axes that do not fit the arguments or outputs,
            sizes that disagree, and outputs that vary where `out_axes` is `None`.

    After `jax.vmap`.

    >>> import torch
    >>> dot = vmap(torch.dot, in_axes=(0, None))
    >>> dot(torch.eye(3), torch.arange(3.0))
    tensor([0., 1., 2.])
    >>> vmap(lambda x: {"twice": 2 * x}, in_axes=1, out_axes={"twice": -1})(torch.ones(2, 3))
    {'twice': tensor([[2., 2., 2.],
            [2., 2., 2.]])}
    """
    if not callable(fun):
        raise ArgumentTypeError(
            f"vmap takes a function or an nn.Module, but it was given {fun!r} "
            f"({type(fun).__name__})"
        )
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    check_axes(in_axes, out_axes)
    check_randomness(randomness)
    _check_axis(axis_name, axis_size)
    if chunk_size is not None:
        _check_chunks(chunk_size, axis_name)
    mapping = Mapping(
        in_axes, out_axes, axis_name, axis_size, spmd_axis_name, sum_match, randomness
    )
    if torch.compiler.is_dynamo_compiling():
        return functools.partial(_call_in_compiler, fun, mapping, chunk_size)
    attention_rule.register()
    let_vmap_scatter()
    let_vmap_decompose()
    let_vmap_check()
    if chunk_size is None:
        return Mapped(fun, mapping)

    def map_over(size: int) -> Mapped:
        return Mapped(fun, mapping if axis_size is None else replace(mapping, axis_size=size))

    return functools.wraps(fun)(functools.partial(call_in_chunks, map_over, mapping, chunk_size))


def _check_axis(name: Any, size: Any) -> None:
    if isinstance(name, tuple):
        raise AxisError(
            f"axis_name must be one name, but it is {name!r}: collectives take a tuple for several "
            "axes. Nest one vmap for each."
        )
    if name.__hash__ is None:
        raise AxisTypeError(
            f"axis_name must be hashable, a string say, but it is {name!r} ({type(name).__name__})"
        )
    is_number = isinstance(size, int) and not isinstance(size, bool)
    if size is not None and not is_number and not is_axis_size(size):
        raise AxisTypeError(f"axis_size must be an int, but it is {size!r} ({type(size).__name__})")
    if is_number and size < 0:
        raise AxisError(f"axis_size must be at least 0, but it is {size}")


def _check_chunks(chunk_size: Any, axis_name: Any) -> None:
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise AxisTypeError(
            f"chunk_size must be an int or None, but it is {chunk_size!r} "
            f"({type(chunk_size).__name__})"
        )
    if chunk_size < 1:
        raise AxisError(f"chunk_size must be at least 1, but it is {chunk_size}")
    if axis_name is not None:
        raise AxisError(
            f"chunk_size={chunk_size} cannot be combined with axis_name={axis_name!r}: a "
            "collective would see the examples of one chunk"
        )


def call_in_chunks(
    map_over: Callable[[int], Callable[..., Any]],
    mapping: Mapping,
    chunk_size: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`map_over` gives the function of so many examples."""
    call = MappedLeaves.of(map_over(1), mapping.in_axes, args, kwargs)
    if any(map(is_vmappable, call.leaves)):
        raise AxisTypeError("chunk_size works on tensors, not on containers of registered types")
    size = call.size(mapping.axis_size)
    is_same = mapping.randomness == "same"
    if is_same and _torch.innermost_proxy_mode() is not None:
        return map_over(size)(*args, **kwargs)  # a graph draws once, and not for each chunk
    states = get_all_generator_states() if is_same else None
    results = []
    for start in range(0, max(size, 1), chunk_size):
        if states is not None and start:  # all chunks draw the numbers of the first
            set_all_generator_states(states.items())
        length = min(chunk_size, size - start)
        leaves = [
            leaf.narrow(axis, start, length) if axis is not None and leaf is not None else leaf
            for leaf, axis in zip(call.leaves, call.axes, strict=True)
        ]
        part_args, part_kwargs = _torch.tree_unflatten(leaves, call.spec)
        results.append(map_over(length)(*part_args, **part_kwargs))
    return _join_results(results, mapping)


def _join_results(results: Sequence[Any], mapping: Mapping) -> Any:
    spec = _torch.tree_flatten(results[0])[1]
    axes = flatten_axes("vmap out_axes", spec, mapping.out_axes)
    columns = zip(*(_torch.tree_flatten(result)[0] for result in results), strict=True)
    joined = [_join_parts(parts, a, mapping) for parts, a in zip(columns, axes, strict=True)]
    return _torch.tree_unflatten(joined, spec)


def _join_parts(parts: Sequence[Any], axis: int | None, mapping: Mapping) -> Any:
    if not isinstance(parts[0], Tensor):
        return parts[0]
    if axis is not None:
        return torch.cat(list(parts), axis)
    return sum(parts[1:], parts[0]) if mapping.sum_match else parts[0]
