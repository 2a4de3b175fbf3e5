"""PyTorch's names for checkpoints and transformations, each a thin adapter onto torchremat's.

Tests of PyTorch import these in place of its own. An option without a counterpart skips the test
that asks for it, and says which.
"""

import functools
import unittest
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.utils.checkpoint

import torchremat as tr


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    early_stop: bool = True,
    context_fn: Any = None,
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Run `function` under `torchremat.checkpoint`, as `torch.utils.checkpoint.checkpoint` does."""
    static = tuple(i for i, argument in enumerate(args) if isinstance(argument, FunctionType))
    checkpointed = tr.checkpoint(function, policy=_policy_of(context_fn), static_argnums=static)
    return checkpointed(*args, **kwargs)


def _policy_of(context_fn: Any) -> Any:
    if context_fn is None:
        return None
    if not isinstance(context_fn, functools.partial) or not context_fn.args:
        raise unittest.SkipTest("not applicable: context_fn that makes contexts of its own")
    chosen = context_fn.args[0]
    if callable(chosen):
        return tr.checkpoint_policies.from_selective(chosen)
    return tr.checkpoint_policies.save_ops(*chosen)


def rebind_sequential() -> Any:
    """PyTorch's `checkpoint_sequential`, whose checkpoints are ours."""
    theirs: Any = torch.utils.checkpoint.checkpoint_sequential
    return FunctionType(
        theirs.__code__,
        {**theirs.__globals__, "checkpoint": checkpoint},
        theirs.__name__,
        theirs.__defaults__,
    )


checkpoint_sequential = rebind_sequential()


def vmap(
    func: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str = "error",
    *,
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Map `func`, as `torch.func.vmap` does."""
    return tr.vmap(func, in_dims, out_dims, randomness=randomness, chunk_size=chunk_size)  # type: ignore[arg-type]


def grad(func: Callable[..., Any], argnums: Any = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Differentiate `func`, as `torch.func.grad` does."""
    return tr.grad(func, argnums, has_aux)


def grad_and_value(
    func: Callable[..., Any], argnums: Any = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Differentiate `func`, as `torch.func.grad_and_value` does: the gradient comes first."""
    both = tr.value_and_grad(func, argnums, has_aux)
    return lambda *args, **kwargs: both(*args, **kwargs)[::-1]


def vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Differentiate `func`, as `torch.func.vjp` does."""
    return tr.vjp(func, *primals, has_aux=has_aux)


def jvp(
    func: Callable[..., Any],
    primals: Any,
    tangents: Any,
    *,
    strict: bool = False,
    has_aux: bool = False,
) -> Any:
    """Differentiate `func`, as `torch.func.jvp` does."""
    if strict:
        raise unittest.SkipTest("not applicable: jvp has no option strict")
    return tr.jvp(func, primals, tangents, has_aux=has_aux)


def jacrev(
    func: Callable[..., Any],
    argnums: Any = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    _preallocate_and_copy: bool = False,
) -> Callable[..., Any]:
    """Differentiate `func`, as `torch.func.jacrev` does."""
    if chunk_size is not None or _preallocate_and_copy:
        raise unittest.SkipTest("not applicable: jacrev has no option chunk_size")
    return tr.jacrev(func, argnums, has_aux=has_aux)


def jacfwd(
    func: Callable[..., Any], argnums: Any = 0, has_aux: bool = False, *, randomness: str = "error"
) -> Callable[..., Any]:
    """Differentiate `func`, as `torch.func.jacfwd` does."""
    if randomness != "error":
        raise unittest.SkipTest("not applicable: jacfwd has no option randomness")
    return tr.jacfwd(func, argnums, has_aux=has_aux)


def hessian(func: Callable[..., Any], argnums: Any = 0) -> Callable[..., Any]:
    """Differentiate `func` twice, as `torch.func.hessian` does."""
    return tr.hessian(func, argnums)


def linearize(func: Callable[..., Any], *primals: Any) -> Any:
    """Differentiate `func`, as `torch.func.linearize` does."""
    return tr.linearize(func, *primals)
