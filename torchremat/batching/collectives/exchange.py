from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchremat.batching.collectives.arguments import (
    Groups,
    check_group_sizes,
    find_group_size,
    find_names,
    map_leaves,
)
from torchremat.batching.collectives.collective_ops import (
    all_gather_p,
    all_to_all_p,
    ppermute_p,
    psum_scatter_p,
)
from torchremat.batching.collectives.reduce import axis_index, axis_size
from torchremat.core.source import current_source
from torchremat.errors import CollectiveError, PermutationError
from torchremat.tracing.axes.named_axes import AxisName, axes_in_scope, axis_frame

T = TypeVar("T")


def psum_scatter(
    x: T,
    axis_name: AxisName | Sequence[AxisName],
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> T:
    """The sum over all examples, of which each gets its part of one dimension.

    Args:
        x: a tree of tensors.
        axis_name: the axis to sum over, or a tuple of several.
        scatter_dimension: the dimension of `x` that is divided among the examples.
        axis_index_groups: lists of indices, all as long, that cover the axis.
        tiled: whether the dimension stays, divided by the size of the axis, of which it must be a
            multiple. Otherwise it is of that size and goes.

    Raises:
        NameError: if nothing around binds a name.
        ValueError: if the dimension is of another size, or the groups do not fit the axis.
        TypeError: for a leaf that is not a tensor.

    After `jax.lax.psum_scatter`.

    >>> import torch, torchremat as tr
    >>> tr.vmap(lambda x: tr.psum_scatter(x, "i"), axis_name="i")(torch.tensor([[1, 2], [3, 4]]))
    tensor([4, 6])
    """
    names = find_names("psum_scatter", axis_name, axis_index_groups)
    number = find_group_size("psum_scatter", axis_name, axis_index_groups)

    def scatter(leaf: Tensor) -> Tensor:
        dim = _check_dimension("psum_scatter", scatter_dimension, leaf.dim())
        _check_scatter(leaf.shape[dim], number, tiled)
        for name in names:
            params = check_group_sizes("psum_scatter", name, axis_index_groups)
            leaf = psum_scatter_p(
                leaf, axis_name=name, scatter_dimension=dim, tiled=tiled or len(names) > 1, **params
            )
        return leaf.squeeze(dim) if len(names) > 1 and not tiled else leaf

    return map_leaves("psum_scatter", scatter, x, only_tensors=True)


def all_gather(
    x: T,
    axis_name: AxisName | Sequence[AxisName],
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
) -> T:
    """Gather the values of all examples into one tensor that is the same for each.

    Args:
        x: a tree of tensors and numbers.
        axis_name: the axis to gather over, or a tuple of several.
        axis_index_groups: lists of indices, all as long, that cover the axis.
        axis: the dimension of the result along which the examples are.
        tiled: whether they are concatenated along it. Otherwise the dimension is a new one.

    Raises:
        NameError: if nothing around binds a name.
        ValueError: if there is no such dimension, or the groups do not fit the axis.
        TypeError: for a leaf that is neither tensor nor number.

    After `jax.lax.all_gather`.

    >>> import torch, torchremat as tr
    >>> x = torch.tensor([[1, 2], [3, 4]])
    >>> tr.vmap(lambda x: tr.all_gather(x, "i", tiled=True), out_axes=None, axis_name="i")(x)
    tensor([1, 2, 3, 4])
    """
    names = find_names("all_gather", axis_name, axis_index_groups)

    def gather(value: Any) -> Tensor:
        leaf: Tensor = torch.as_tensor(value)
        dim = _check_dimension("all_gather", axis, leaf.dim() + (not tiled))
        for number, name in enumerate(reversed(names)):
            params = check_group_sizes("all_gather", name, axis_index_groups)
            # examples along a second name are further ones along the same dimension
            onto = tiled or number > 0
            leaf = all_gather_p(leaf, axis_name=name, axis=dim, tiled=onto, **params)
        return leaf

    return map_leaves("all_gather", gather, x)


def all_to_all(
    x: T,
    axis_name: AxisName | Sequence[AxisName],
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> T:
    """Each example sends every other a part of one dimension, and concatenates what it gets.

    Args:
        x: a tree of tensors.
        axis_name: the axis of the examples, or a tuple of several.
        split_axis: the dimension of `x` that is divided among the examples.
        concat_axis: the dimension of the result along which the senders are.
        axis_index_groups: lists of indices, all as long, that cover the axis.
        tiled: whether both dimensions stay: that at `split_axis` is divided by the size of the
            axis, that at `concat_axis` multiplied. Otherwise the first is of that size and goes,
            and the second is new.

    Raises:
        NameError: if nothing around binds a name.
        ValueError: if the dimension is of another size, or the groups do not fit the axis.
        TypeError: for a leaf that is not a tensor.

    After `jax.lax.all_to_all`.

    >>> import torch, torchremat as tr
    >>> x = torch.tensor([[1, 2], [3, 4]])
    >>> tr.vmap(lambda x: tr.all_to_all(x, "i", 0, 0), axis_name="i")(x)
    tensor([[1, 3],
            [2, 4]])
    """
    names = find_names("all_to_all", axis_name, axis_index_groups)
    number = find_group_size("all_to_all", axis_name, axis_index_groups)

    def exchange(leaf: Tensor) -> Tensor:
        split = _check_dimension("all_to_all", split_axis, leaf.dim())
        concat = _check_dimension("all_to_all", concat_axis, leaf.dim())
        _check_split(leaf.shape[split], number, tiled, axis_name)
        if len(names) != 1:
            return _exchange_over(leaf, names, split, concat, tiled)
        params = check_group_sizes("all_to_all", names[0], axis_index_groups)
        return all_to_all_p(
            leaf, axis_name=names[0], split_axis=split, concat_axis=concat, tiled=tiled, **params
        )

    return map_leaves("all_to_all", exchange, x, only_tensors=True)


def _exchange_over(
    x: Tensor, names: Sequence[AxisName], split: int, concat: int, tiled: bool
) -> Tensor:
    """Sizes 2 and 3 of the names divide the split dimension of 6 * n into [2, 3, n]."""
    sizes = [axis_frame(name).size for name in names]
    x = x.unflatten(split, (*sizes, -1)).movedim(split + len(sizes), 0)
    x = x.movedim([split + 1 + i for i in range(len(sizes))], [*range(len(sizes))])
    for i, name in enumerate(names):
        params = check_group_sizes("all_to_all", name, None)
        x = all_to_all_p(x, axis_name=name, split_axis=i, concat_axis=i, tiled=False, **params)
    senders = x.flatten(0, len(sizes) - 1) if sizes else x.unsqueeze(0)
    rest = senders.movedim(1, split + 1) if tiled else senders.squeeze(1)
    y = rest.movedim(0, concat)
    return y.flatten(concat, concat + 1) if tiled else y


def ppermute(x: T, axis_name: AxisName | Sequence[AxisName], perm: Sequence[tuple[int, int]]) -> T:
    """Give each example what another has.

    Args:
        x: a tree of tensors and numbers.
        axis_name: the axis of the examples, or a tuple of several.
        perm: pairs of an index whose value is taken and of one that gets it. Each index of the
            axis is once in first place and once in second. Under `pmap` and over processes pairs
            may be missing; an example that no pair names gets zeros.

    Raises:
        NameError: if nothing around binds a name.
        ValueError: (also an `AssertionError`) if an index is missing, is there twice, or is none
            of the axis.
        TypeError: for a leaf that is neither tensor nor number.

    After `jax.lax.ppermute`.

    >>> import torch, torchremat as tr
    >>> ring = [(0, 1), (1, 2), (2, 0)]
    >>> tr.vmap(lambda x: tr.ppermute(x, "i", ring), axis_name="i")(torch.tensor([5, 6, 7]))
    tensor([7, 5, 6])
    """
    names = find_names("ppermute", axis_name, None)
    pairs = tuple((int(src), int(dst)) for src, dst in perm)
    size = axis_size(axis_name)
    among_processes = any(axis_frame(name).group is not None for name in names)
    may_miss = among_processes or any(f.num_devices and f.name in names for f in axes_in_scope())
    _check_permutation(pairs, size, axis_name, partial=may_miss)

    def permute(leaf: Any) -> Any:
        if len(names) == 1 and among_processes:
            leaf = torch.as_tensor(leaf)
            return ppermute_p(leaf, axis_name=names[0], perm=pairs, axis_size=size)
        if not isinstance(leaf, Tensor) and len(pairs) == size:
            return leaf
        if len(names) == 1 and len(pairs) == size:
            return ppermute_p(leaf, axis_name=names[0], perm=pairs)
        return _permute_gathered(torch.as_tensor(leaf), axis_name, dict((d, s) for s, d in pairs))

    return map_leaves("ppermute", permute, x)


def _permute_gathered(
    x: Tensor, axis_name: AxisName | Sequence[AxisName], source_of: dict[int, int]
) -> Tensor:
    sources = [source_of.get(i, 0) for i in range(axis_size(axis_name))]
    index = axis_index(axis_name, device=x.device).reshape(1)
    mine = torch.tensor(sources, device=x.device).index_select(0, index)
    y = all_gather(x, axis_name).index_select(0, mine).squeeze(0)
    if len(source_of) == len(sources):
        return y
    gets = [i in source_of for i in range(len(sources))]
    return torch.where(torch.tensor(gets, device=x.device).index_select(0, index)[0], y, 0)


def pshuffle(x: T, axis_name: AxisName | Sequence[AxisName], perm: Sequence[int]) -> T:
    """Give each example what another has: `ppermute`, with the sources alone.

    Args:
        x: a tree of tensors and numbers.
        axis_name: the axis of the examples, or a tuple of several.
        perm: for each example, the index of the one whose value it gets.

    Raises:
        As `ppermute`.

    After `jax.lax.pshuffle`.

    >>> import torch, torchremat as tr
    >>> x = torch.tensor([5, 6, 7])
    >>> tr.vmap(lambda x: tr.pshuffle(x, "i", [2, 0, 1]), axis_name="i")(x)
    tensor([7, 5, 6])
    """
    if sorted(perm) != [*range(len(perm))]:
        raise PermutationError(
            f"`perm` does not represent a permutation: {perm}, at {current_source()}. It has each "
            f"of 0, ..., {len(perm) - 1} once: perm[k] is where example k gets its value from"
        )
    return ppermute(x, axis_name, [(src, dst) for dst, src in enumerate(perm)])


def _check_dimension(function: str, dim: int, rank: int) -> int:
    if not -rank <= dim < rank:
        raise CollectiveError(
            f"axis {dim} is out of bounds for array of dimension {rank}: {function} at "
            f"{current_source()}, whose tensor has so many, a new one counted too"
        )
    return dim % rank


def _check_scatter(size: int, number: int, tiled: bool) -> None:
    if tiled and size % number:
        raise CollectiveError(
            f"tiled reduce_scatter operand scatter dimension size {size} must be divisible by "
            f"shard_count {number}: psum_scatter at {current_source()}"
        )
    if not tiled and size != number:
        raise CollectiveError(
            f"reduce_scatter operand scatter dimension size {size} must match shard count "
            f"{number}: psum_scatter at {current_source()}; tiled=True takes a multiple of it"
        )


def _check_split(size: int, number: int, tiled: bool, axis_name: AxisName) -> None:
    if tiled and size % number:
        raise CollectiveError(
            f"The size of all_to_all split_axis ({size}) has to be divisible by the size of the "
            f"named axis {axis_name} ({number}), at {current_source()}"
        )
    if not tiled and size != number:
        raise CollectiveError(
            "all_to_all requires the size of the mapped axis axis_name to equal "
            f"x.shape[split_axis], but they are {number} and {size} respectively, at "
            f"{current_source()}. With tiled=True it may be a multiple."
        )


def _check_permutation(
    perm: tuple[tuple[int, int], ...], size: int, axis_name: AxisName, *, partial: bool
) -> None:
    sources, destinations = {src for src, _ in perm}, {dst for _, dst in perm}
    at = f"at {current_source()}"
    if len(sources) < len(perm) or len(destinations) < len(perm):
        raise PermutationError(
            f"ppermute sources and destinations must be unique, got {perm}, {at}: example dst of a "
            "pair (src, dst) gets the value of src"
        )
    if wrong := sorted(i for i in sources | destinations if not 0 <= i < size):
        raise PermutationError(
            f"ppermute was given the index {wrong[0]} in {perm}, {at}: the axis {axis_name!r} has "
            f"the indices 0, ..., {size - 1}"
        )
    if len(perm) != size and not partial:
        raise PermutationError(
            f"Permutation doesn't match the axis size! The axis {axis_name!r} is of size {size}, "
            f"and perm has {len(perm)} pairs, {perm}, {at}. Under vmap every example gets a value; "
            f"for zeros choose them: torch.where(tr.axis_index({axis_name!r}) == k, 0, y)"
        )
