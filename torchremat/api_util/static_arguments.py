"""Arguments of functions, selected by position and by name: static ones, donated ones."""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch

from torchremat import _torch
from torchremat.errors import ArgumentTypeError, ArgumentValueError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def as_argnums(value: Any, what: str = "static_argnums") -> tuple[int, ...]:
    """Positions of arguments as a tuple; `TypeError` if they are no int or tuple of ints.

    >>> as_argnums(1), as_argnums((0, -1))
    ((1,), (0, -1))
    """
    given = value if isinstance(value, tuple) else (value,)
    if any(isinstance(item, bool) or not isinstance(item, int) for item in given):
        raise ArgumentTypeError(
            f"{what} must be an int or a tuple of ints, but it is {value!r} "
            f"({type(value).__name__}); write {what}=(0, 2), say"
        )
    return given


def as_argnames(value: Any, what: str = "static_argnames") -> tuple[str, ...]:
    """Names of arguments as a tuple; `TypeError` if they are no string or iterable of strings."""
    given = (value,) if isinstance(value, str) else value
    names = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(
            f"{what} must be a string or an iterable of strings, but it is {value!r} "
            f"({type(value).__name__})"
        )
    return names


def check_argnums(argnums: Sequence[int], num_args: int, what: str = "static_argnums") -> None:
    """Raise `ValueError` if a position is out of range for `num_args` positional arguments."""
    for number in argnums:
        if not -num_args <= number < num_args:
            value = f"value {number} for len(args) == {num_args}"
            raise ArgumentValueError(
                f"{what} contains {number}, but the call has {num_args} positional argument(s). "
                "Positional argument indices, e.g. for `static_argnums`, must have value greater "
                f"than or equal to -len(args) and less than len(args), but got {value}."
            )


def parameters_of(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of `fun`, or none if it has no signature (builtins)."""
    try:
        return list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return []


class ArgumentSelection:
    """Selects arguments in calls of one function, by position and by name.

    A position is also found when the argument is passed by keyword, a name when by position. A call
    with fewer arguments than a position says is an error, unless the selection is `lenient`.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        argnums: Any,
        argnames: Any,
        *,
        kind: str = "static",
        lenient: bool = False,
    ) -> None:
        self.kind = kind
        self.lenient = lenient
        self.argnums = as_argnums(argnums, f"{kind}_argnums") if not _is_empty(argnums) else ()
        self.argnames = frozenset(as_argnames(argnames, f"{kind}_argnames"))
        self._parameters = parameters_of(fun) if self.argnums or self.argnames else []
        positional = [p.name for p in self._parameters if p.kind in _POSITIONAL]
        unknown = self.argnames - {p.name for p in self._parameters}
        if unknown and self._parameters and not self._has(inspect.Parameter.VAR_KEYWORD):
            raise ArgumentValueError(
                f"{kind}_argnames contains {sorted(unknown)}, but the function has the parameters "
                f"{[p.name for p in self._parameters]}"
            )
        named = {positional.index(name) for name in self.argnames if name in positional}
        self._by_name = frozenset(named)
        in_range = (n for n in self.argnums if -len(positional) <= n < len(positional))
        self.all_names = self.argnames | {positional[n] for n in in_range}

    def without_first(self) -> Self:
        """Shift the selection by a first argument that is bound already, as in a method."""
        bound = copy.copy(self)
        bound.argnums = tuple(n - 1 if n > 0 else n for n in self.argnums if n != 0)
        bound._by_name = frozenset(n - 1 for n in self._by_name if n > 0)
        return bound

    def __bool__(self) -> bool:
        return bool(self.argnums or self.argnames)

    def positions(self, num_args: int, keywords: Iterable[str]) -> frozenset[int]:
        """The positions among `num_args` arguments; `ValueError` if one is out of range."""
        given_by_name = self.all_names.intersection(keywords)
        if not given_by_name and not self.lenient:
            check_argnums(self.argnums, num_args, f"{self.kind}_argnums")
        positions = {n % num_args for n in self.argnums if -num_args <= n < num_args}
        return frozenset(positions | {n for n in self._by_name if n < num_args})

    def check_signature(self, what: str) -> None:
        """Raise `ValueError` if `what`, the function, has no argument at one of the positions."""
        count = sum(p.kind in _POSITIONAL for p in self._parameters)
        if self._has(inspect.Parameter.VAR_POSITIONAL) or not self._parameters:
            return
        if any(not -count <= n < count for n in self.argnums):
            raise ArgumentValueError(
                f"{what} has {self.kind}_argnums={self.argnums}, but only accepts {count} "
                "positional arguments."
            )

    def refuse_shared(self, other: "ArgumentSelection") -> None:
        """Raise `ValueError` if an argument is in both selections."""
        ours, theirs = f"{self.kind}_argn", f"{other.kind}_argn"
        names = self.all_names & other.all_names
        if names:
            raise ArgumentValueError(
                f"{ours}ames and {theirs}ames cannot intersect. Argument names {sorted(names)} "
                f"appear in both: {ours}ums={self.argnums}, {theirs}ums={other.argnums}"
            )
        numbers = set(self.argnums) & set(other.argnums)
        if numbers:
            raise ArgumentValueError(
                f"`{ours}ums` {self.argnums} and `{theirs}ums` {other.argnums} cannot intersect: "
                f"{sorted(numbers)} are in both"
            )

    def _has(self, kind: Any) -> bool:
        return any(p.kind is kind for p in self._parameters)


class StaticArguments(ArgumentSelection):
    """Selects static arguments: Python values, which are part of the key of a trace."""

    def refuse_tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `TypeError` if a static argument is or holds a tensor."""
        positions = self.positions(len(args), kwargs) if self else ()
        static: dict[Any, Any] = {i: args[i] for i in positions}
        static |= {name: kwargs[name] for name in self.all_names.intersection(kwargs)}
        for where, value in static.items():
            tensors = [t for t in _torch.tree_flatten(value)[0] if isinstance(t, torch.Tensor)]
            if tensors:
                raise ArgumentTypeError(
                    f"static argument {where!r} holds a tensor of shape {tuple(tensors[0].shape)}, "
                    "but a static argument is a Python value, compared on every call; a tensor is "
                    "traced. Take the argument out of static_argnums and static_argnames."
                )


def _is_empty(value: Any) -> bool:
    return isinstance(value, tuple) and not value
