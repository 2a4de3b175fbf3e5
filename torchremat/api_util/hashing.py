"""Equality of static values of traced functions.

After `WrapHashably` and `_HashableWithStrictTypeEquality` of `jax.api_util`.
"""

import copy
from operator import is_
from typing import Any


class WrapHashably:
    """A static value as part of a cache key.

    Two are equal when type and value are, also inside tuples, lists and dicts: `1`, `1.0` and
    `True` are three. A value that cannot be hashed is compared with a copy that `freeze` makes: a
    list that was changed in place is unequal to it.

    >>> WrapHashably(1) == WrapHashably(True), WrapHashably((1, 2)) == WrapHashably((1, 2))
    (False, True)
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def val(self) -> Any:
        """The value, by the name that JAX has for it."""
        return self.value

    def freeze(self) -> "WrapHashably":
        """Copy a value that cannot be hashed, since it may change."""
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
        return len(a) == len(b) and (all(map(is_, a, b)) or all(map(same_value, a, b)))
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
