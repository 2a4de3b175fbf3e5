"""Objects with tensors in their attributes as trees, though nobody registered their types.

PyTorch's trees know tuples, lists, dicts and registered types; another object is one leaf. Here a
dataclass or a `SimpleNamespace` that holds tensors is opened: an `OpenObject`, which PyTorch knows
as a tree, stands for it. Nothing is registered for the type itself, which is the user's to do.

Of a result other objects are opened, too, if Python would copy them by their attributes: what a
function makes is made anew in each call.
"""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torchremat import _torch
from torchremat.core.slots import read_attributes, write_attributes

_PLAIN_NEW: Any = (object.__new__, SimpleNamespace.__new__)
_OWN_COPIES = ("__reduce_ex__", "__reduce__", "__getstate__")
# Py_TPFLAGS_HEAPTYPE of CPython: a class that Python code defines.
_HEAP_TYPE = 1 << 9
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


class OpenSize:
    """A node in place of a `torch.Size`, of which PyTorch's trees make a tuple.

    >>> close_objects(OpenSize([2, 3]))
    torch.Size([2, 3])
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = tuple(values)

    def __repr__(self) -> str:
        return f"OpenSize({self.values})"

    def close(self) -> tuple[Any, ...]:
        """The size; a tuple where what stands in it are no numbers but descriptions of them."""
        is_size = all(isinstance(value, int | torch.SymInt) for value in self.values)
        return torch.Size(self.values) if is_size else self.values


_torch.register_pytree_node(
    OpenSize,
    lambda node: (list(node.values), None),
    lambda values, _: OpenSize(values),
    flatten_with_keys_fn=lambda node: (
        [(_torch.SequenceKey(i), value) for i, value in enumerate(node.values)],
        None,
    ),
)


def open_objects(tree: Any) -> Any:
    """The tree with each object that holds tensors opened.

    An object that is in the tree twice is opened once: two copies would not be one object.
    """
    leaves, spec = flatten_open(tree)
    return _torch.tree_unflatten(leaves, spec)


def flatten_open(tree: Any, seen: set[int] | None = None) -> tuple[list[Any], _torch.TreeSpec]:
    """The leaves and the structure of the tree, as if its objects were opened.

    Args:
        tree: any tree.
        seen: the `id` of objects that are not opened; it takes those that are.
    """
    return _Opening(set() if seen is None else seen, is_plain_object).flatten(tree)


def flatten_result(
    tree: Any, find_elsewhere: Callable[[Any], Any] | None = None
) -> tuple[list[Any], _torch.TreeSpec]:
    """The leaves and the structure of what a function returned, its objects opened.

    Args:
        tree: the result.
        find_elsewhere: gives what stands in the place of a part of it, or `None`.

    >>> class Cache:
    ...     def __init__(self, keys):
    ...         self.keys = keys
    >>> flatten_result((Cache(Tensor([1.0])), "text"))[0]
    [tensor([1.]), 'text']
    """
    opening = _Opening(set(), is_made_of_attributes, find_elsewhere)
    try:
        return opening.flatten(tree)
    finally:
        opening.find_elsewhere = None  # PyTorch keeps `is_leaf` until the garbage collector runs


class _Opening:
    """Opens the objects of one tree."""

    def __init__(
        self,
        seen: set[int],
        opens: Callable[[Any], bool],
        find_elsewhere: Callable[[Any], Any] | None = None,
    ) -> None:
        self._seen = seen
        self._opens = opens
        self.find_elsewhere = find_elsewhere

    def flatten(self, tree: Any) -> tuple[list[Any], _torch.TreeSpec]:
        leaves, spec = _torch.tree_flatten(tree)
        if self.find_elsewhere is None and not any(map(self._may_open, leaves)):
            return leaves, spec
        leaves, spec = _torch.tree_flatten(tree, is_leaf=self._is_leaf)
        opened = [self._open(leaf) for leaf in leaves]
        return _torch.tree_flatten(_torch.tree_unflatten(opened, spec))

    def _may_open(self, leaf: Any) -> bool:
        return isinstance(leaf, int | torch.SymInt) or self._opens(leaf)

    def _is_leaf(self, value: Any) -> bool:
        if type(value) is torch.Size:
            return True
        return self.find_elsewhere is not None and self.find_elsewhere(value) is not None

    def _open(self, leaf: Any) -> Any:
        if self.find_elsewhere is not None:
            found = self.find_elsewhere(leaf)
            if found is not None:
                return found
        if type(leaf) is torch.Size:
            return OpenSize(leaf)
        if not self._opens(leaf) or id(leaf) in self._seen:
            return leaf
        self._seen.add(id(leaf))
        attributes = read_attributes(leaf)
        flat = [self.flatten(value) for value in attributes.values()]
        if not any(isinstance(value, Tensor) for leaves, _ in flat for value in leaves):
            return leaf
        values = [_torch.tree_unflatten(leaves, spec) for leaves, spec in flat]
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
    return type(value) in (OpenObject, OpenSize)


def is_plain_object(value: Any) -> bool:
    """Whether `value` is nothing but its attributes: a dataclass or a `SimpleNamespace`."""
    kind: Any = type(value)
    if not (hasattr(kind, "__dataclass_fields__") or isinstance(value, SimpleNamespace)):
        return False
    if isinstance(value, type | Tensor | nn.Module | dict | list | tuple | set):
        return False
    return kind.__new__ in _PLAIN_NEW and kind.__module__.partition(".")[0] not in _NOT_OPENED


def is_made_of_attributes(value: Any) -> bool:
    """Whether a copy of `value` is a new object of its class with the same attributes.

    >>> is_made_of_attributes(open_objects), is_made_of_attributes(_Opening(set(), callable))
    (False, True)
    """
    kind: Any = type(value)
    if is_plain_object(value):
        return True
    if not kind.__flags__ & _HEAP_TYPE or kind.__new__ is not object.__new__:
        return False
    if isinstance(value, type | nn.Module) or hasattr(kind, "__setstate__"):
        return False
    is_copied = all(getattr(kind, n, None) is getattr(object, n, None) for n in _OWN_COPIES)
    return is_copied and not hasattr(kind, "__del__")


def is_opened(value: Any) -> bool:
    """Whether `open_objects` opens `value`."""
    return is_plain_object(value) and type(open_objects(value)) is OpenObject
