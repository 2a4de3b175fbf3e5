import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from torchremat import _torch
from torchremat.core.source import current_source
from torchremat.errors import CollectiveError, CollectiveTypeError, NotAvailableError
from torchremat.tracing.axes.named_axes import AxisName, as_names, axis_frame, parts_of

T = TypeVar("T")
Groups = Sequence[Sequence[int]] | None
"""Lists of the indices of examples that take part together; `None`: all of them."""


def find_names(
    function: str, axis_name: AxisName | Sequence[AxisName], groups: Groups
) -> tuple[AxisName, ...]:
    """Find the axes that `axis_name` stands for; groups need a single one."""
    names = as_names(axis_name)
    parts = tuple(part for name in names for part in parts_of(name))  # raises if there is none
    if groups is not None and len(names) == 1 and len(parts) != 1:
        raise NotAvailableError(
            f"{function} over {names[0]!r} was given axis_index_groups at {current_source()}: the "
            "axis has several devices in each of several processes, and groups need one in each"
        )
    if groups is not None and len(names) != 1:
        raise CollectiveError(
            f"{function} over {names} was given axis_index_groups at {current_source()}: groups "
            "are of the examples along one axis. Name one axis, or leave them out."
        )
    return parts


def map_leaves(
    function: str, mapping: Callable[[Any], Any], x: T, *, only_tensors: bool = False
) -> T:
    """Apply `mapping` to the leaves of a tree, which are tensors and numbers."""
    kinds = (Tensor,) if only_tensors else (Tensor, int, float, complex)

    def map_leaf(leaf: Any) -> Any:
        if leaf is None:
            return None
        if not isinstance(leaf, kinds):
            accepted = "tensors" if only_tensors else "tensors and numbers"
            raise CollectiveTypeError(
                f"{function} takes a tree of {accepted}, but at {current_source()} a leaf is "
                f"{leaf!r} ({type(leaf).__name__}): convert it with torch.as_tensor"
            )
        return mapping(leaf)

    return _torch.tree_map(map_leaf, x)  # type: ignore[no-any-return]


def check_groups(function: str, name: AxisName, groups: Groups) -> dict[str, Any]:
    """Check that groups hold each index once; give them as a parameter of an operator."""
    if groups is None:
        return {}
    size = axis_frame(name).size
    members = [i for group in groups for i in group]
    if sorted(members) != [*range(size)]:
        raise CollectiveError(
            f"axis_index_groups must cover all indices exactly once: {function} at "
            f"{current_source()} was given {groups}, and the axis {name!r} has the indices 0, ..., "
            f"{size - 1}"
        )
    return {"axis_index_groups": tuple(tuple(group) for group in groups)}


def check_group_sizes(function: str, name: AxisName, groups: Groups) -> dict[str, Any]:
    """Check groups that must be equally large; give them, and how large they are."""
    given = check_groups(function, name, groups)
    return given | {"axis_size": find_group_size(function, name, groups)}


def find_group_size(function: str, axis_name: AxisName | Sequence[AxisName], groups: Groups) -> int:
    """Count the examples that take part together."""
    if groups is None:
        return math.prod(axis_frame(name).size for name in as_names(axis_name))
    sizes = {len(group) for group in groups}
    if len(sizes) != 1:
        raise CollectiveError(
            f"{function} at {current_source()} was given groups of different sizes, {groups}: "
            "axis_index_groups must all be the same size, so that all examples see one shape"
        )
    return sizes.pop()
