"""Kinds of calls that are not traced again, since they could not be one graph.

A kind has the static values of a call. A cache or a dict of tensors may be new in each call, and is
then equal to no other: its refusal would be forgotten at once. It would also stay alive with its
tensors. Of such a value the type is remembered.
"""

from collections.abc import Hashable
from typing import Any

from torchremat.api_util import WrapHashably

_FEW_KINDS = 4
"""After so many refusals the next are remembered by types, whatever the values."""

Kind = tuple[tuple[Any, ...], *tuple[Any, ...]]
"""The key of a call, then the state around it."""


class RefusedKinds:
    """A set of kinds.

    >>> refused = RefusedKinds()
    >>> refused.add(((WrapHashably(object()), WrapHashably(2)), "training"))
    >>> ((WrapHashably(object()), WrapHashably(2)), "training") in refused
    True
    >>> ((WrapHashably(object()), WrapHashably(3)), "training") in refused
    False
    """

    def __init__(self) -> None:
        self._kinds: set[Hashable] = set()
        self._types: set[Hashable] = set()

    def __bool__(self) -> bool:
        return bool(self._kinds or self._types)

    def __contains__(self, kind: Kind) -> bool:
        if not self:
            return False
        return _forget_passing_values(kind) in self._kinds or _forget_values(kind) in self._types

    def add(self, kind: Kind) -> None:
        """Remember a kind that was refused."""
        if len(self._kinds) < _FEW_KINDS:
            self._kinds.add(_forget_passing_values(kind))
        else:
            self._types.add(_forget_values(kind))


def _forget_passing_values(kind: Kind) -> Hashable:
    key, *state = kind
    return forget_passing_values(key), *state


def forget_passing_values(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key of a call, with types in place of values that no other call has an equal of.

    >>> forget_passing_values((WrapHashably(object()), "text"))
    (<class 'object'>, 'text')
    """
    return tuple(type(k.val) if _is_passing(k) else k for k in key)


def _forget_values(kind: Kind) -> Hashable:
    key, *state = kind
    return tuple(type(k.val) if isinstance(k, WrapHashably) else k for k in key), *state


def _is_passing(part: Any) -> bool:
    """Whether it is a value that another call can have no equal of, or that may change."""
    if not isinstance(part, WrapHashably) or callable(part.val):
        return False
    try:
        hash(part.val)
    except TypeError:
        return True
    of_type: Any = type(part.val).__hash__
    return of_type is object.__hash__
