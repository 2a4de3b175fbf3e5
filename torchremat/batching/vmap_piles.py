import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.api_util import WrapHashably, flatten_axes
from torchremat.batching.axis_positions import matchaxis
from torchremat.batching.mapped_arguments import MappedLeaves, name_output
from torchremat.batching.ragged.pile import ConcatAxis, Pile
from torchremat.batching.ragged.run import Dense, Ragged, as_pile, run_ragged
from torchremat.batching.vmappable import is_vmappable
from torchremat.errors import RaggedTypeError


def needs_piles(axes: Sequence[Any]) -> bool:
    """Whether an axis says that elements differ in size: a `ConcatAxis`."""
    return any(isinstance(axis, ConcatAxis) for axis in axes)


def has_piles(call: MappedLeaves) -> bool:
    """Whether elements of a call differ in size: an axis says so, or an argument is a `Pile`."""
    return needs_piles(call.axes) or any(isinstance(leaf, Pile) for leaf in call.leaves)


def run_on_piles(
    call: MappedLeaves,
    size: int,
    *,
    randomness: str,
    axis_name: Any,
    out_axes: Any,
    sum_match: bool,
) -> Any:
    """Map a call whose elements differ in size; what differs comes back as a `Pile`."""
    positions = [i for i, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor | Pile)]
    statics = [None if i in positions else leaf for i, leaf in enumerate(call.leaves)]
    structures = _find_structures(call.fun)
    if any(map(is_vmappable, statics)):
        raise RaggedTypeError("vmap does not map piles together with containers of other types")

    def function(elements: Sequence[Tensor]) -> list[Any]:
        leaves = list(statics)
        for i, element in zip(positions, elements, strict=True):
            leaves[i] = element
        args, kwargs = _torch.tree_unflatten(leaves, call.spec)
        return _Structure.flatten(call.fun(*args, **kwargs), structures)

    *tensors, number = run_ragged(
        function,
        [call.leaves[i] for i in positions],
        [call.axes[i] for i in positions],
        size,
        randomness=randomness,
        axis_name=axis_name,
        owner=call.fun,
        key=(call.spec, tuple(map(WrapHashably, statics))),
    )
    assert isinstance(number, Dense)
    structure = structures[number.tensor]
    axes = flatten_axes("vmap out_axes", structure.spec, out_axes)
    outputs = []
    for i, (output, axis) in enumerate(zip(structure.fill_leaves(tensors), axes, strict=True)):
        with name_output(structure.spec, i, axes):
            outputs.append(_place_axis(output, axis, size, axis_name, sum_match))
    return _torch.tree_unflatten(outputs, structure.spec)


# stands in a structure for a tensor, or for a size that differs from example to example
_TENSOR = "a tensor"


@dataclass(frozen=True)
class _Structure:
    """A graph from the cache does not run the function. Its last output therefore is the number of
    the structure among those that the function has returned.
    """

    spec: _torch.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def flatten(cls, result: Any, known: "list[_Structure]") -> list[Any]:
        leaves, spec = _torch.tree_flatten(result)
        statics = tuple(WrapHashably(_TENSOR if _varies(x) else x) for x in leaves)
        structure = cls(spec, statics)
        if structure not in known:
            known.append(structure)
        return [*(x for x in leaves if _varies(x)), known.index(structure)]

    def fill_leaves(self, tensors: Sequence[Dense | Ragged]) -> list[Dense | Ragged]:
        left = iter(tensors)
        return [
            next(left) if leaf.value is _TENSOR else Dense(leaf.value, None) for leaf in self.leaves
        ]


_structures: "weakref.WeakKeyDictionary[Any, list[_Structure]]" = weakref.WeakKeyDictionary()


def _find_structures(fun: Callable[..., Any]) -> list[_Structure]:
    try:
        return _structures.setdefault(fun, [])
    except TypeError:  # takes no weak reference; `run_ragged` saves no graphs of it either
        return []


def _varies(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | torch.SymInt | torch.SymFloat)


def _place_axis(
    output: Dense | Ragged, axis: Any, size: int, axis_name: Any, sum_match: bool
) -> Any:
    if isinstance(axis, ConcatAxis):
        return as_pile(output, size)
    if isinstance(output, Ragged):
        raise RaggedTypeError(
            "ragged output without using pile_axis out_axes spec: the examples of an output have "
            f"different sizes, and its entry of out_axes is {axis!r}; give it pile_axis"
        )
    value = output.tensor
    if value is None or (axis is None and not isinstance(value, Tensor)):
        return value
    if not isinstance(value, Tensor):
        value = torch.tensor(value)
    return matchaxis(axis_name, size, output.dim, axis, value, sum_match)
