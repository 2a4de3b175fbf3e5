"""Collectives: what the examples under a `vmap(..., axis_name="i")` do together.

An inner axis hides an outer one of the same name. A result that is the same for all examples is not
mapped over, so that `out_axes=None` is right for it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.batching.collectives.arguments import (
    Groups,
    check_groups,
    find_group_size,
    find_names,
    map_leaves,
)
from torchremat.batching.collectives.collective_ops import axis_index_p, pmax_p, pmin_p, psum_p
from torchremat.tracing.axes.named_axes import AxisName, as_names, axis_frame, parts_of

T = TypeVar("T")


def axis_size(axis_name: AxisName | Sequence[AxisName]) -> int:
    """The size of a named axis, as a Python number; of several, their product.

    Args:
        axis_name: the name, or a tuple of names.

    Raises:
        NameError: if nothing around binds a name.

    After `jax.lax.axis_size`.

    >>> import torch, torchremat as tr
    >>> tr.vmap(lambda x: x / tr.axis_size("i"), axis_name="i")(torch.ones(4))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    return math.prod(axis_frame(name).size for name in as_names(axis_name))


def axis_index(
    axis_name: AxisName | Sequence[AxisName], *, device: torch.device | str | None = None
) -> Tensor:
    """The index of this example along a named axis: an `int64` tensor without dimensions.

    Args:
        axis_name: the name, or a tuple of names, whose examples are numbered in row-major order.
        device: where the tensor is; by default where PyTorch makes tensors.

    Raises:
        NameError: if nothing around binds a name.

    After `jax.lax.axis_index`.

    >>> import torch, torchremat as tr
    >>> tr.vmap(lambda x: x * tr.axis_index("i"), axis_name="i")(torch.ones(3))
    tensor([0., 1., 2.])
    """
    where: dict[str, Any] = {} if device is None else {"device": torch.device(device)}
    names = [part for name in as_names(axis_name) for part in parts_of(name)]
    sizes = [axis_size(name) for name in names]
    indices = [axis_index_p(axis_name=name, **where) for name in names]
    if not indices:
        return torch.zeros((), dtype=torch.int64, **where)
    total = indices[0]
    for index, size in zip(indices[1:], sizes[1:], strict=True):
        total = total * size + index
    return total


def psum(x: T, axis_name: AxisName | Sequence[AxisName], *, axis_index_groups: Groups = None) -> T:
    """The sum over all examples, the same for each.

    Args:
        x: a tree of tensors and numbers. Of what does not vary along the axis the sum is the size
            times it, a Python number of a number. Bools are counted (`int64`); other dtypes stay.
        axis_name: the axis to sum over, or a tuple of several.
        axis_index_groups: lists of indices that cover the axis: sums in each group by itself.

    Raises:
        NameError: if nothing around binds a name.
        ValueError: if the groups do not cover the axis exactly once.
        TypeError: for a leaf that is neither tensor nor number.

    The gradient of a sum is the sum of what the examples' cotangents are. After `jax.lax.psum`.

    >>> import torch, torchremat as tr
    >>> tr.vmap(lambda x: x / tr.psum(x, "i"), axis_name="i")(torch.tensor([1.0, 3.0]))
    tensor([0.2500, 0.7500])
    >>> tr.vmap(lambda x: tr.psum(x, "i"), out_axes=None, axis_name="i")(torch.arange(5))
    tensor(10)
    """

    def count(leaf: Any, name: AxisName, params: dict[str, Any]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf * find_group_size("psum", name, axis_index_groups)
        return psum_p(leaf.long() if leaf.dtype == torch.bool else leaf, axis_name=name, **params)

    return _reduce("psum", x, axis_name, axis_index_groups, count)


def pmean(x: T, axis_name: AxisName | Sequence[AxisName], *, axis_index_groups: Groups = None) -> T:
    """The mean over all examples: `psum(x)` divided by the number of them.

    Arguments and errors are those of `psum`. The groups must be of one size. The mean of integers
    is a floating-point number. After `jax.lax.pmean`.

    >>> import torch, torchremat as tr
    >>> tr.vmap(lambda x: x - tr.pmean(x, "i"), axis_name="i")(torch.tensor([1.0, 3.0]))
    tensor([-1.,  1.])
    """
    size: int = psum(1, axis_name, axis_index_groups=axis_index_groups)
    total = psum(x, axis_name, axis_index_groups=axis_index_groups)
    return _torch.tree_map(lambda leaf: None if leaf is None else leaf / size, total)  # type: ignore[no-any-return]


def pmax(x: T, axis_name: AxisName | Sequence[AxisName], *, axis_index_groups: Groups = None) -> T:
    """The maximum over all examples, elementwise.

    Arguments and errors are those of `psum`. Examples that share the maximum share the gradient, as
    in `torch.amax`; JAX has none. A NaN is above all numbers. After `jax.lax.pmax`.

    >>> import torch, torchremat as tr
    >>> tr.vmap(lambda x: tr.pmax(x, "i"), out_axes=None, axis_name="i")(torch.tensor([1.0, 3.0]))
    tensor(3.)
    """

    def largest(leaf: Any, name: AxisName, params: dict[str, Any]) -> Any:
        return pmax_p(leaf, axis_name=name, **params) if isinstance(leaf, Tensor) else leaf

    return _reduce("pmax", x, axis_name, axis_index_groups, largest)


def pmin(x: T, axis_name: AxisName | Sequence[AxisName], *, axis_index_groups: Groups = None) -> T:
    """The minimum over all examples, elementwise.

    As `pmax`. After `jax.lax.pmin`.

    >>> import torch, torchremat as tr
    >>> tr.vmap(lambda x: tr.pmin(x, "i"), out_axes=None, axis_name="i")(torch.tensor([1.0, 3.0]))
    tensor(1.)
    """

    def least(leaf: Any, name: AxisName, params: dict[str, Any]) -> Any:
        return pmin_p(leaf, axis_name=name, **params) if isinstance(leaf, Tensor) else leaf

    return _reduce("pmin", x, axis_name, axis_index_groups, least)


def _reduce(
    function: str,
    x: T,
    axis_name: AxisName | Sequence[AxisName],
    groups: Groups,
    reduce: Callable[[Any, AxisName, dict[str, Any]], Any],
) -> T:
    names = find_names(function, axis_name, groups)
    params = check_groups(function, names[0], groups) if names else {}

    def over_all(leaf: Any) -> Any:
        for name in reversed(names):
            leaf = reduce(leaf, name, params)
        return leaf

    return map_leaves(function, over_all, x)
