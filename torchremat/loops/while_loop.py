"""`while_loop`: a loop that ends when its state says so."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torchremat.errors import ArgumentTypeError
from torchremat.loops.call_loop import call_loop, flatten_state
from torchremat.loops.step import UserStep

T = TypeVar("T")


def while_loop(
    cond_fun: Callable[[T], Any],
    body_fun: Callable[[T], T],
    init_val: T,
    *,
    budget: int | str | None = None,
) -> T:
    """Run `body_fun` while `cond_fun` is true, with a backward pass that saves few states.

    How many steps there are need not be known. The states to save change while the loop runs:
    about two for each doubling of the steps. The backward pass runs each step again from the
    saved state before it. A thousand steps run 1.8 times more at most, besides their derivatives.
    Plain autograd saves what all steps make.

    Derivatives of any order, forward and reverse, and `vmap` are those of the loop written out.
    Gradients have its bits, but for sums of gradients of states that a step reads several times.
    Under `vmap` steps run until each element has ended, and one that has ended stays as it is.
    Tensors that the functions close over have gradients, too; under autocast these are summed in
    float32. Inside of a checkpoint, a plan or `jit` the loop is written out in the graph, whose
    policy decides.

    Args:
        cond_fun: takes the state, returns a truth value or a tensor with one element.
        body_fun: takes the state, returns the next. Both are Python, and may branch on values.
        init_val: the first state: a tensor, or a tree. Numbers become tensors. Each state has the
            structure, shapes, dtypes and devices of the first.
        budget: bytes for saved states and for derivatives of steps, half each; an `int` or text
            (`"64MiB"`). The first state, which the caller has, is not counted, nor is one step.

    Returns:
        The last state.

    Raises:
        TypeError: a state is not like the first.
        EffectError: `body_fun` writes to its state, or to a tensor that it closes over.

    >>> import torch
    >>> import torchremat as tr
    >>> a = torch.tensor(9.0, requires_grad=True)
    >>> def improve(x):
    ...     return (x + a / x) / 2
    >>> root = tr.while_loop(lambda x: (x * x - a).abs() > 1e-4, improve, torch.tensor(1.0))
    >>> root.backward()
    >>> round(root.item(), 4), round(a.grad.item(), 4)  # 1 / (2 sqrt(9))
    (3.0, 0.1667)

    The names are those of `jax.lax.while_loop`. States: Wang, Moin and Iaccarino, *Minimal
    repetition dynamic checkpointing algorithm for unsteady adjoint calculation* (2009).
    """
    for name, function in (("cond_fun", cond_fun), ("body_fun", body_fun)):
        if not callable(function):
            raise ArgumentTypeError(f"{name}={function!r} must be a function of the state")
    last: T = _run(cond_fun, body_fun, init_val, budget)
    return last


@torch.compiler.disable  # type: ignore[untyped-decorator]  # whose graph breaks here
def _run(cond_fun: Any, body_fun: Any, init_val: Any, budget: int | str | None) -> Any:
    structure, state = flatten_state(init_val)
    step = UserStep(body_fun, cond_fun, structure, state)
    last, _ = call_loop(step, state, [], length=None, budget=budget)
    return structure.unflatten(last)
