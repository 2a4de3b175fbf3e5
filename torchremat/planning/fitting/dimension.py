"""The dimension of the arguments whose size `fit` varies, by the name that the user gave."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from torchremat import _torch
from torchremat.api_util import StaticArguments
from torchremat.errors import ArgumentTypeError, ArgumentValueError, nearest_names
from torchremat.planning.step.traced_step import ChooseInputs
from torchremat.remat.tracing.calls import flatten_call
from torchremat.remat.tracing.input_labels import BoundCall
from torchremat.tracing.dynamic_inputs import DynamicInputs
from torchremat.tracing.input_spec import InputSpec

NAMED_DIMENSIONS = {"batch": 0, "length": 1}
"""Dimensions that go by a name: of the tensor arguments that are as large there as the first."""

_FORMS = (
    "'batch' (the leading dimension of the tensor arguments), 'length' (their second), or "
    "dimensions of arguments by number, 'tokens.1' or 'tokens.1, mask.2'"
)


@dataclass(frozen=True, eq=False)
class Dimension:
    """Dimensions of the arguments of a call that vary together.

    Attributes:
        name: as the user gave it.
        size: in the call.
        dims: those of each tensor, by the identity of the tensor.
    """

    name: str
    size: int
    dims: Mapping[int, tuple[int, ...]]
    positions: tuple[tuple[int, ...], ...]
    """These dimensions by the position of the tensor in a traced call."""
    strides: tuple[tuple[int, ...], ...]
    """The strides of these tensors: a tensor that was widened has others."""

    @classmethod
    def of(cls, name: Any, fun: Callable[..., Any], args: Any, kwargs: Any) -> "Dimension":
        """The dimension that `name` means in this call.

        Raises `ArgumentTypeError` for anything but text, and `ArgumentValueError` for a name that
        means nothing, or dimensions that differ in size.

        >>> import torch
        >>> tokens, lengths = torch.ones(4, 16), torch.ones(4)
        >>> found = Dimension.of("batch", max, (tokens, lengths), {})
        >>> found.size, found.positions
        (4, ((0,), (0,)))
        >>> Dimension.of("args[0].1", max, (tokens, lengths), {}).positions
        ((1,), ())
        """
        if not isinstance(name, str):
            raise ArgumentTypeError(
                f"maximize={name!r} ({type(name).__name__}) names no dimension. Give {_FORMS}"
            )
        bound = BoundCall(fun, args, kwargs)
        if name in NAMED_DIMENSIONS:
            found = _find_shared(name, NAMED_DIMENSIONS[name], bound)
        else:
            found = _find_numbered(name, bound)
        size = _size_of(name, found)
        dims: dict[int, tuple[int, ...]] = {}
        for _, tensor, dim in found:
            dims[id(tensor)] = tuple(sorted({*dims.get(id(tensor), ()), dim}))
        tensors = flatten_call(args, kwargs, StaticArguments(fun, (), ()), lenient=True).tensors
        positions = tuple(dims.get(id(t), ()) for t in tensors)
        return cls(name, size, dims, positions, tuple(t.stride() for t in tensors))

    def describe(self, size: int) -> str:
        """>>> Dimension("batch", 4, {}, (), ()).describe(12)
        'batch 12'
        """
        return f"{self.name} {size}"

    def resize(self, args: Any, kwargs: Any, size: int) -> tuple[Any, Any]:
        """The arguments with `size` in this dimension; nothing of their size is allocated."""
        if size == self.size:
            return args, kwargs

        def widen(leaf: Any) -> Any:
            dims = self.dims.get(id(leaf), ())
            return _widen(leaf, dims, size) if dims else leaf

        return _torch.tree_map(widen, (args, dict(kwargs)))  # type: ignore[no-any-return]

    def inputs_at(self, size: int, *, symbolic: bool) -> ChooseInputs:
        """The inputs of a trace at this size, with a symbol for it if `symbolic`."""

        def choose(tensors: Sequence[Tensor]) -> tuple[tuple[InputSpec, ...], DynamicInputs | None]:
            given = [InputSpec.of(t, any_level=True) for t in tensors]
            specs = tuple(
                spec
                if not dims or (size == self.size and not symbolic)
                else _with_size(spec, dims, size, stride)
                for spec, dims, stride in zip(given, self.positions, self.strides, strict=True)
            )
            varying = [*map(frozenset, self.positions)]
            return specs, DynamicInputs.of(specs, varying) if symbolic else None

        return choose


_Found = list[tuple[str, Tensor, int]]
"""Dimensions of tensors, with the name of the tensor."""


def _find_shared(name: str, dim: int, bound: BoundCall) -> _Found:
    pairs = zip(bound.labels, bound.tensors, strict=True)
    having = [(label.text, t, dim) for label, t in pairs if t.dim() > dim]
    if not having:
        raise ArgumentValueError(
            f"maximize={name!r}: no argument of {bound.name} is a tensor of {dim + 1} dimensions "
            f"or more, so that there is nothing to vary. Give {_FORMS}"
        )
    return [entry for entry in having if entry[1].shape[dim] == having[0][1].shape[dim]]


def _find_numbered(name: str, bound: BoundCall) -> _Found:
    tensors = {label.text: t for label, t in zip(bound.labels, bound.tensors, strict=True)}
    found: _Found = []
    for part in name.split(","):
        label, _, number = part.strip().rpartition(".")
        if label not in tensors:
            known = [f"{text}.{d}" for text, t in tensors.items() for d in range(t.dim())]
            near = nearest_names(part.strip(), [*NAMED_DIMENSIONS, *known])
            raise ArgumentValueError(
                f"maximize={name!r}: {part.strip()!r} is not a dimension of the arguments of "
                f"{bound.name}; {near}. Give {_FORMS}"
            )
        tensor = tensors[label]
        dims = {str(d - shift): d for d in range(tensor.dim()) for shift in (0, tensor.dim())}
        if number not in dims:
            raise ArgumentValueError(
                f"maximize={name!r}: {label} has the shape {tuple(tensor.shape)}, and no dimension "
                f"{number!r}. Count from 0: {label}.0 is the first, {label}.-1 the last"
            )
        found.append((label, tensor, dims[number]))
    return found


def _size_of(name: str, found: _Found) -> int:
    sizes = {f"{label}.{dim}": int(t.shape[dim]) for label, t, dim in found}
    if len(set(sizes.values())) > 1:
        given = ", ".join(f"{where} is {size}" for where, size in sizes.items())
        raise ArgumentValueError(
            f"maximize={name!r}: dimensions that vary together have one size, but {given}"
        )
    size = next(iter(sizes.values()))
    if size == 0:
        raise ArgumentValueError(
            f"maximize={name!r}: {next(iter(sizes))} is empty. Give an example that has elements"
        )
    return size


def _widen(tensor: Tensor, dims: tuple[int, ...], size: int) -> Tensor:
    """`tensor` with its first elements repeated along `dims`, in the same memory."""
    shape = list(tensor.shape)
    wide = tensor.detach()
    for dim in dims:
        wide = wide.narrow(dim, 0, 1)
        shape[dim] = size
    return wide.expand(shape).requires_grad_(tensor.requires_grad)


def _with_size(
    spec: InputSpec, dims: tuple[int, ...], size: int, order: tuple[int, ...]
) -> InputSpec:
    """A dense input with `size` in these dimensions, whose strides are in the order of `order`."""
    shape = [size if d in dims else n for d, n in enumerate(spec.shape)]
    stride, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (order[d], -d)):
        stride[d] = step
        step *= max(shape[d], 1)
    return replace(spec, shape=tuple(shape), stride=tuple(stride), storage_offset=0)
