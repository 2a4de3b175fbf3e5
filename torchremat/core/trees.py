"""Trees with holes: what a call or a graph takes and returns, with the tensors left out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchremat import _torch
from torchremat.api_util import WrapHashably
from torchremat.core.open_objects import close_objects, flatten_open, flatten_result
from torchremat.errors import ArgumentValueError


class _Hole:
    def __repr__(self) -> str:
        return "*"


HOLE = _Hole()
"""Stands in a tree where a value goes."""


@dataclass(frozen=True, eq=False)
class Structure:
    """A tree whose leaves are holes, to be filled with values, and constants.

    >>> import torch
    >>> structure = Structure.of({"x": torch.ones(2), "scale": 3.0})
    >>> structure.tree
    {'x': *, 'scale': 3.0}
    >>> structure.unflatten(["a tensor"])
    {'x': 'a tensor', 'scale': 3.0}
    """

    tree: Any
    """The tree, with `HOLE` and constants as leaves; static arguments are `WrapHashably`."""
    is_result: bool = False
    """Whether objects of any class are opened, as they are in results."""

    @classmethod
    def of(
        cls,
        tree: Any,
        is_value: Callable[[Any], bool] = lambda leaf: isinstance(leaf, Tensor),
        *,
        is_result: bool = False,
    ) -> "Structure":
        leaves, spec = flatten_result(tree) if is_result else flatten_open(tree)
        left = [HOLE if is_value(leaf) else leaf for leaf in leaves]
        return cls(_torch.tree_unflatten(left, spec), is_result)

    def freeze_statics(self) -> "Structure":
        """Copy the static arguments, so that nobody else can change them."""
        return Structure(
            _torch.tree_map(lambda x: x.freeze() if isinstance(x, WrapHashably) else x, self.tree),
            self.is_result,
        )

    @property
    def num_values(self) -> int:
        return sum(leaf is HOLE for leaf in _torch.tree_flatten(self.tree)[0])

    @property
    def spec(self) -> _torch.TreeSpec:
        """The tree of the values alone: where a constant stands, it has an empty tuple."""
        values = _torch.tree_map(lambda leaf: HOLE if leaf is HOLE else (), self.tree)
        return _torch.tree_flatten(values)[1]

    def paths(self) -> list[tuple[Any, ...]]:
        leaves, _ = _torch.tree_flatten_with_path(self.tree)
        return [path for path, leaf in leaves if leaf is HOLE]

    def flatten(self, tree: Any) -> list[Any]:
        """The values of `tree` in the holes. Raises `ValueError` if the rest of it is different."""
        leaves, spec = flatten_result(tree) if self.is_result else flatten_open(tree)
        expected, expected_spec = _torch.tree_flatten(self.tree)
        if spec != expected_spec:
            raise ArgumentValueError(
                f"the structure must be {self.tree}, but it is "
                f"{Structure.of(tree, is_result=self.is_result).tree}"
            )
        values = []
        for leaf, wanted in zip(leaves, expected, strict=True):
            if wanted is HOLE:
                values.append(leaf)
            elif WrapHashably(_unwrap(leaf)) != WrapHashably(_unwrap(wanted)):
                raise ArgumentValueError(
                    f"{_unwrap(wanted)!r} is part of the structure, but here is {_unwrap(leaf)!r}"
                )
        return values

    def unflatten(self, values: Sequence[Any]) -> Any:
        left = iter(values)
        filled = _torch.tree_map(
            lambda leaf: next(left) if leaf is HOLE else _unwrap(leaf), self.tree
        )
        return close_objects(filled)


def positional(count: int) -> Structure:
    """The structure of a call with so many positional arguments, each one tensor."""
    return Structure(((HOLE,) * count, {}))


def tuple_of(count: int) -> Structure:
    """The structure of a tuple of so many tensors."""
    return Structure((HOLE,) * count)


def _unwrap(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, WrapHashably) else leaf


def scatter_values(values: Sequence[Any], positions: Sequence[int], count: int) -> list[Any]:
    """Put `values` at `positions` of a list of `count`, and `None` elsewhere.

    >>> scatter_values(["a", "b"], [2, 0], 3)
    ['b', None, 'a']
    """
    result: list[Any] = [None] * count
    for position, value in zip(positions, values, strict=True):
        result[position] = value
    return result
