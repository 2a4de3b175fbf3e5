"""`scan`: a loop over slices."""

from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeVar

import torch

from torchremat.core.trees import Structure
from torchremat.errors import ArgumentTypeError, ArgumentValueError
from torchremat.loops.call_loop import call_loop, flatten_state
from torchremat.loops.step import Tensors, UserStep

T = TypeVar("T")


def scan(
    f: Callable[[T, Any], tuple[T, Any]],
    init: T,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    *,
    budget: int | str | None = None,
) -> tuple[T, Any]:
    """Run `f` over the slices of `xs`, with a backward pass that saves few states.

    It is `while_loop` with a known number of steps, slices, and results that are stacked. What
    is said there of saved states, derivatives, `vmap` and `budget` is true of it, too.

    Args:
        f: takes the state and a slice of `xs`; returns the next state, and a result, or `None`.
        init: the first state: a tensor, or a tree. Numbers become tensors.
        xs: tensors, `(n, ...)` each, or a tree of them; `None` if `f` reads no slices.
        length: the number of steps, where `xs` is `None`.
        reverse: whether the last slice comes first. Results are stacked at the places of slices.
        budget: bytes for saved states and for derivatives of steps, half each; an `int` or text
            (`"64MiB"`).

    Returns:
        The last state, and the results, `(n, ...)` each.

    Raises:
        ValueError: there are no steps, or `xs` and `length` differ in their number.
        TypeError: a state is not like the first.
        EffectError: `f` writes to its state, or to a tensor that it closes over.

    >>> import torch
    >>> import torchremat as tr
    >>> w = torch.full((2, 2), 0.5, requires_grad=True)
    >>> def step(h, x):
    ...     h = torch.tanh(h @ w + x)
    ...     return h, h.sum()
    >>> last, sums = tr.scan(step, torch.zeros(2), torch.ones(100, 2), budget="64B")
    >>> sums.shape
    torch.Size([100])
    >>> last.sum().backward()
    >>> w.grad.shape
    torch.Size([2, 2])

    The names are those of `jax.lax.scan`.
    """
    if not callable(f):
        raise ArgumentTypeError(f"f={f!r} must be a function of the state and a slice")
    result: tuple[T, Any] = _run(f, init, xs, length, reverse, budget)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]  # whose graph breaks here
def _run(
    f: Any, init: Any, xs: Any, length: int | None, reverse: bool, budget: int | str | None
) -> Any:
    slices = Structure.of(xs)
    values = slices.flatten(xs)
    num_steps = _count_steps(values, length)
    structure, state = flatten_state(init)
    step = UserStep(f, None, structure, state, slices)
    last, stacked = call_loop(
        step, state, values, length=num_steps, is_reversed=reverse, budget=budget
    )
    return structure.unflatten(last), step.unflatten_stacked(stacked)


def _count_steps(values: Tensors, length: int | None) -> int:
    if length is not None and (isinstance(length, bool) or not isinstance(length, Integral)):
        raise ArgumentTypeError(f"scan: length={length!r} must be an int, the number of steps")
    if any(tensor.ndim == 0 for tensor in values):
        raise ArgumentValueError("scan: a tensor of xs has no dimension to take slices of")
    sizes = [tensor.shape[0] for tensor in values] + ([] if length is None else [int(length)])
    if not sizes:
        raise ArgumentValueError("scan: give xs, or length, the number of steps")
    num_steps = sizes[0]  # a symbol, in a graph of many sizes
    if any(size != num_steps for size in sizes):
        found = sorted({int(size) for size in sizes})
        raise ArgumentValueError(f"scan: xs and length give several numbers of steps, {found}")
    if num_steps < 1:
        raise ArgumentValueError("scan: there must be at least one step")
    return num_steps
