"""How an operator is mapped over an axis: PyTorch's own rules, and those that a user registers.

A rule takes the arguments for all examples at once, and gives the outputs with the axis of each.
The signatures are those of `jax.interpreters.batching`:

    primitive_batchers[op](vals, dims, **params) -> (out, out_dim)
    axis_primitive_batchers[op](axis_size, axis_name, None, vals, dims, **params)
    spmd_axis_primitive_batchers[op](spmd_axis_name, axis_size, axis_name, None, vals, dims, ...)

`vals` are the tensors in the order of the schema, lists of tensors one by one; `params` are the
other arguments under the schema's names. An operator with several outputs gives lists.
"""

import functools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from torchremat import _torch
from torchremat.batching.axis_positions import canonical_axis, moveaxis
from torchremat.errors import RegistrationError, RegistrationTypeError, RuleError
from torchremat.tracing import ambient_state
from torchremat.tracing.axes.named_axes import frame_at

Rule = Callable[..., tuple[Any, Any]]


class BatchingRules(MutableMapping[_torch.OpOverload, Rule]):
    """A registry of batching rules, which hold wherever the operator is mapped while they stand.

    >>> import torch, torchremat as tr
    >>> sin = torch.ops.aten.sin.default
    >>> primitive_batchers[sin] = lambda vals, dims: (sin(vals[0]) + 1, dims[0])
    >>> tr.vmap(torch.sin)(torch.zeros(2))
    tensor([1., 1.])
    >>> del primitive_batchers[sin]
    >>> tr.vmap(torch.sin)(torch.zeros(2))
    tensor([0., 0.])
    """

    def __init__(self) -> None:
        self._rules: dict[_torch.OpOverload, Rule] = {}

    def __getitem__(self, op: _torch.OpOverload) -> Rule:
        return self._rules[op]

    def __setitem__(self, op: _torch.OpOverload, rule: Rule) -> None:
        if not isinstance(op, _torch.OpOverload):
            raise RegistrationTypeError(
                f"batching rules are registered for an OpOverload, such as "
                f"torch.ops.aten.sin.default, but {op!r} ({type(op).__name__}) was given"
            )
        self._rules[op] = rule
        _hook(op)

    def __delitem__(self, op: _torch.OpOverload) -> None:
        del self._rules[op]
        _unhook(op)

    def __iter__(self) -> Iterator[_torch.OpOverload]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)


primitive_batchers = BatchingRules()
axis_primitive_batchers = BatchingRules()
spmd_axis_primitive_batchers = BatchingRules()
rules_where_torch_has_none = BatchingRules()
"""The library's own rules; those of a user come first."""
_registries = (
    primitive_batchers,
    axis_primitive_batchers,
    spmd_axis_primitive_batchers,
    rules_where_torch_has_none,
)
_hooks: dict[_torch.OpOverload, Any] = {}
"""The hooks that call `_batch`, by operator."""


def _hook(op: _torch.OpOverload) -> None:
    ambient_state.Rules.changes += 1  # traces that were made with other rules are no longer valid
    if op not in _hooks:
        _hooks[op] = _torch.replace_batching_rule(op, functools.partial(_batch, op))


def _unhook(op: _torch.OpOverload) -> None:
    ambient_state.Rules.changes += 1
    if op in _hooks and not any(op in registry for registry in _registries):
        _torch.restore_batching_rule(_hooks.pop(op))


def _batch(op: _torch.OpOverload, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    rule = _find_rule(op)
    if rule is None:  # one for `spmd_axis_name`, and there is none
        return plain(*args, **kwargs)
    arguments = BatchedArguments.of(op, args, kwargs)
    with _torch.at_level_below() as level:
        found = [_torch.unwrap_batched_tensor(t, level.number) for t in arguments.tensors]
        vals, dims = [t for t, _ in found], [dim for _, dim in found]
        if all(dim is None for dim in dims):
            return arguments.call(vals)
        result: Any = rule(level.size, vals, dims, arguments.params)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise RuleError(
            f"the batching rule of {op} must give a pair: the output and its axis, or a list of "
            f"outputs and a list of their axes. It gave {result!r}"
        )
    return _wrap_outputs(op, result[0], result[1], level)


def _find_rule(op: _torch.OpOverload) -> Callable[..., tuple[Any, Any]] | None:
    frame = frame_at(_torch.transform_depth())
    name = None if frame is None else frame.name
    spmd = None if frame is None else frame.spmd_axis_name
    if op in primitive_batchers:
        return lambda size, vals, dims, params: primitive_batchers[op](vals, dims, **params)
    if op in spmd_axis_primitive_batchers and spmd is not None:
        rule = spmd_axis_primitive_batchers[op]
        return lambda size, vals, dims, params: rule(spmd, size, name, None, vals, dims, **params)
    if op in axis_primitive_batchers:
        rule = axis_primitive_batchers[op]
        return lambda size, vals, dims, params: rule(size, name, None, vals, dims, **params)
    if op in rules_where_torch_has_none:
        rule = rules_where_torch_has_none[op]
        return lambda size, vals, dims, params: rule(vals, dims, **params)
    return None


def _wrap_outputs(op: _torch.OpOverload, outputs: Any, dims: Any, level: _torch.VmapLevel) -> Any:
    if isinstance(outputs, Tensor):
        return _wrap_output(op, outputs, dims, level)
    if not isinstance(outputs, tuple | list) or not isinstance(dims, tuple | list):
        raise RuleError(
            f"the batching rule of {op} must give a tensor and its axis, or lists of tensors and "
            f"of axes: it gave {type(outputs).__name__} and {dims!r}"
        )
    if len(outputs) != len(dims):
        raise RuleError(
            f"the batching rule of {op} gave {len(outputs)} outputs and {len(dims)} axes"
        )
    pairs = zip(outputs, dims, strict=True)
    return tuple(_wrap_output(op, value, dim, level) for value, dim in pairs)


def _wrap_output(op: _torch.OpOverload, value: Any, dim: Any, level: _torch.VmapLevel) -> Any:
    if dim is None or not isinstance(value, Tensor):
        return value
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise RuleError(f"the batching rule of {op} must give an int or None as axis, not {dim!r}")
    axis = canonical_axis(dim, value.dim())
    if value.shape[axis] != level.size:
        raise RuleError(
            f"the batching rule of {op} says that axis {dim} of an output, the mapped one, has "
            f"{level.size} examples, but the output has the shape {tuple(value.shape)}"
        )
    return _torch.add_batch_dim(value, axis, level.number)


class BatchedArguments:
    """The arguments of an operator by name: its tensors in order, and its other parameters."""

    def __init__(self, op: _torch.OpOverload, given: dict[str, Any]) -> None:
        self.op = op
        self.given = given
        self.tensors = [t for value in given.values() for t in _tensors_in(value)]
        self.params = {n: v for n, v in given.items() if not any(True for _ in _tensors_in(v))}

    @classmethod
    def of(
        cls, op: _torch.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> "BatchedArguments":
        schema = _torch.schema_arguments(op)
        named = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
        return cls(op, {a.name: named.get(a.name, a.default_value) for a in schema})

    def call(self, tensors: Sequence[Tensor], **params: Any) -> Any:
        left = iter(tensors)
        filled = {name: _fill_holes(value, left) for name, value in self.given.items()} | params
        schema = _torch.schema_arguments(self.op)
        args = [filled[a.name] for a in schema if not a.kwarg_only]
        return self.op(*args, **{a.name: filled[a.name] for a in schema if a.kwarg_only})


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _fill_holes(value: Any, left: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(left)
    if isinstance(value, list | tuple):
        return [_fill_holes(item, left) for item in value]
    return value


def defvectorized(op: _torch.OpOverload) -> None:
    """`op` works on each number alone: the mapped axis stays where it is, the same in all inputs.

    Raises:
        RegistrationTypeError: (a `TypeError` and `ValueError`) if `op` is no `OpOverload`.

    >>> import torch, torchremat as tr
    >>> defvectorized(torch.ops.aten.sin.default)
    >>> tr.vmap(torch.sin, 1, 1)(torch.zeros(3, 2)).shape
    torch.Size([3, 2])
    >>> del primitive_batchers[torch.ops.aten.sin.default]
    """
    primitive_batchers[op] = functools.partial(_apply_vectorized, op)


def _apply_vectorized(
    op: _torch.OpOverload, vals: Sequence[Tensor], dims: Sequence[int | None], **params: Any
) -> tuple[Any, Any]:
    if any(dim != dims[0] for dim in dims[1:]):
        raise RuleError(
            f"{op} is registered by defvectorized, which needs the mapped axis at the same place "
            f"in all inputs, but it is at {list(dims)}: use defbroadcasting"
        )
    return _same_dims(_call(op, vals, params), dims[0])


def defbroadcasting(op: _torch.OpOverload) -> None:
    """`op` works on each number alone and broadcasts its inputs: the mapped axis is put in front.

    Raises:
        RegistrationTypeError: (a `TypeError` and `ValueError`) if `op` is no `OpOverload`.

    >>> import torch, torchremat as tr
    >>> defbroadcasting(torch.ops.aten.add.Tensor)
    >>> tr.vmap(torch.add, (0, None))(torch.ones(2), torch.ones(3)).shape
    torch.Size([2, 3])
    >>> del primitive_batchers[torch.ops.aten.add.Tensor]
    """
    primitive_batchers[op] = functools.partial(_apply_broadcasting, op)


def _apply_broadcasting(
    op: _torch.OpOverload, vals: Sequence[Tensor], dims: Sequence[int | None], **params: Any
) -> tuple[Any, Any]:
    shapes = {(tuple(v.shape), d) for v, d in zip(vals, dims, strict=True) if v.dim() > 0}
    if len(shapes) == 1 and None not in dims:
        return _same_dims(_call(op, vals, params), dims[0])
    rank = max(v.dim() - (d is not None) for v, d in zip(vals, dims, strict=True))
    lined_up = [_line_up(v, d, rank) for v, d in zip(vals, dims, strict=True)]
    return _same_dims(_call(op, lined_up, params), 0)


def _line_up(x: Tensor, dim: int | None, rank: int) -> Tensor:
    """`x` with the mapped axis first, then `rank` dimensions, new ones of size 1 before its own."""
    if dim is None:
        return x
    x = moveaxis(x, dim, 0)
    return x.reshape(x.shape[0], *[1] * (rank + 1 - x.dim()), *x.shape[1:])


def defreducer(op: _torch.OpOverload, dim: str = "dim") -> None:
    """`op` reduces one input over the dimensions that its argument `dim` names; none means all.

    One without such an argument, that reduces over all, is mapped by its overload that has one:
    `aten.sum.default` by `aten.sum.dim_IntList`.

    Raises:
        RegistrationTypeError: (a `TypeError` and `ValueError`) if `op` is no `OpOverload`.
        RegistrationError: (a `ValueError`) if no overload of it has such an argument.

    >>> import torch, torchremat as tr
    >>> amax = torch.ops.aten.amax.default
    >>> defreducer(amax)
    >>> tr.vmap(lambda x: x.amax(-1), 1)(torch.ones(3, 2, 4)).shape
    torch.Size([2, 3])
    >>> del primitive_batchers[amax]
    """
    rule = functools.partial(_reduce, op, dim)
    if isinstance(op, _torch.OpOverload) and dim not in _argument_types(op):
        rule = functools.partial(_reduce_all, _find_overload(op, dim), dim)
    primitive_batchers[op] = rule


def _argument_types(op: _torch.OpOverload) -> dict[str, str]:
    return {a.name: str(a.type) for a in _torch.schema_arguments(op)}


def _find_overload(op: _torch.OpOverload, dim: str) -> _torch.OpOverload:
    for name in op.overloadpacket.overloads():
        overload: _torch.OpOverload = getattr(op.overloadpacket, name)
        kinds = _argument_types(overload)
        is_of_one = (
            [*kinds.values()].count("Tensor") == 1 == len(_torch.schema_of(overload).returns)
        )
        if is_of_one and "int" in kinds.get(dim, ""):
            return overload
    raise RegistrationError(
        f"{op} has no argument {dim!r} that names dimensions: {_torch.schema_of(op)}"
    )


def _reduce_all(
    op: _torch.OpOverload,
    name: str,
    vals: Sequence[Tensor],
    dims: Sequence[int | None],
    **params: Any,
) -> tuple[Any, Any]:
    """By the overload `op`, over all that an example has: `[n, ...]` as `[n, -1]`."""
    (x,), (bdim,) = vals, dims
    assert bdim is not None
    flat = moveaxis(x, bdim, 0).reshape(x.shape[bdim], -1)
    return op(flat, **{name: 1}, **params), 0


def _reduce(
    op: _torch.OpOverload,
    name: str,
    vals: Sequence[Tensor],
    dims: Sequence[int | None],
    **params: Any,
) -> tuple[Any, Any]:
    (x,), (bdim,) = vals, dims
    if bdim is None:
        return _call(op, vals, params), None
    given = params[name]
    asked = [given] if isinstance(given, int) else list(given or ())
    rank = x.dim() - 1
    axes = [canonical_axis(a, rank) for a in asked] if asked else list(range(rank))
    shifted = [a + (a >= bdim) for a in axes]
    params = params | {name: shifted[0] if isinstance(given, int) else shifted}
    keeps = bool(params.get("keepdim", False))
    out_dim = bdim if keeps else bdim - sum(a < bdim for a in shifted)
    return _same_dims(_call(op, vals, params), out_dim)


def _call(op: _torch.OpOverload, vals: Sequence[Tensor], params: dict[str, Any]) -> Any:
    left = iter(vals)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for a in _torch.schema_arguments(op):
        if a.name in params:
            value = params[a.name]
        elif "Tensor[]" in str(a.type) or "List[Tensor]" in str(a.type):
            value = list(left)
        else:
            value = next(left)
        if a.kwarg_only:
            kwargs[a.name] = value
        else:
            args.append(value)
    return op(*args, **kwargs)


def _same_dims(outputs: Any, dim: int | None) -> tuple[Any, Any]:
    if isinstance(outputs, Tensor):
        return outputs, dim
    return list(outputs), [dim] * len(outputs)
