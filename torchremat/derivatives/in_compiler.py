"""Derivatives in a program that Dynamo captures: those of `torch.func`, by JAX's conventions.

Dynamo knows the functions of `torch.func`. It cannot follow ours, which read what it hides: it
would break the graph at each of their steps, some of them inside of a level of `torch.func`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch


def value_and_grad_in_compiler(
    fun: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Compute what `value_and_grad(fun, argnums, has_aux)` gives; Dynamo traces this."""
    differentiated = torch.func.grad_and_value(fun, argnums, has_aux)
    gradient, value = differentiated(*_as_tensors(args), **kwargs)
    return value, _conjugate(gradient)


def vjp_in_compiler(fun: Callable[..., Any], primals: Sequence[Any], has_aux: bool) -> Any:
    """Compute what `vjp(fun, *primals)` gives; Dynamo traces this."""
    out, pull, *aux = torch.func.vjp(fun, *_as_tensors(primals), has_aux=has_aux)

    def pull_back(cotangents: Any) -> Any:
        return _conjugate(pull(_conjugate(_as_tensors(cotangents))))

    return (out, pull_back, *aux)


def jvp_in_compiler(
    fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool
) -> Any:
    """Compute what `jvp` gives; Dynamo traces this."""
    given = tuple(_as_tensors(primals)), tuple(_as_tensors(tangents))
    return torch.func.jvp(fun, *given, has_aux=has_aux)


def jacobian_in_compiler(
    what: str,
    fun: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Compute the Jacobian, `what` is `"jacfwd"` or `"jacrev"`; Dynamo traces this."""
    if what == "jacfwd":
        return torch.func.jacfwd(fun, argnums, has_aux)(*_as_tensors(args), **kwargs)
    found = torch.func.jacrev(fun, argnums, has_aux=has_aux)(*_as_tensors(args), **kwargs)
    return (_conjugate(found[0]), found[1]) if has_aux else _conjugate(found)


def _as_tensors(tree: Any) -> Any:
    return _torch.tree_map(
        lambda leaf: torch.tensor(leaf) if isinstance(leaf, float | complex) else leaf, tree
    )


def _conjugate(tree: Any) -> Any:
    """Conjugate complex tensors: PyTorch's gradients are the conjugates of JAX's."""
    return _torch.tree_map(
        lambda t: t.conj().resolve_conj() if isinstance(t, Tensor) and t.is_complex() else t, tree
    )


@_torch.out_of_compiler(
    "torch.func has nothing like this transformation of torchremat, so it runs outside of the "
    "compiled graph. Call it outside of the compiled function to have one graph"
)
def run_outside_compiler(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`, at which Dynamo breaks the graph."""
    return function(*args, **kwargs)
