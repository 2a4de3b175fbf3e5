"""`checkpoint`: a function that saves what a policy says and recomputes the rest."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchremat import _torch
from torchremat.api_util import StaticArguments
from torchremat.core.unknown_options import OPTIONS_OF_TORCH, refuse_unknown
from torchremat.errors import ArgumentTypeError, NotAvailableError
from torchremat.policies.policy import PolicyLike, as_policy
from torchremat.remat.checkpointed import Checkpointed
from torchremat.remat.dynamo import checkpoint_in_compiler
from torchremat.remat.program.compilers import compiler_of


@refuse_unknown(OPTIONS_OF_TORCH, "positional arguments go to what it returns, checkpoint(f)(x)")
def checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    policy: PolicyLike | None = None,
    prevent_cse: Any = True,
    static_argnums: int | tuple[int, ...] = (),
    static_argnames: str | Sequence[str] = (),
    concrete: bool = False,
) -> Any:
    """Make `fun` keep for its derivative only what `policy` lets be saved, and recompute the rest.

    The result has the inputs and outputs of `fun`, and works under `backward`, to any order, and
    under all of `torch.func`. `fun` is traced once for each kind of call, never in a call like an
    earlier one. The kind is: dtypes, layouts, what requires a gradient, Python values, train/eval,
    autocast, grad mode. After a second size in a dimension one trace serves all sizes of it. The
    backward pass replays a graph, not Python. Dropping `fun` frees its traces.

    Args:
        fun: a function of trees of tensors, numbers, strings and `None`; or an `nn.Module`. Tensors
            that it closes over get gradients too. Without it, a decorator is returned.
        policy: what may be saved: a policy of `checkpoint_policies`, its spelling (`"dots"`), or a
            callable `policy(op, *avals, **params)`. `None` saves nothing but inputs, and what must
            not be replayed: the states that random numbers are drawn from, or the numbers, and what
            selects (`topk`, `sort`) unless the policy insists.
        prevent_cse: whether a compiler that sees forward pass and recomputation in one program is
            prevented from merging them: a bool, or a tuple or tree of bools over the arguments. Run
            operator by operator there is nothing to merge, and it has no effect.
        static_argnums: positions of arguments that are any Python values, part of the key. They may
            be passed by name.
        static_argnames: the same by name.
        concrete: an option that JAX had; raises.

    Returns:
        The function under checkpoint.

    Raises:
        TypeError: for a `fun`, `policy`, `prevent_cse` or `static_argnums` of another type.
        ConcretizationError: (a `TypeError`, at the first call) if Python needs the value of a
            traced tensor that is not a mask.
        EffectError: (a `RuntimeError`, at the first call) for what a graph cannot replay: random
            numbers of Python or NumPy, a counter that a module's `forward` changes, a tensor that
            is left where none can be written. In attributes, lists, dicts and closures it can: a
            tensor that `fun` keeps there is put there at each call, with its gradient.

    A module of the last two kinds runs all the same, on a tape of its operators that the backward
    pass runs again. With `config.untraceable = "tape"` every `fun` does, with `"error"` none.

    Warns:
        RetraceWarning: if it is traced again and again for something that changes.

    After `jax.checkpoint`.

    >>> import torch
    >>> @checkpoint
    ... def f(x):
    ...     return torch.sin(torch.sin(x))
    >>> x = torch.ones(3, requires_grad=True)
    >>> f(x).sum().backward()

    >>> power = checkpoint(lambda x, n: x**n, static_argnums=1)
    >>> torch.func.grad(lambda x: power(x, 3).sum())(torch.ones(2))
    tensor([3., 3.])
    """
    if torch.compiler.is_dynamo_compiling():
        if fun is None:
            return functools.partial(checkpoint, policy=policy)
        return functools.partial(checkpoint_in_compiler, fun, policy)
    if concrete:
        raise NotAvailableError(
            "checkpoint has no option `concrete`. Where the function needs the value of an "
            "argument in Python (an `if`, a shape), name the argument in static_argnums: "
            "checkpoint(fun, static_argnums=(1,))"
        )
    options = {
        "policy": as_policy(policy),
        "prevent_cse": check_prevent_cse(prevent_cse),
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
    }
    if fun is None:
        StaticArguments(_no_function, static_argnums, static_argnames)
        return functools.partial(checkpoint, **options)
    if not callable(fun):
        raise ArgumentTypeError(
            f"checkpoint takes a function or an nn.Module, but it was given {fun!r} "
            f"({type(fun).__name__}); options are given by keyword: checkpoint(fun, policy=...)"
        )
    statics = StaticArguments(fun, static_argnums, static_argnames)
    compiler = compiler_of(fun)
    return Checkpointed(fun, options["policy"], prevent_cse, statics, compiler=compiler)


def _no_function(*args: Any, **kwargs: Any) -> None:
    """Stands for the function that a decorator is yet to be given."""


def check_prevent_cse(prevent_cse: Any) -> Any:
    leaves, _ = _torch.tree_flatten(prevent_cse)
    if not all(isinstance(leaf, bool) for leaf in leaves):
        raise ArgumentTypeError(
            "prevent_cse must be a bool, or a tuple or tree of bools over the arguments, but it is "
            f"{prevent_cse!r}"
        )
    return prevent_cse
