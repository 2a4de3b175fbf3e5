"""Rules by which `vmap` maps operators of PyTorch, where its own are missing or wrong.

They hold for all of the process, as PyTorch's do.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch

aten = torch.ops.aten


@cache
def let_vmap_scatter() -> tuple[object, ...]:
    """Register rules for what writes become in a graph; they hold as long as what is returned."""
    rules: dict[_torch.OpOverload, Callable[..., Any]] = {
        aten.select_scatter.default: _scatter_slice,
        aten.as_strided_scatter.default: _scatter_strided,
    }
    return tuple(_torch.replace_batching_rule(op, rule) for op, rule in rules.items())


@cache
def let_vmap_decompose() -> tuple[object, ...]:
    """Register rules for composite operators; they hold as long as what is returned."""
    composites = [op for op in _torch.find_unmapped_composites() if not _draws(op)]
    return tuple(_torch.replace_batching_rule(op, _decompose(op)) for op in composites)


def _draws(op: _torch.OpOverload) -> bool:
    """Whether `op` may draw random numbers: decomposed here it would not ask `vmap` how."""
    return any(argument.name == "dropout" for argument in _torch.schema_arguments(op))


def _scatter_slice(plain: Any, x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """Map `select_scatter`, which a write `x[i] = y` becomes, as `slice_scatter`.

    PyTorch's rule scatters `y` to the same indices many times, so that its gradient is as many
    times too large.
    """
    del plain
    start = index % x.shape[dim]
    return torch.slice_scatter(x, source.unsqueeze(dim), dim, start, start + 1)


def _scatter_strided(
    plain: Any,
    x: Tensor,
    source: Tensor,
    size: list[int],
    stride: list[int],
    storage_offset: int | None = None,
) -> Tensor:
    """Map `as_strided_scatter`, which the derivative of `as_strided` becomes in a graph.

    PyTorch has no rule. As in its rule for `as_strided`, strides are those of each example.
    """
    del plain
    with _torch.at_level_below() as level:
        x, x_dim = _torch.unwrap_batched_tensor(x, level.number)
        source, source_dim = _torch.unwrap_batched_tensor(source, level.number)
        x = _repeat_storage(x, level.size) if x_dim is None else x.movedim(x_dim, 0)
        if x.stride(0) == 0:  # all examples lie in the same memory
            x = _repeat_storage(x[0], level.size)
        if source_dim is None:
            source = source.expand(level.size, *source.shape)
        else:
            source = source.movedim(source_dim, 0)
        size, stride = [level.size, *size], [x.stride(0), *stride]
        result = aten.as_strided_scatter.default(x, source, size, stride, storage_offset)
    return _torch.add_batch_dim(result, 0, level.number)


def _repeat_storage(x: Tensor, size: int) -> Tensor:
    """`size` copies of `x`, each laid out in memory as `x` is."""
    start = _torch.offset_of(x)
    ends = [(n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)]
    length = start + (1 + sum(ends) if x.numel() else 0)
    copies = x.as_strided([length], [1], 0).expand(size, length).contiguous()
    return copies.as_strided([size, *x.shape], [length, *x.stride()], start)


def _decompose(op: _torch.OpOverload) -> Callable[..., Any]:
    """Run `op` as the operators that it is composed of.

    Autograd decomposes it, so that `vmap` of `grad` needs no rule. `vmap` alone has none.
    """

    def run(plain: Any, *args: Any, **kwargs: Any) -> Any:
        del plain
        return op.decompose(*args, **kwargs)

    return run
