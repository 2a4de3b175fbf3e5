from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.batching.ragged.pile_type import EltTy, IndexedSize, SizeVar
from torchremat.batching.ragged.pile_type import PileTy as PileTy
from torchremat.errors import RaggedError, RaggedTypeError
from torchremat.kernels.segments.segments import offsets_of


@dataclass(frozen=True)
class ConcatAxis:
    """The spec of a batch axis along which elements of different sizes are concatenated."""

    def __repr__(self) -> str:
        return "pile_axis"


pile_axis = ConcatAxis()
"""In `in_axes` and `out_axes` of `vmap`: a `Pile` comes in, or goes out."""


class Pile:
    """A batch of tensors that have different sizes in one dim, or in several.

    The data are concatenated along that dim; the others are dense. If elements differ in several
    dims, `data` has one dim: the entries of one element in their order, then those of the next. If
    they differ in none, `data` has a batch dim in front. A `Pile` is a tree of PyTorch's: its
    lengths and its data are leaves.

    Args:
        aval: what the elements are like, with lengths `[length]` of int64.
        data: the entries.

    >>> import torch
    >>> pile = Pile.from_list([torch.arange(3), torch.arange(1), torch.arange(4)])
    >>> pile.data
    tensor([0, 1, 2, 0, 0, 1, 2, 3])
    >>> pile[2], len(pile)
    (tensor([0, 1, 2, 3]), 3)
    >>> pile.aval.elt_ty.shape[0].lengths
    tensor([3, 1, 4])
    """

    def __init__(self, aval: PileTy, data: Tensor) -> None:
        self.aval = aval
        self.data = data

    @classmethod
    def from_list(cls, tensors: Sequence[Tensor], dim: int | Sequence[int] | None = None) -> "Pile":
        """A pile of copies of `tensors`.

        Args:
            tensors: of one rank, dtype and device.
            dim: the dims whose size may differ; by default those in which it does, or else dim 0.

        Raises:
            RaggedTypeError: for what are no tensors, and ranks, dtypes or devices that differ.
            RaggedError: if there are none, or sizes differ in other dims than `dim`.

        >>> import torch
        >>> Pile.from_list([torch.ones(2, 5), torch.ones(0, 5)]).data.shape
        torch.Size([2, 5])
        """
        tensors = list(tensors)
        _check_alike(tensors)
        shapes = [tuple(t.shape) for t in tensors]
        dims = _dims_that_differ(shapes, dim)
        device = tensors[0].device
        lengths = [torch.tensor([s[d] for s in shapes], device=device) for d in dims]
        longest = [round_up_to_power(max(s[d] for s in shapes)) for d in dims]
        data = torch.cat(tensors, dims[0]) if len(dims) == 1 else _flatten_entries(tensors)
        return cls.of(data, lengths, dims, shapes[0], longest)

    @classmethod
    def of(
        cls,
        data: Tensor,
        lengths: Sequence[Tensor],
        dims: Sequence[int],
        shape: Sequence[Any],
        longest: Sequence[int] | None = None,
    ) -> "Pile":
        """The pile with `data` and, for each of the `dims` of an element that differ, `lengths`.

        `shape` is that of an element; what it says of `dims` does not matter. `longest` are bounds
        of the lengths, which else are read.
        """
        binder = SizeVar()
        sizes: list[Any] = list(shape)
        for i, dim in enumerate(dims):
            bound = _read_longest(lengths[i]) if longest is None else longest[i]
            sizes[dim] = IndexedSize(binder, lengths[i], bound)
        count = lengths[0].shape[0] if lengths else data.shape[0]
        return cls(PileTy(binder, count, EltTy(tuple(sizes), data.dtype)), data)

    @property
    def lengths(self) -> Tensor:
        """`[length]`: the size of each element in the (first) dim that differs."""
        return self._lengths[0]

    @property
    def _lengths(self) -> list[Tensor]:
        sizes = [self.aval.elt_ty.shape[d] for d in self.aval.elt_ty.ragged_dims]
        if not sizes:
            raise RaggedError(f"the elements of this pile all have one shape: {self.aval}")
        return [size.lengths for size in sizes]

    @cached_property
    def offsets(self) -> Tensor:
        """`[length + 1]`: where each element begins along the dim that is concatenated."""
        lengths = self._lengths
        if len(lengths) == 1:
            return offsets_of(lengths[0])
        rest = prod(s for s in self.aval.elt_ty.shape if not isinstance(s, IndexedSize))
        return offsets_of(prod(lengths) * rest)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Where the data are."""
        return self.data.device

    def __len__(self) -> int:
        return self.aval.length

    def __repr__(self) -> str:
        return f"Pile({self.aval}, data={self.data!r})"

    def to_list(self) -> list[Tensor]:
        """The elements: views of the data, where these are concatenated along one dim.

        >>> import torch
        >>> Pile.from_list([torch.ones(1), torch.ones(2)]).to_list()
        [tensor([1.]), tensor([1., 1.])]
        """
        shape = self.aval.elt_ty.shape
        dims = self.aval.elt_ty.ragged_dims
        if not dims:
            return list(self.data.unbind(0))
        if len(dims) == 1:
            return list(self.data.split(self.lengths.tolist(), dims[0]))
        lengths = [length.tolist() for length in self._lengths]
        found, start = [], 0
        for i in range(len(self)):
            sizes = [lengths[dims.index(d)][i] if d in dims else s for d, s in enumerate(shape)]
            count = prod(sizes)
            found.append(self.data[start : start + count].view(sizes))
            start += count
        return found

    def __getitem__(self, i: int) -> Tensor:
        """Element `i`, from the end if negative."""
        if not isinstance(i, int) or isinstance(i, bool):
            raise RaggedTypeError(
                f"a Pile is indexed by an int, and is given {i!r}; to work on all elements use "
                "vmap(f, in_axes=pile_axis)"
            )
        if not -len(self) <= i < len(self):
            raise IndexError(f"index {i} is out of range for a Pile of {len(self)} elements")
        return self.to_list()[i]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.to_list())

    @classmethod
    def from_nested(cls, nested: Tensor) -> "Pile":
        """A pile of the elements of a nested tensor of PyTorch, of layout `torch.jagged`: no copy.

        >>> import torch
        >>> x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        >>> Pile.from_nested(x).lengths
        tensor([2, 3])
        """
        if not isinstance(nested, Tensor):
            raise RaggedTypeError(
                "Pile.from_nested takes a nested tensor of layout torch.jagged, and is given a "
                f"{type(nested).__name__}; Pile.from_list takes a list of tensors"
            )
        if not nested.is_nested or nested.layout != torch.jagged:
            raise RaggedTypeError(
                "Pile.from_nested takes a nested tensor of layout torch.jagged, and is given a "
                f"tensor of layout {nested.layout}, is_nested={nested.is_nested}"
            )
        values: Any = nested  # it has methods that `Tensor` has not
        if values.lengths() is not None:
            raise RaggedError(
                "Pile.from_nested takes a nested tensor without holes, and this one has some (it "
                "was narrowed): pass nested.contiguous()"
            )
        dim = _torch.find_ragged_dim(nested) - 1
        shape = [0 if d == dim else s for d, s in enumerate(nested.shape[1:])]
        lengths = values.offsets().diff()
        return cls.of(values.values(), [lengths], [dim], shape)

    def to_nested(self) -> Tensor:
        """A nested tensor of PyTorch, of layout `torch.jagged`, with the same data: no copy."""
        dims = self.aval.elt_ty.ragged_dims
        if len(dims) != 1:
            raise RaggedError(
                "a nested tensor of PyTorch has elements that differ in one dim, and those of this "
                f"pile differ in {len(dims)}: {self.aval}"
            )
        return torch.nested.nested_tensor_from_jagged(
            self.data, self.offsets, jagged_dim=dims[0] + 1
        )


def round_up_to_power(length: int) -> int:
    """Round a length up to a power of 2; 0 stays 0."""
    return 1 << max(length - 1, 0).bit_length() if length else 1


def _read_longest(lengths: Tensor) -> int:
    lengths = _torch.innermost_tensor(lengths)
    if _torch.is_fake(lengths):
        raise RaggedError(
            "a Pile is made, while a function is traced, of lengths that no Pile among its "
            "arguments has: how long the longest element is cannot be known. Make it outside."
        )
    return round_up_to_power(int(lengths.max())) if lengths.numel() else 1


def _check_alike(tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise RaggedError("a Pile is made of one tensor at least: of none, the dtype is not known")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise RaggedTypeError(
                f"Pile.from_list takes tensors, and item {i} is {tensor!r} "
                f"({type(tensor).__name__})"
            )
        first = tensors[0]
        for what in ("dtype", "device", "ndim"):
            if getattr(tensor, what) != getattr(first, what):
                raise RaggedTypeError(
                    f"the elements of a Pile have one {what}: item 0 has {getattr(first, what)}, "
                    f"item {i} has {getattr(tensor, what)}"
                )
    if tensors[0].dim() == 0:
        raise RaggedError("the elements of a Pile have at least one dim; stack scalars instead")


def _dims_that_differ(
    shapes: Sequence[tuple[int, ...]], dim: int | Sequence[int] | None
) -> list[int]:
    rank = len(shapes[0])
    found = [d for d in range(rank) if len({s[d] for s in shapes}) > 1]
    if dim is None:
        return found or [0]
    dims = [d % rank for d in ([dim] if isinstance(dim, int) else dim)]
    if not set(found) <= set(dims):
        raise RaggedError(
            f"the sizes of the elements may differ in dims {dims}, and differ in {found}: the "
            f"shapes are {list(map(list, shapes[:5]))}"
        )
    return dims


def _flatten_entries(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


@dataclass(frozen=True)
class _PileForm:
    """The part of a pile that is not a tensor: `("#1", 5)` is the shape with the first lengths."""

    shape: tuple[Any, ...]
    ragged: tuple[tuple[int, int], ...]
    """Dims with the bounds of their lengths."""
    length: int
    dtype: torch.dtype = field(compare=False)
    binder: SizeVar = field(compare=False)


def _flatten(pile: Pile) -> tuple[list[Any], _PileForm]:
    elt = pile.aval.elt_ty
    dims = elt.ragged_dims
    shape = list(elt.shape)
    for i, dim in enumerate(dims):
        shape[dim] = f"#{i + 1}"
    ragged = tuple((dim, elt.shape[dim].longest) for dim in dims)
    form = _PileForm(tuple(shape), ragged, pile.aval.length, elt.dtype, pile.aval.binder)
    return [[elt.shape[dim].lengths for dim in dims], pile.data], form


def _flatten_with_keys(pile: Pile) -> tuple[list[Any], _PileForm]:
    children, form = _flatten(pile)
    keys = map(_torch.GetAttrKey, ("lengths", "data"))
    return list(zip(keys, children, strict=True)), form


def _unflatten(children: Any, form: _PileForm) -> Pile:
    lengths, data = children
    shape = list(form.shape)
    for (dim, longest), of in zip(form.ragged, lengths, strict=True):
        shape[dim] = IndexedSize(form.binder, of, longest)
    dtype = getattr(data, "dtype", form.dtype)
    elt = EltTy(tuple(shape), dtype)
    return Pile(PileTy(form.binder, form.length, elt), data)


_torch.register_pytree_node(
    Pile,
    _flatten,
    _unflatten,
    serialized_type_name="torchremat.batching.Pile",
    flatten_with_keys_fn=_flatten_with_keys,
)
