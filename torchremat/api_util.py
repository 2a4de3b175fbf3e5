"""Arguments of traced functions: which are static, and when two static values are the same.

After `jax.api_util`.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from torchremat import _torch


class WrapHashably:
    """A static value as part of a cache key.

    Two are equal when type and value are, also inside tuples, lists and dicts: `1`, `1.0` and
    `True` are three. A value that cannot be hashed is compared with a copy taken by `frozen`, so
    that a list that was changed in place is no longer what it was.

    >>> WrapHashably(1) == WrapHashably(True), WrapHashably((1, 2)) == WrapHashably((1, 2))
    (False, True)
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def frozen(self) -> "WrapHashably":
        """This value as it is now."""
        try:
            hash(self.value)
        except TypeError:
            return WrapHashably(copy.deepcopy(self.value))
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WrapHashably) and same_value(self.value, other.value)

    def __hash__(self) -> int:
        try:
            return hash((type(self.value), self.value))
        except TypeError:
            return hash(type(self.value))

    def __repr__(self) -> str:
        return f"WrapHashably({self.value!r})"


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are one to a trace: equal in type and value, also within containers.

    `0.0` and `-0.0` are two, and not a number is itself.

    >>> same_value([1, 2.0], [1, 2.0]), same_value(0.0, -0.0), same_value(1, True)
    (True, False, False)
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, float):
        return bool(a.hex() == b.hex())
    if isinstance(a, complex):
        return same_value((a.real, a.imag), (b.real, b.imag))
    equal = a == b
    if hasattr(equal, "all"):  # of arrays
        alike = all(getattr(a, name, 0) == getattr(b, name, 0) for name in ("shape", "dtype"))
        return bool(alike and equal.all())
    return bool(equal)


def as_argnums(value: Any, what: str = "static_argnums") -> tuple[int, ...]:
    """Positions of arguments as a tuple; `TypeError` if they are no int or tuple of ints.

    >>> as_argnums(1), as_argnums((0, -1))
    ((1,), (0, -1))
    """
    given = value if isinstance(value, tuple) else (value,)
    if any(isinstance(item, bool) or not isinstance(item, int) for item in given):
        raise TypeError(
            f"{what} must be an int or a tuple of ints, but it is {value!r} "
            f"({type(value).__name__}); write {what}=(0, 2), say"
        )
    return given


def as_argnames(value: Any, what: str = "static_argnames") -> tuple[str, ...]:
    """Names of arguments as a tuple; `TypeError` if they are no string or iterable of strings."""
    given = (value,) if isinstance(value, str) else value
    names = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{what} must be a string or an iterable of strings, but it is {value!r} "
            f"({type(value).__name__})"
        )
    return names


def check_argnums(argnums: Sequence[int], num_args: int, what: str = "static_argnums") -> None:
    """Raise `ValueError` if a position is out of range for `num_args` positional arguments."""
    for number in argnums:
        if not -num_args <= number < num_args:
            raise ValueError(
                f"{what} contains {number}, but the call has {num_args} positional argument(s): "
                f"positions must be at least {-num_args} and less than {num_args}"
            )


def parameters_of(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of `fun`, or none if it has no signature (builtins)."""
    try:
        return list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return []


class StaticArguments:
    """Which arguments of calls of one function are static, by position and by name.

    A static position is also found when the argument is passed by keyword.
    """

    def __init__(self, fun: Callable[..., Any], argnums: Any, argnames: Any) -> None:
        self.argnums = as_argnums(argnums) if not _is_empty(argnums) else ()
        self.argnames = frozenset(as_argnames(argnames))
        parameters = parameters_of(fun) if self.argnums or self.argnames else []
        positional = [p.name for p in parameters if p.kind in _POSITIONAL]
        unknown = self.argnames - {p.name for p in parameters}
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        if unknown and parameters and not takes_any:
            raise ValueError(
                f"static_argnames contains {sorted(unknown)}, but the function has the parameters "
                f"{[p.name for p in parameters]}"
            )
        named = {positional.index(name) for name in self.argnames if name in positional}
        self._by_name = frozenset(named)
        in_range = (n for n in self.argnums if -len(positional) <= n < len(positional))
        self.all_names = self.argnames | {positional[n] for n in in_range}

    def without_first(self) -> "StaticArguments":
        """The same for calls in which the first argument is bound already, as in a method."""
        bound = copy.copy(self)
        bound.argnums = tuple(n - 1 if n > 0 else n for n in self.argnums if n != 0)
        bound._by_name = frozenset(n - 1 for n in self._by_name if n > 0)
        return bound

    def __bool__(self) -> bool:
        return bool(self.argnums or self.argnames)

    def positions(self, num_args: int, keywords: Iterable[str]) -> frozenset[int]:
        """The static positions among `num_args` arguments; `ValueError` if one is out of range."""
        given_by_name = self.all_names.intersection(keywords)
        if not given_by_name:
            check_argnums(self.argnums, num_args)
        positions = {n % num_args for n in self.argnums if -num_args <= n < num_args}
        return frozenset(positions | {n for n in self._by_name if n < num_args})

    def refuse_tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `TypeError` if a static argument is or holds a tensor."""
        positions = self.positions(len(args), kwargs) if self else ()
        static: dict[Any, Any] = {i: args[i] for i in positions}
        static |= {name: kwargs[name] for name in self.all_names.intersection(kwargs)}
        for where, value in static.items():
            held = [t for t in _torch.tree_flatten(value)[0] if isinstance(t, torch.Tensor)]
            if held:
                raise TypeError(
                    f"static argument {where!r} holds a tensor of shape {tuple(held[0].shape)}, "
                    "but a static argument is a Python value, compared on every call; a tensor is "
                    "traced. Take the argument out of static_argnums and static_argnames."
                )


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _is_empty(value: Any) -> bool:
    return isinstance(value, tuple) and not value
