"""Arguments of functions with rules: bound to the signature, and flattened into tensors."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from torch import Tensor

from torchremat import _torch
from torchremat.api_util import as_argnames, as_argnums
from torchremat.core.avals import Aval
from torchremat.core.trees import HOLE, Structure, tuple_of
from torchremat.errors import ArgumentValueError, RuleTypeError


def name_of(fun: Callable[..., Any]) -> str:
    """The name of a function, or else that of its class."""
    return getattr(fun, "__name__", None) or type(fun).__name__


class Signature:
    """The parameters of a function with rules, and which arguments are not differentiated."""

    def __init__(
        self, fun: Callable[..., Any], nondiff_argnums: Any, nondiff_argnames: Any
    ) -> None:
        self.name = name_of(fun)
        self._signature: inspect.Signature | None
        try:
            self._signature = inspect.signature(fun)
        except (TypeError, ValueError):  # some builtins have none
            self._signature = None
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = self._signature.parameters.values() if self._signature else ()
        self._positional = [p.name for p in parameters if p.kind in kinds]
        by_number = as_argnums(nondiff_argnums, "nondiff_argnums")
        by_name = self._find(as_argnames(nondiff_argnames, "nondiff_argnames"))
        self.nondiff_argnums = (*by_number, *by_name)

    def _find(self, names: Sequence[str]) -> list[int]:
        unknown = sorted(set(names).difference(self._positional))
        if unknown:
            raise ArgumentValueError(
                f"nondiff_argnames contains {unknown}, but {self.name} has the positional "
                f"parameters {self._positional}: name some of these"
            )
        return [self._positional.index(name) for name in names]

    def resolve(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "RuleArguments":
        """Bind all arguments by position, with defaults: rules take none by keyword."""
        if self._signature is not None and (kwargs or len(args) < len(self._positional)):
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        if kwargs:
            raise RuleTypeError(
                f"the rules of {self.name} take arguments by position, but the argument(s) "
                f"{sorted(kwargs)} can only be given by keyword. Make them positional parameters"
            )
        for n in self.nondiff_argnums:
            if not -len(args) <= n < len(args):
                raise RuleTypeError(
                    f"{self.name} has nondiff_argnums={self.nondiff_argnums}, but was given "
                    f"{len(args)} positional argument(s)"
                )
        nondiff = {n % len(args) for n in self.nondiff_argnums} if args else set()
        return RuleArguments(self.name, args, tuple(sorted(nondiff)))


@dataclass(frozen=True, eq=False)
class RuleArguments:
    """The arguments of a call, and the positions of those that have no derivative."""

    name: str
    args: tuple[Any, ...]
    nondiff_argnums: tuple[int, ...]

    @property
    def nondiff(self) -> tuple[Any, ...]:
        """The arguments that rules take first, as they are."""
        return tuple(self.args[i] for i in self.nondiff_argnums)

    @cached_property
    def _flat(self) -> tuple[Structure, list[Tensor]]:
        return flatten_tensors(
            tuple(a for i, a in enumerate(self.args) if i not in self.nondiff_argnums)
        )

    @property
    def structure(self) -> Structure:
        """The other arguments, a tuple of trees with holes for tensors."""
        return self._flat[0]

    @property
    def tensors(self) -> list[Tensor]:
        return self._flat[1]

    def others(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        return unflatten_tensors(self.structure, tensors)  # type: ignore[no-any-return]

    def all(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        if not self.nondiff_argnums:
            return self.others(tensors)
        others = iter(self.others(tensors))
        return tuple(
            a if i in self.nondiff_argnums else next(others) for i, a in enumerate(self.args)
        )


def flatten_tensors(tree: Any) -> tuple[Structure, list[Tensor]]:
    """Split a tree into its structure and its tensors; quickly for a tensor or a tuple of some."""
    if isinstance(tree, Tensor):
        return _TENSOR, [tree]
    if type(tree) is tuple and all(isinstance(item, Tensor) for item in tree):
        return tuple_of(len(tree)), list(tree)
    structure = Structure.of(tree)
    return structure, structure.flatten(tree)


_TENSOR = Structure(HOLE)


def unflatten_tensors(structure: Structure, values: Sequence[Any]) -> Any:
    """Put `values` into the tree; for a single tensor, or a tuple of tensors, at once."""
    tree = structure.tree
    if tree is HOLE:
        return values[0]
    if type(tree) is tuple and all(item is HOLE for item in tree):
        return tuple(values)
    return structure.unflatten(values)


def flatten_up_to(given: Any, like: Any) -> list[Any]:
    """Flatten `given` as `like`, where `None` may stand for a whole subtree.

    Raises `ValueError` if the trees differ otherwise.

    >>> flatten_up_to({"a": None, "b": 3.0}, {"a": (1.0, 2.0), "b": 4.0})
    [None, None, 3.0]
    """
    if like is HOLE or isinstance(like, Tensor):
        if given is not None and not _torch.tree_flatten(given)[1].is_leaf():
            raise ValueError("the trees differ")
        return [given]
    if like is None and given is not None:
        raise ValueError("the trees differ")
    if given is None:
        return [None] * len(_torch.tree_flatten(like)[0])
    children, kind = _torch.tree_flatten(like, is_leaf=lambda x: x is not like)
    ours, our_kind = _torch.tree_flatten(given, is_leaf=lambda x: x is not given)
    if kind != our_kind:
        raise ValueError("the trees differ")
    if kind.is_leaf():
        return [given]
    pairs = zip(ours, children, strict=True)
    return list(chain.from_iterable(flatten_up_to(g, c) for g, c in pairs))


def describe_tree(tree: Any) -> str:
    """The structure of a tree as text, with `*` for tensors."""
    return repr(Structure.of(tree).tree)


def aval_of_value(value: Any) -> Any:
    """The shape and dtype of a tensor; any other value as it is."""
    return Aval.of(value) if isinstance(value, Tensor) else value


def mark_tensors(structure: Structure) -> list[bool]:
    """Tell for each leaf of `structure` whether a tensor belongs there."""
    return [leaf is HOLE for leaf in _torch.tree_flatten(structure.tree)[0]]
