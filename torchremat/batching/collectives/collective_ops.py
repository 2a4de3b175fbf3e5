"""The operators of the collectives, each over one named axis, with their rules.

A trace, in which the axis cannot be reached, records the operator itself. Levels of `torch.func`
other than that of the axis pass it to the next level. The `torch.vmap` of the axis computes it, on
tensors in which the axis is a dimension:

    psum                y = sum_j x_j               y does not vary
    pmax                y = max_j x_j               y does not vary
    all_gather          y = [x_0, x_1, ...]         y does not vary
    psum_scatter        y_k = sum_j x_j[k]
    all_to_all          y_k = [x_0[k], x_1[k], ...]
    ppermute            y_dst = x_src
    axis_index          y_k = k

Where the axis is one of processes, the operator names the `group`. Every level passes it to the
next one then, and `over_processes` computes it.

Each example has a cotangent of its own, also for a result that does not vary:

    psum                dx = psum(dy)               all_to_all      dx = all_to_all(dy), back
    all_gather          dx = psum_scatter(dy)       ppermute        dx = ppermute(dy), back
    psum_scatter        dx = all_gather(dy)         pmax            dx = psum(dy) / number of ties,
                                                                    where x is y
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.upper_rooms import load_rooms
from torchremat.errors import AxisNameError, CollectiveError, PermutationError
from torchremat.tracing.axes.named_axes import AxisName, axis_frame, frame_at, group_of

Params = dict[str, Any]
Mapped = tuple[Tensor, int | None]
"""A tensor, and which dimension is the axis; `None` if the tensor does not vary along it."""


class _InCompiler(threading.local):
    depth = 0


_in_compiler = _InCompiler()


@contextmanager
def as_c10d_ops() -> Iterator[None]:
    """Compilers know the operators of `torch.distributed` (c10d), and none of ours."""
    _in_compiler.depth += 1
    try:
        yield
    finally:
        _in_compiler.depth -= 1


class CollectiveOp(_torch.HigherOrderOperator):
    """An operator over a named axis: `psum[axis_name='i'] x`. It may be recomputed freely."""

    is_over_axis = True
    over_processes: ClassVar[Callable[..., Tensor] | None] = None
    """Computes it over processes, given it, tensors and params. `torchremat.parallel` sets it."""
    implementation: Callable[..., "Mapped"]
    """Computes it on a tensor whose first dimension is the axis."""

    @property
    def title(self) -> str:
        return str(self.name())  # type: ignore[no-untyped-call]

    def __call__(self, /, *tensors: Tensor, **params: Any) -> Tensor:
        living = map(_torch.without_dead_levels, tensors)
        if "group" not in params and (group := group_of(params["axis_name"])) is not None:
            params["group"] = group
        if "group" in params and _in_compiler.depth:
            return _run_over_processes(self, *living, **params)
        return super().__call__(*living, **params)  # type: ignore[no-any-return,no-untyped-call]


def _define(
    name: str,
    function: type[torch.autograd.Function] | None,
    implementation: Callable[..., Mapped],
    unmapped: Callable[..., Mapped],
    shape: Callable[..., Sequence[int]],
) -> CollectiveOp:
    """`implementation` takes a tensor whose first dimension is the axis. `unmapped` takes one that
    does not vary, and the size of the axis. `shape` computes the shape for one example.
    """
    op = CollectiveOp(name)  # type: ignore[no-untyped-call]
    op.implementation = implementation

    def apply_batched(
        level: int, size: int, x: Mapped, /, *, axis_name: AxisName, **params: Any
    ) -> Mapped:
        value, dim = x
        if not _is_over(level, axis_name, params):
            if dim is None:
                return op(value, axis_name=axis_name, **params), None
            return op(
                _move_to_front(value, dim), axis_name=axis_name, **_shift_dimensions(params, 1)
            ), 0
        check_size(name, axis_name, size, params)
        if "axis_index_groups" in params:
            value = value.expand(size, *value.shape) if dim is None else _move_to_front(value, dim)
            return _run_in_groups(implementation, value, **params), 0
        return unmapped(value, size, **params) if dim is None else implementation(
            _move_to_front(value, dim), **params
        )  # fmt: skip

    def run(x: Tensor, *, axis_name: AxisName, **params: Any) -> Tensor:
        if not _torch.is_faking():
            return _run_over_processes(op, x, axis_name=axis_name, **params)
        seen = {k: v for k, v in params.items() if k not in ("axis_index_groups", "group")}
        return x.new_empty(shape(x.shape, **seen))

    _torch.register_simple_rules(op, run)
    _torch.register_axis_rules(op, function, apply_batched)
    return op


def _is_over(level: int, axis_name: AxisName, params: Params) -> bool:
    frame = frame_at(level)
    return "group" not in params and frame is not None and frame.name == axis_name


def _run_over_processes(op: CollectiveOp, *tensors: Tensor, **params: Any) -> Tensor:
    if "group" not in params:
        raise _make_out_of_reach_error(op.title, params["axis_name"])
    load_rooms("collectives over processes")
    return CollectiveOp.over_processes(op, *tensors, **params)  # type: ignore[misc]


def _move_to_front(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, 0) if dim else x


_DIMENSIONS = ("axis", "scatter_dimension", "split_axis", "concat_axis")
"""Keywords for dimensions of one example, none of them negative."""


def _shift_dimensions(params: Params, by: int) -> Params:
    return {key: value + by if key in _DIMENSIONS else value for key, value in params.items()}


def _make_out_of_reach_error(name: str, axis_name: AxisName) -> AxisNameError:
    axis_frame(axis_name)  # raises if there is none
    return AxisNameError(
        f"unbound axis name: {axis_name}. {name} runs where the axis cannot be reached: a graph "
        "that was traced in the scope of the axis runs by itself. Run it under "
        f"vmap(..., axis_name={axis_name!r})."
    )


def check_size(name: str, axis_name: AxisName, size: int, params: Params) -> None:
    """Raise if the axis has another size than the one that was traced."""
    groups, perm = params.get("axis_index_groups"), params.get("perm")
    if groups is not None:
        traced = sum(map(len, groups))
    else:
        traced = params.get("axis_size", size if perm is None else len(perm))
    if traced != size:
        error = CollectiveError if perm is None else PermutationError
        raise error(
            f"{name} was traced for an axis {axis_name!r} of size {traced}, and is applied over "
            f"one of size {size}: trace the function again in the scope of that axis"
        )


def _run_in_groups(
    implementation: Callable[..., Mapped],
    x: Tensor,
    *,
    axis_index_groups: tuple[tuple[int, ...], ...],
    **params: Any,
) -> Tensor:
    parts: list[Tensor] = []
    for group in axis_index_groups:
        y, dim = implementation(torch.stack([x[i] for i in group]), **params)
        parts += [y] * len(group) if dim is None else y.unbind(dim)
    members = [i for group in axis_index_groups for i in group]
    return torch.stack([part for _, part in sorted(zip(members, parts, strict=True), key=_first)])


def _first(pair: tuple[int, Tensor]) -> int:
    return pair[0]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(run: Any, op: CollectiveOp, params: Params, x: Tensor) -> Tensor:
        return run(x)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, ctx.op, ctx.params, _ = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        op, params = _transpose_op(ctx.op, ctx.params)
        return None, None, None, op(cotangent, **params)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, ___: None, tangent: Tensor) -> Tensor:
        return ctx.op(tangent, **ctx.params)  # type: ignore[no-any-return]


def _transpose_op(op: CollectiveOp, params: Params) -> tuple[CollectiveOp, Params]:
    given = dict(params)
    if op is all_gather_p:
        return psum_scatter_p, given | {"scatter_dimension": given.pop("axis")}
    if op is psum_scatter_p:
        return all_gather_p, given | {"axis": given.pop("scatter_dimension")}
    if op is all_to_all_p:
        back = {"split_axis": given["concat_axis"], "concat_axis": given["split_axis"]}
        return op, given | back
    if op is ppermute_p:
        return op, given | {"perm": tuple((dst, src) for src, dst in given["perm"])}
    return op, params


class _AxisExtremum(torch.autograd.Function):
    """JAX has no such rule. Ties share the cotangent, as those of `amax` do."""

    @staticmethod
    def forward(run: Any, op: CollectiveOp, params: Params, x: Tensor) -> Tensor:
        return run(x)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, _, ctx.params, x = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        is_best, num_best = _find_ties(ctx)
        share = psum_p(cotangent, **ctx.params) / num_best
        return None, None, None, torch.where(is_best, share, 0)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, ___: None, tangent: Tensor) -> Tensor:
        is_best, num_best = _find_ties(ctx)
        return psum_p(torch.where(is_best, tangent, 0), **ctx.params) / num_best


def _find_ties(ctx: Any) -> tuple[Tensor, Tensor]:
    x, best = (t.detach() for t in ctx.saved_tensors)
    is_best = (x == best) | (x.isnan() & best.isnan())
    return is_best, psum_p(is_best.to(x.dtype), **ctx.params)


def _same(shape: Sequence[int], **_: Any) -> Sequence[int]:
    return shape


def _keep_axis(x: Tensor, size: int, **_: Any) -> Mapped:
    return x, None


psum_p = _define(
    "psum",
    _Linear,
    lambda x: (x.sum(0, dtype=x.dtype), None),
    lambda x, size: (x * size, None),
    _same,
)
pmax_p = _define("pmax", _AxisExtremum, lambda x: (x.amax(0), None), _keep_axis, _same)
pmin_p = _define("pmin", _AxisExtremum, lambda x: (x.amin(0), None), _keep_axis, _same)


def _permute(x: Tensor, *, perm: Sequence[tuple[int, int]]) -> Mapped:
    sources = [src for src, _ in sorted(perm, key=lambda pair: pair[1])]
    return x[sources], 0


ppermute_p = _define("ppermute", _Linear, _permute, _keep_axis, _same)


def _gather(x: Tensor, *, axis: int, axis_size: int, tiled: bool) -> Mapped:
    y = x.movedim(0, axis)
    return (y.flatten(axis, axis + 1) if tiled else y), None


def _gather_same(x: Tensor, size: int, **params: Any) -> Mapped:
    return _gather(x.expand(size, *x.shape), **params)


def _gather_sizes(shape: Sequence[int], *, axis: int, axis_size: int, tiled: bool) -> Sequence[int]:
    before, after = shape[:axis], shape[axis:]
    return (*before, axis_size * after[0], *after[1:]) if tiled else (*before, axis_size, *after)


all_gather_p = _define("all_gather", _Linear, _gather, _gather_same, _gather_sizes)


def _scatter(x: Tensor, *, scatter_dimension: int, axis_size: int, tiled: bool) -> Mapped:
    return _scatter_sum(x.sum(0, dtype=x.dtype), scatter_dimension, axis_size, tiled)


def _scatter_same(
    x: Tensor, size: int, *, scatter_dimension: int, axis_size: int, tiled: bool
) -> Mapped:
    return _scatter_sum(x * size, scatter_dimension, axis_size, tiled)


def _scatter_sum(total: Tensor, dim: int, axis_size: int, tiled: bool) -> Mapped:
    return (total.unflatten(dim, (axis_size, -1)) if tiled else total), dim


def _scatter_sizes(
    shape: Sequence[int], *, scatter_dimension: int, axis_size: int, tiled: bool
) -> Sequence[int]:
    before, size, after = (
        shape[:scatter_dimension],
        shape[scatter_dimension],
        shape[scatter_dimension + 1 :],
    )
    return (*before, size // axis_size, *after) if tiled else (*before, *after)


psum_scatter_p = _define("psum_scatter", _Linear, _scatter, _scatter_same, _scatter_sizes)


def _exchange(
    x: Tensor, *, split_axis: int, concat_axis: int, axis_size: int, tiled: bool
) -> Mapped:
    """Receivers come first, then senders, which end up at `concat_axis`."""
    split = split_axis + 1
    chunks = x.unflatten(split, (axis_size, -1)) if tiled else x
    y = chunks.movedim(split, 0).movedim(1, concat_axis + 1)
    return (y.flatten(concat_axis + 1, concat_axis + 2) if tiled else y), 0


def _exchange_same(x: Tensor, size: int, **params: Any) -> Mapped:
    return _exchange(x.expand(size, *x.shape), **params)


def _exchange_sizes(
    shape: Sequence[int], *, split_axis: int, concat_axis: int, axis_size: int, tiled: bool
) -> Sequence[int]:
    sizes = list(shape)
    if tiled:
        sizes[split_axis] //= axis_size
        sizes[concat_axis] *= axis_size
    else:
        sizes.insert(concat_axis, sizes.pop(split_axis))
    return sizes


all_to_all_p = _define("all_to_all", _Linear, _exchange, _exchange_same, _exchange_sizes)


def _define_axis_index() -> CollectiveOp:
    op = CollectiveOp("axis_index")  # type: ignore[no-untyped-call]

    def apply_batched(level: int, size: int, *, axis_name: AxisName, **device: Any) -> Mapped:
        if not _is_over(level, axis_name, device):
            return op(axis_name=axis_name, **device), None
        return torch.arange(size, **device), 0

    def run(*, axis_name: AxisName, group: str | None = None, **device: Any) -> Tensor:
        if _torch.is_faking():
            return torch.empty((), dtype=torch.int64, **device)
        given = {} if group is None else {"group": group}
        return _run_over_processes(op, axis_name=axis_name, **given, **device)

    _torch.register_simple_rules(op, run)
    _torch.register_axis_rules(op, None, apply_batched)
    return op


axis_index_p = _define_axis_index()
