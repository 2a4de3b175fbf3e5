"""`vmap` where sizes differ from example to example: piles among the arguments or the outputs."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.api_util import WrapHashably, flatten_axes
from torchremat.batching.axis_positions import matchaxis
from torchremat.batching.mapped_arguments import MappedLeaves
from torchremat.batching.ragged.pile import ConcatAxis, Pile
from torchremat.batching.ragged.run import Dense, Ragged, as_pile, run_ragged
from torchremat.batching.vmappable import is_vmappable
from torchremat.errors import RaggedTypeError

if TYPE_CHECKING:
    from torchremat.batching.vmap_level import Mapping


def needs_piles(axes: Sequence[Any]) -> bool:
    """Whether an axis among them is `pile_axis`."""
    return any(isinstance(axis, ConcatAxis) for axis in axes)


def has_piles(call: MappedLeaves) -> bool:
    """Whether there are piles among the arguments of a call, or axes that are for piles."""
    return needs_piles(call.axes) or any(isinstance(leaf, Pile) for leaf in call.leaves)


def run_on_piles(mapping: "Mapping", call: MappedLeaves, size: int) -> Any:
    """The outputs of such a call, whose mapped axis is of `size`."""
    positions = [i for i, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor | Pile)]
    statics = [None if i in positions else leaf for i, leaf in enumerate(call.leaves)]
    structures = _structures_of(call.fun)
    if any(map(is_vmappable, statics)):
        raise RaggedTypeError("vmap does not map piles together with containers of other types")

    def function(elements: Sequence[Tensor]) -> list[Any]:
        leaves = list(statics)
        for i, element in zip(positions, elements, strict=True):
            leaves[i] = element
        args, kwargs = _torch.tree_unflatten(leaves, call.spec)
        return _Structure.flatten(call.fun(*args, **kwargs), structures)

    found = run_ragged(
        function,
        [call.leaves[i] for i in positions],
        [call.axes[i] for i in positions],
        size,
        randomness=mapping.randomness,
        axis_name=mapping.axis_name,
        owner=call.fun,
        key=(call.spec, tuple(map(WrapHashably, statics))),
    )
    *tensors, number = found
    assert isinstance(number, Dense)
    return structures[number.tensor].unflatten(tensors, mapping, size)


@dataclass(frozen=True)
class _Structure:
    """The structure of a function's result, and its leaves that are no tensors.

    A graph that is found again does not run the function, so its last output is the number of the
    structure among those of the function.
    """

    spec: _torch.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def flatten(cls, result: Any, known: "list[_Structure]") -> list[Any]:
        """The tensors of a result, and the number of its structure."""
        leaves, spec = _torch.tree_flatten(result)
        statics = tuple(WrapHashably(_TENSOR if _varies(x) else x) for x in leaves)
        structure = cls(spec, statics)
        if structure not in known:
            known.append(structure)
        return [*(x for x in leaves if _varies(x)), known.index(structure)]

    def unflatten(self, tensors: Sequence[Dense | Ragged], mapping: "Mapping", size: int) -> Any:
        """The result of all examples."""
        left = iter(tensors)
        axes = flatten_axes("vmap out_axes", self.spec, mapping.out_axes)
        leaves = [
            _placed(
                next(left) if leaf.value is _TENSOR else Dense(leaf.value, None),
                axis,
                mapping,
                size,
            )
            for leaf, axis in zip(self.leaves, axes, strict=True)
        ]
        return _torch.tree_unflatten(leaves, self.spec)


_TENSOR = "a tensor, or a size that differs"
_structures: "weakref.WeakKeyDictionary[Any, list[_Structure]]" = weakref.WeakKeyDictionary()


def _structures_of(fun: Callable[..., Any]) -> list[_Structure]:
    """Those that results of `fun` had, kept as long as it."""
    try:
        return _structures.setdefault(fun, [])
    except TypeError:  # cannot be referred to weakly, and then its graphs are not kept either
        return []


def _varies(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | torch.SymInt | torch.SymFloat)


def _placed(output: Dense | Ragged, axis: Any, mapping: "Mapping", size: int) -> Any:
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
    return matchaxis(mapping.axis_name, size, output.dim, axis, value, mapping.sum_match)
