"""Objects with tensors in their attributes as trees, though nobody registered their types.

PyTorch's trees know tuples, lists, dicts and registered types; another object is one leaf. Here a
dataclass or a `SimpleNamespace` that holds tensors is opened: an `OpenObject`, which PyTorch knows
as a tree, stands for it. Nothing is registered for the type itself, which is the user's to do.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from torchremat import _torch
from torchremat.core.slots import read_attributes, write_attributes

_PLAIN_NEW: Any = (object.__new__, SimpleNamespace.__new__)
_NOT_OPENED = ("torch", "torchremat")


class OpenObject:
    """A node of a tree in place of an object: its type, and its attributes by name.

    >>> open_objects(SimpleNamespace(x=Tensor([1.0]), scale=2))
    OpenObject(SimpleNamespace, {'x': tensor([1.]), 'scale': 2})
    """

    def __init__(self, kind: Any, names: Sequence[str], values: Sequence[Any]) -> None:
        self.kind = kind
        self.attributes = dict(zip(names, values, strict=True))

    def __repr__(self) -> str:
        return f"OpenObject({self.kind.__name__}, {self.attributes})"

    def close(self) -> Any:
        """A new object of that type with these attributes; its `__init__` does not run."""
        made: Any = self.kind.__new__(self.kind)
        attributes = {name: close_objects(value) for name, value in self.attributes.items()}
        write_attributes(made, attributes)
        return made


def _flatten(node: OpenObject) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    return list(node.attributes.values()), (node.kind, tuple(node.attributes))


def _flatten_with_keys(node: OpenObject) -> tuple[list[tuple[Any, Any]], Any]:
    values, context = _flatten(node)
    return [(_torch.GetAttrKey(n), v) for n, v in zip(context[1], values, strict=True)], context


def _unflatten(values: Any, context: tuple[type, tuple[str, ...]]) -> OpenObject:
    kind, names = context
    return OpenObject(kind, names, tuple(values))


_torch.register_pytree_node(
    OpenObject, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys
)


def open_objects(tree: Any) -> Any:
    """The tree with each object that holds tensors opened.

    An object that is in the tree twice is opened once: two copies would not be one object.
    """
    return _open_tree(tree, set(), {})


def flatten_open(
    tree: Any, seen: set[int] | None = None, replace: Mapping[int, Any] | None = None
) -> tuple[list[Any], _torch.TreeSpec]:
    """The leaves and the structure of the tree, as if its objects were opened.

    Args:
        tree: any tree.
        seen: the `id` of objects that are not opened; it takes those that are.
        replace: what stands in the place of a container or an object, by its `id`.
    """
    return _flatten_tree(tree, set() if seen is None else seen, replace or {})


def _flatten_tree(
    tree: Any, seen: set[int], replace: Mapping[int, Any]
) -> tuple[list[Any], _torch.TreeSpec]:
    is_replaced = (lambda x: id(x) in replace) if replace else None
    leaves, spec = _torch.tree_flatten(tree, is_leaf=is_replaced)
    if not replace and not any(map(is_plain_object, leaves)):
        return leaves, spec
    opened = [_open_leaf(leaf, seen, replace) for leaf in leaves]
    return _torch.tree_flatten(_torch.tree_unflatten(opened, spec))


def _open_tree(tree: Any, seen: set[int], replace: Mapping[int, Any]) -> Any:
    leaves, spec = _flatten_tree(tree, seen, replace)
    return _torch.tree_unflatten(leaves, spec)


def _open_leaf(leaf: Any, seen: set[int], replace: Mapping[int, Any]) -> Any:
    if id(leaf) in replace:
        return replace[id(leaf)]
    if not is_plain_object(leaf) or id(leaf) in seen:
        return leaf
    seen.add(id(leaf))
    attributes = read_attributes(leaf)
    values = [_open_tree(value, seen, replace) for value in attributes.values()]
    if not any(isinstance(value, Tensor) for value in _torch.tree_flatten(values)[0]):
        return leaf
    return OpenObject(type(leaf), tuple(attributes), values)


def close_objects(tree: Any) -> Any:
    """The tree with an object in place of each `OpenObject`.

    >>> close_objects(open_objects([SimpleNamespace(x=Tensor([1.0]))]))
    [namespace(x=tensor([1.]))]
    """
    leaves, spec = _torch.tree_flatten(tree, is_leaf=_is_open)
    if not any(map(_is_open, leaves)):
        return tree
    return _torch.tree_unflatten([x.close() if _is_open(x) else x for x in leaves], spec)


def _is_open(value: Any) -> bool:
    return type(value) is OpenObject


def is_plain_object(value: Any) -> bool:
    """Whether `value` is nothing but its attributes: a dataclass or a `SimpleNamespace`."""
    kind: Any = type(value)
    if not (hasattr(kind, "__dataclass_fields__") or isinstance(value, SimpleNamespace)):
        return False
    if isinstance(value, type | Tensor | nn.Module | dict | list | tuple | set):
        return False
    return kind.__new__ in _PLAIN_NEW and kind.__module__.partition(".")[0] not in _NOT_OPENED


def is_opened(value: Any) -> bool:
    """Whether `open_objects` opens `value`."""
    return is_plain_object(value) and type(open_objects(value)) is OpenObject
