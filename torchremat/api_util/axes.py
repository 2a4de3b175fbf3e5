"""Trees of axes that are given for whole subtrees at once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchremat import _torch
from torchremat.errors import ArgumentValueError


def flatten_axes(
    name: str,
    treedef: _torch.TreeSpec,
    axis_tree: Any,
    *,
    kws: bool = False,
    tupled_args: bool = False,
) -> list[Any]:
    """One axis for each leaf of a tree, from a tree prefix.

    Args:
        name: the name of the axes for errors: `in_axes`, say.
        treedef: the structure of the tree.
        axis_tree: axes: integers, or `None`, which is one too. An axis in place of a subtree is
            for all its leaves.
        kws: whether the trees are of `(args, kwargs)`; errors show `args` alone.
        tupled_args: whether the tree is a tuple of arguments, so that an error can say that a tuple
            around `axis_tree` is missing.

    Returns:
        A list of as many axes as the tree has leaves.

    Raises:
        ValueError: if `axis_tree` is not a prefix of the tree, with every place where it is not.

    After `jax.api_util.flatten_axes`.

    >>> treedef = _torch.tree_flatten({"a": [1, 2], "b": 3})[1]
    >>> flatten_axes("in_axes", treedef, {"a": 0, "b": None})
    [0, 0, None]
    >>> flatten_axes("in_axes", treedef, {"a": 0, "b": (1, 2)})
    Traceback (most recent call last):
      ...
    torchremat.errors.ArgumentValueError: in_axes specification must be a tree prefix of ...
    """
    found = _axes_of_tuples(axis_tree, treedef)
    if found is not None:
        return found
    tree = _torch.tree_unflatten([_Leaf()] * treedef.num_leaves, treedef)
    axes, mismatches = _prefix_axes(name, axis_tree, tree)
    if not mismatches:
        return axes
    hint = ""
    if kws:
        tree, axis_tree = tree[0], axis_tree[0]
        treedef = _torch.tree_flatten(tree)[1]
    if tupled_args:
        hint += (
            f" Note that {name} that are non-trivial pytrees should always be wrapped in a tuple "
            "representing the argument list."
        )
        if len(tree) == 1 and not _prefix_axes(name, (axis_tree,), tree)[1]:
            hint += (
                f" In particular, you're passing in a single argument which means that {name} "
                "might need to be wrapped in a singleton tuple."
            )
    details = "".join(f"\n  {text}" for text in mismatches)
    raise ArgumentValueError(
        f"{name} specification must be a tree prefix of the corresponding value, got specification "
        f"{axis_tree} for value tree {treedef}.{hint}\n"
        f"Mismatch details ({len(mismatches)} found):{details}"
    )


def _axes_of_tuples(axis_tree: Any, treedef: _torch.TreeSpec) -> list[Any] | None:
    """Return the axes if `axis_tree` is an axis or nested tuples of them, as in most calls."""
    if axis_tree is None or type(axis_tree) is int:
        return [axis_tree] * treedef.num_leaves
    if type(axis_tree) is not tuple or treedef.type is not tuple:
        return None
    children = _torch.children_of(treedef)
    if len(children) != len(axis_tree):
        return None
    found: list[Any] = []
    for axes, child in zip(axis_tree, children, strict=True):
        part = _axes_of_tuples(axes, child)
        if part is None:
            return None
        found += part
    return found


class _Leaf:
    """Stands for a leaf of the tree."""


@dataclass(frozen=True)
class _TreeLevel:
    kind: type | None
    context: Any
    children: dict[str, Any]

    @classmethod
    def of(cls, tree: Any) -> "_TreeLevel":
        children, spec = _torch.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
        if spec.is_leaf():
            return cls(None, None, {})
        named = {_torch.keystr(path): child for path, child in children}
        context = set(named) if isinstance(tree, dict) else spec.context  # keys in any order
        return cls(type(tree), context, named)

    def __str__(self) -> str:
        return "a leaf" if self.kind is None else f"a subtree of type {self.kind.__name__}"


def _prefix_axes(path: str, axes: Any, tree: Any) -> tuple[list[Any], list[str]]:
    """Find an axis for each leaf of `tree`, and describe where `axes` is not a prefix of it."""
    found: list[Any] = []
    wrong: list[str] = []
    for where, given, wanted in _find_places(path, axes, tree):
        if _TreeLevel.of(given).kind is None:
            found += [given] * len(_torch.tree_flatten(wanted)[0])
        else:
            wrong.append(_describe_mismatch(where, _TreeLevel.of(given), _TreeLevel.of(wanted)))
    return found, wrong


def _find_places(path: str, axes: Any, tree: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the places where `axes` has an axis or differs from `tree`, in the order of `tree`."""
    ours, theirs = _TreeLevel.of(axes), _TreeLevel.of(tree)
    if (
        ours.kind is None
        or ours.kind is not theirs.kind
        or ours.context != theirs.context
        or ours.children.keys() != theirs.children.keys()
    ):
        yield path, axes, tree
        return
    for key, child in theirs.children.items():
        yield from _find_places(path + key, ours.children[key], child)


def _describe_mismatch(path: str, given: _TreeLevel, wanted: _TreeLevel) -> str:
    if given.kind is not wanted.kind:
        return (
            f"different types at {path}: the specification has {given}, but the full pytree has "
            f"{wanted}"
        )
    if len(given.children) != len(wanted.children):
        return (
            f"different numbers of children at {path}: the specification has "
            f"{len(given.children)} ({', '.join(given.children) or 'none'}), but the full pytree "
            f"has {len(wanted.children)} ({', '.join(wanted.children) or 'none'})"
        )
    return (
        f"different keys or metadata at {path}: the specification has {given.context!r}, but the "
        f"full pytree has {wanted.context!r}"
    )
