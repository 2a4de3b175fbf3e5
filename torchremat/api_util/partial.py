"""A function with its static arguments bound, as a value that can be a key."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torchremat.api_util.hashing import WrapHashably
from torchremat.api_util.static_arguments import check_argnums
from torchremat.errors import ArgumentTypeError, ArgumentValueError


@dataclass(frozen=True)
class ArgnumsPartial:
    """A function of which some positional arguments are bound: see `argnums_partial`.

    Two are equal if they bind equal values (in type too) of the same function in the same places.
    """

    fun: Callable[..., Any]
    dyn_argnums: tuple[int, ...]
    bound: tuple[WrapHashably, ...]

    def __call__(self, *dyn_args: Any, **kwargs: Any) -> Any:
        """Call the function with the other arguments."""
        if len(dyn_args) != len(self.dyn_argnums):
            raise ArgumentTypeError(
                f"the function takes {len(self.dyn_argnums)} positional argument(s) besides the "
                f"bound ones, but it was given {len(dyn_args)}"
            )
        given = dict(zip(self.dyn_argnums, dyn_args, strict=True))
        bound = iter(self.bound)
        count = len(self.bound) + len(dyn_args)
        args = (given[i] if i in given else next(bound).value for i in range(count))
        return self.fun(*args, **kwargs)


def argnums_partial(
    fun: Callable[..., Any],
    dyn_argnums: int | Iterable[int],
    args: tuple[Any, ...],
    require_static_args_hashable: bool = True,
) -> tuple[ArgnumsPartial, tuple[Any, ...]]:
    """Bind all positional arguments but those at `dyn_argnums`.

    Args:
        fun: any function.
        dyn_argnums: positions of the arguments that stay arguments, in the order in which the
            result takes them; a negative one counts from the end.
        args: all positional arguments of a call.
        require_static_args_hashable: whether a bound value must be hashable, as a key must be.

    Returns:
        The function of the others, which is equal to another made alike, and the others.

    Raises:
        ValueError: for a position out of range, or one given twice, or a bound value that cannot
            be hashed.

    After `jax.api_util.argnums_partial`.

    >>> power, (x,) = argnums_partial(pow, 0, (2, 3))
    >>> power(x), power(10)
    (8, 1000)
    >>> power == argnums_partial(pow, 0, (5, 3))[0], power == argnums_partial(pow, 0, (5, 3.0))[0]
    (True, False)
    """
    numbers = (dyn_argnums,) if isinstance(dyn_argnums, int) else tuple(dyn_argnums)
    check_argnums(numbers, len(args), "dyn_argnums")
    dynamic = tuple(number % len(args) for number in numbers)
    if len(set(dynamic)) < len(dynamic):
        raise ArgumentValueError(f"dyn_argnums {numbers} name an argument twice, of {len(args)}")
    bound = {i: WrapHashably(arg) for i, arg in enumerate(args) if i not in dynamic}
    if require_static_args_hashable:
        for i, box in bound.items():
            _check_hashable(fun, i, box.value)
    return ArgnumsPartial(fun, dynamic, tuple(bound.values())), tuple(args[i] for i in dynamic)


def _check_hashable(fun: Callable[..., Any], number: int, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise ArgumentValueError(
            "Non-hashable static arguments are not supported, as this can lead to unexpected "
            f"cache-misses. Static argument (index {number}) of type {type(value)} for function "
            f"{getattr(fun, '__name__', fun)} is non-hashable. Pass a tuple for a list, say."
        ) from None
