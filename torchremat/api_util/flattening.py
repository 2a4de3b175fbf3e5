"""Functions of trees as functions of flat leaves, and back.

After `jax.api_util`, whose functions transform a `WrappedFun`; these take and give plain functions.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torchremat import _torch
from torchremat.api_util.hashing import WrapHashably
from torchremat.api_util.static_arguments import check_argnums
from torchremat.errors import ArgumentTypeError, ArgumentValueError

FlatFun = Callable[..., list[Any]]
"""A function from leaves to a list of leaves."""


TreeThunk = Callable[[], _torch.TreeSpec]
"""Gives the structure of the last result of a flat function."""


def flatten_fun(fun: Callable[..., Any], in_tree: _torch.TreeSpec) -> tuple[FlatFun, TreeThunk]:
    """Make `fun` a function of leaves.

    Args:
        fun: a function of trees, with keyword arguments.
        in_tree: the structure of `(args, kwargs)`.

    Returns:
        `(flat_fun, out_tree_thunk)`: `flat_fun(*leaves)` gives the list of the leaves of the
        result, and then `out_tree_thunk()` its structure.

    Raises:
        RuntimeError: by `out_tree_thunk` if `flat_fun` has not run.

    After `jax.api_util.flatten_fun`.

    >>> args, kwargs = ([1, 2],), {"scale": 10}
    >>> leaves, in_tree = _torch.tree_flatten((args, kwargs))
    >>> def f(pair, scale):
    ...     return {"sum": sum(pair) * scale}
    >>> flat_fun, out_tree_thunk = flatten_fun(f, in_tree)
    >>> flat_fun(*leaves)
    [30]
    >>> _torch.tree_unflatten([30], out_tree_thunk())
    {'sum': 30}
    """

    def call(leaves: Sequence[Any]) -> Any:
        args, kwargs = _torch.tree_unflatten(leaves, in_tree)
        return fun(*args, **kwargs)

    return _flatten_result(call)


def flatten_fun_nokwargs(
    fun: Callable[..., Any], in_tree: _torch.TreeSpec
) -> tuple[FlatFun, TreeThunk]:
    """Make `fun`, which has no keyword arguments, a function of leaves.

    As `flatten_fun`, with the structure of `args` as `in_tree`.

    After `jax.api_util.flatten_fun_nokwargs`.

    >>> leaves, in_tree = _torch.tree_flatten(([1, 2], 3))
    >>> flat_fun, out_tree_thunk = flatten_fun_nokwargs(lambda pair, x: (x, pair), in_tree)
    >>> flat_fun(*leaves), out_tree_thunk().num_leaves
    ([3, 1, 2], 3)
    """

    def call(leaves: Sequence[Any]) -> Any:
        return fun(*_torch.tree_unflatten(leaves, in_tree))

    return _flatten_result(call)


def _flatten_result(call: Callable[[Sequence[Any]], Any]) -> tuple[FlatFun, TreeThunk]:
    last: list[_torch.TreeSpec] = []

    def flat_fun(*leaves: Any) -> list[Any]:
        found, out_tree = _torch.tree_flatten(call(leaves))
        last[:] = [out_tree]
        return found

    def out_tree_thunk() -> _torch.TreeSpec:
        if not last:
            raise RuntimeError(
                "the structure of the result is not known, since the flat function has not run: "
                "call it first"
            )
        return last[0]

    return flat_fun, out_tree_thunk


def apply_flat_fun(
    fun: Callable[..., Sequence[Any]], io_tree: tuple[_torch.TreeSpec, _torch.TreeSpec], *args: Any
) -> Any:
    """Call a function of leaves with trees.

    Args:
        fun: a function from leaves to leaves.
        io_tree: the structure of `(args, {})` that it takes, and that of its result.
        *args: the arguments.

    Returns:
        The result as a tree.

    Raises:
        TypeError: if the arguments have another structure.

    After `jax.api_util.apply_flat_fun`.

    >>> in_tree = _torch.tree_flatten((([0, 0],), {}))[1]
    >>> out_tree = _torch.tree_flatten({"sum": 0})[1]
    >>> apply_flat_fun(lambda a, b: [a + b], (in_tree, out_tree), [1, 2])
    {'sum': 3}
    """
    expected, out_tree = io_tree
    return _apply(fun, expected, out_tree, (args, {}))


def apply_flat_fun_nokwargs(
    fun: Callable[..., Sequence[Any]],
    io_tree: tuple[_torch.TreeSpec, _torch.TreeSpec],
    args: tuple[Any, ...],
) -> Any:
    """As `apply_flat_fun`, with the structure of `args` alone, and the arguments in a tuple.

    >>> in_tree, out_tree = (_torch.tree_flatten(tree)[1] for tree in ((0, 0), 0))
    >>> apply_flat_fun_nokwargs(lambda a, b: [a + b], (in_tree, out_tree), (1, 2))
    3
    """
    expected, out_tree = io_tree
    return _apply(fun, expected, out_tree, args)


def _apply(
    fun: Callable[..., Sequence[Any]],
    expected: _torch.TreeSpec,
    out_tree: _torch.TreeSpec,
    tree: Any,
) -> Any:
    leaves, given = _torch.tree_flatten(tree)
    if given != expected:
        raise ArgumentTypeError(f"Expected {expected}, got {given}")
    return _torch.tree_unflatten(list(fun(*leaves)), out_tree)


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
