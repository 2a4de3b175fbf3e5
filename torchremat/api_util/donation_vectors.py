"""Donated leaves of a call: their storage may be reused for the call's outputs."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torchremat import _torch
from torchremat.errors import ArgumentValueError


def donation_vector(
    donate_argnums: int | Iterable[int],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    donate_argnames: str | Iterable[str] = (),
) -> tuple[bool, ...]:
    """Whether each leaf of `args`, then of `kwargs`, is donated.

    Args:
        donate_argnums: positions of donated arguments; a negative one counts from the end. One
            beyond the arguments of the call donates nothing.
        args: the positional arguments, trees.
        kwargs: the keyword arguments, trees.
        donate_argnames: names of donated keyword arguments.

    Returns:
        A tuple of as many bools as `args` and `kwargs` have leaves.

    After `jax.api_util.donation_vector`.

    >>> params, batch = {"w": 1, "b": 2}, 3
    >>> donation_vector(0, (params, batch), {"rate": 0.1})
    (True, True, False, False)
    >>> donation_vector((), (params,), {"state": (4, 5)}, "state")
    (False, False, True, True)
    """
    numbers = {donate_argnums} if isinstance(donate_argnums, int) else set(donate_argnums)
    names = {donate_argnames} if isinstance(donate_argnames, str) else set(donate_argnames)

    def flags() -> Iterator[bool]:
        for i, value in enumerate(args):
            yield from _repeat(i in numbers or i - len(args) in numbers, value)
        for name, value in kwargs.items():
            yield from _repeat(name in names, value)

    return tuple(flags())


def _repeat(flag: bool, tree: Any) -> list[bool]:
    return [flag] * len(_torch.tree_flatten(tree)[0])


def rebase_donate_argnums(
    donate_argnums: Iterable[int], static_argnums: Iterable[int]
) -> tuple[int, ...]:
    """The donated positions among the arguments that are left when the static ones are taken out.

    Args:
        donate_argnums: positions of donated arguments, in any order, none negative.
        static_argnums: positions of static ones, likewise.

    Returns:
        The new positions, each once, in order.

    Raises:
        ValueError: if an argument is both.

    After `jax.api_util.rebase_donate_argnums`.

    >>> rebase_donate_argnums((3, 4), (0, 1))
    (1, 2)
    """
    donated, static = sorted(set(donate_argnums)), sorted(set(static_argnums))
    both = [number for number in donated if number in static]
    if both:
        raise ArgumentValueError(
            f"`static_argnums` {static} and `donate_argnums` {donated} cannot intersect: {both} "
            "are in both, but a static argument has no storage to reuse."
        )
    return tuple(number - sum(s < number for s in static) for number in donated)
