"""`grad`, `value_and_grad`, `vjp` and `jvp`: JAX's, over `torch.func`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.avals import Aval
from torchremat.derivatives.flat_functions import (
    Flattened,
    as_scalar_tensor,
    check_callable,
    conjugate_leaves,
    fits,
    resolve_argnums,
)
from torchremat.derivatives.in_compiler import (
    jvp_in_compiler,
    run_outside_compiler,
    value_and_grad_in_compiler,
    vjp_in_compiler,
)
from torchremat.derivatives.linearize import pull_back_graph
from torchremat.derivatives.rule_arguments import describe_tree, name_of
from torchremat.derivatives.rules import is_inexact
from torchremat.errors import DerivativeShapeError, DerivativeTypeError
from torchremat.typed_graph.typed_graph import TypedGraph


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Make a function that gives the gradient of `fun`, which gives a scalar.

    Args:
        fun: a function of trees of tensors and Python values, or an `nn.Module`, that returns a
            real tensor of shape (). With `has_aux` it returns a pair of it and auxiliary data.
            Keyword arguments are passed to it, and not differentiated.
        argnums: the position, or positions, of the arguments to differentiate.
        has_aux: whether `fun` returns a pair, of which only the first is differentiated.
        holomorphic: whether `fun` is a holomorphic function of complex arguments; the gradient is
            then its complex derivative.
        allow_int: whether there may be integers among the arguments to differentiate; their
            gradient is `None`.

    Returns:
        A function of the arguments of `fun`. It gives a tree like the argument, with zeros for
        what has no part in the result. It is a tuple of such trees if `argnums` is a sequence. With
        `has_aux`, a pair of it and the auxiliary data.

    Raises:
        TypeError: if the result is not a scalar or not real, an argument has no derivatives or
            `argnums` is out of range.

    For a complex argument x + iy it is, as in JAX, df/dx - i df/dy, the conjugate of what
    `torch.func.grad` gives: nothing is conjugated, so that the step down is against its conjugate.

    After `jax.grad`.

    >>> import torch
    >>> loss = lambda params, x: ((params["w"] * x - params["b"]) ** 2).sum()
    >>> params = {"w": torch.ones(2), "b": torch.zeros(())}
    >>> grad(loss)(params, torch.tensor([1.0, 2.0]))
    {'w': tensor([2., 8.]), 'b': tensor(-6.)}
    >>> grad(lambda x: 2 * x)(torch.ones(3))
    Traceback (most recent call last):
      ...
    torchremat.errors.DerivativeTypeError: Gradient only defined for scalar-output functions. ...
    """
    both = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int)

    def grad_f(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return _name_function(grad_f, "grad", fun)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Make a function that gives a pair of what `fun` gives and its gradient.

    As `grad`; with `has_aux` the first of the pair is again one, of the value and auxiliary data.

    After `jax.value_and_grad`.

    >>> import torch
    >>> value_and_grad(torch.sin)(torch.tensor(0.0))
    (tensor(0.), tensor(1.))
    >>> value_and_grad(lambda x: (x * x, "aux"), has_aux=True)(3.0)
    ((tensor(9.), 'aux'), tensor(6.))
    """
    check_callable(fun, "grad")

    def value_and_grad_f(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if holomorphic or allow_int:
                return run_outside_compiler(value_and_grad_f, *args, **kwargs)
            return value_and_grad_in_compiler(fun, argnums, has_aux, args, kwargs)
        chosen = resolve_argnums(argnums, args)
        check = _ScalarCheck(holomorphic)
        flat = Flattened(fun, args, kwargs, chosen, has_aux, check)
        _check_inputs(flat, holomorphic=holomorphic, allow_int=allow_int)
        found, rest, pull = build_pull_back(flat)
        gradients = flat.unflatten_inputs(pull([torch.ones_like(t) for t in found]))
        value, aux = flat.unflatten_result(found, rest)
        gradient = gradients[0] if isinstance(argnums, int) else gradients
        return ((value, aux) if has_aux else value), gradient

    return _name_function(value_and_grad_f, "value_and_grad", fun)


def _name_function(function: Callable[..., Any], what: str, fun: Any) -> Callable[..., Any]:
    if torch.compiler.is_dynamo_compiling():  # Dynamo's functions have no names to set
        return function
    function.__name__ = function.__qualname__ = f"{what}({name_of(fun)})"
    function.__doc__ = getattr(fun, "__doc__", None)
    return function


@dataclass(frozen=True)
class _ScalarCheck:
    holomorphic: bool

    def __call__(self, result: Any) -> None:
        only = "Gradient only defined for scalar-output functions. "
        if not isinstance(result, Tensor):
            if isinstance(result, int | float | complex):
                return
            raise DerivativeTypeError(f"{only}Output was {describe_tree(result)}.")
        if result.dim():
            raise DerivativeTypeError(f"{only}Output had shape: {tuple(result.shape)}.")
        if self.holomorphic and not result.is_complex():
            raise DerivativeTypeError(
                f"grad with holomorphic=True requires outputs with complex dtype, but got "
                f"{result.dtype}."
            )
        if not self.holomorphic and not result.is_floating_point():
            raise DerivativeTypeError(
                "grad requires real-valued outputs (output dtype that is floating-point), but got "
                f"{result.dtype}. For holomorphic differentiation, pass holomorphic=True. For "
                "differentiation of non-holomorphic functions involving complex outputs, or "
                "integer outputs, use vjp directly."
            )


def _check_inputs(flat: Flattened, *, holomorphic: bool, allow_int: bool) -> None:
    leaves, _ = _torch.tree_flatten_with_path(_torch.tree_unflatten(flat.leaves, flat.spec))
    for path, leaf in leaves:
        first: Any = path[0]
        where = f" (argument {flat.argnums[first.idx]}{_torch.keystr(path[1:])})"
        if holomorphic and not (isinstance(leaf, Tensor) and leaf.is_complex()):
            raise DerivativeTypeError(
                "grad with holomorphic=True requires inputs with complex dtype, but got "
                f"{_kind(leaf)}{where}."
            )
        if not is_inexact(leaf) and not (allow_int and isinstance(leaf, Tensor | int)):
            raise DerivativeTypeError(
                "grad requires real- or complex-valued inputs (input dtype that is floating-point "
                f"or complex), but got {_kind(leaf)}{where}. If you want to use Boolean- or "
                "integer-valued inputs, use vjp or set allow_int to True."
            )


def _kind(leaf: Any) -> str:
    return str(leaf.dtype) if isinstance(leaf, Tensor) else f"{leaf!r} ({type(leaf).__name__})"


# --- vjp ------------------------------------------------------------------------------------------


def vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The value of `fun`, and the function that takes cotangents of it to those of the arguments.

        y = f(x)        ct_x = ct_y J       (J the Jacobian at x; nothing is conjugated)

    Args:
        fun: a function of trees of tensors and Python values, or an `nn.Module`.
        *primals: its arguments.
        has_aux: whether `fun` returns a pair, of which only the first is differentiated.

    Returns:
        `(out, pull_back)`, with `has_aux` `(out, pull_back, aux)`. `pull_back(ct)` takes a tree
        like `out` (anything for what has no derivatives), any number of times, and gives a tuple,
        one entry an argument: trees with zeros for what has no part in the result, and `None` for
        what has no derivatives. `pull_back.graph` is the same as a `TypedGraph`, made when it is
        first read, which runs no operator of the forward pass.

    Raises:
        TypeError: by `pull_back`, if the cotangents are another tree; `ValueError`, if they have
            other shapes or dtypes.

    After `jax.vjp`.

    >>> import torch
    >>> out, pull_back = vjp(lambda x, y: {"product": x * y}, torch.tensor(2.0), torch.tensor(3.0))
    >>> pull_back({"product": torch.tensor(1.0)})
    (tensor(3.), tensor(2.))
    """
    check_callable(fun, "vjp")
    if torch.compiler.is_dynamo_compiling():
        return vjp_in_compiler(fun, primals, has_aux)
    flat = Flattened(fun, primals, {}, tuple(range(len(primals))), has_aux)
    found, rest, pull = build_pull_back(flat)
    out, aux = flat.unflatten_result(found, rest)
    pull_back = PullBack(flat, pull)
    return (out, pull_back, aux) if has_aux else (out, pull_back)


@dataclass(eq=False)
class PullBack:
    """The function of `vjp`: from cotangents of the result to those of the arguments."""

    flat: Flattened
    pull: Callable[[Sequence[Tensor]], Sequence[Tensor]]

    def __call__(self, cotangents: Any) -> tuple[Any, ...]:
        """The cotangents of the arguments, a tuple."""
        return self.flat.unflatten_inputs(self.pull(self.flat.flatten_cotangents(cotangents)))

    @cached_property
    def graph(self) -> TypedGraph:
        """The function as a graph, whose constants the forward pass saves for it."""
        return pull_back_graph(self.flat, build_pull_back)


def build_pull_back(
    flat: Flattened,
) -> tuple[Sequence[Tensor], Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor]]]:
    """Compute outputs with derivatives, all others, and the function of cotangents.

    y = f(x):       (y with derivatives, the rest of y, ct_y -> ct_x)
    """
    values = flat.values
    if not values:
        found, rest = flat()
        return found, rest, lambda _: []

    found, pull, rest = torch.func.vjp(flat.call_for_functorch, *values, has_aux=True)  # type: ignore[misc]
    if not flat.num_inexact:
        return (), rest, lambda _: [torch.zeros_like(value) for value in values]

    def pull_back(cotangents: Sequence[Tensor]) -> Sequence[Tensor]:
        return conjugate_leaves(pull(tuple(conjugate_leaves(cotangents))))

    return found, rest, pull_back


# --- jvp ------------------------------------------------------------------------------------------


def jvp(
    fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False
) -> Any:
    """The value of `fun` and its derivative in a direction.

        y = f(x)        t_y = J t_x       (J the Jacobian at x)

    Args:
        fun: a function of trees of tensors and Python values, or an `nn.Module`.
        primals: its arguments, a tuple or list.
        tangents: their tangents, in the same structure, shapes and dtypes; `None` for what has no
            derivatives.
        has_aux: whether `fun` returns a pair, of which only the first is differentiated.

    Returns:
        `(out, out_tangent)`, with `has_aux` `(out, out_tangent, aux)`; `None` stands in
        `out_tangent` for what has no derivatives.

    Raises:
        TypeError: if trees or dtypes of primals and tangents differ; `ValueError`, if shapes do.

    After `jax.jvp`.

    >>> import torch
    >>> jvp(torch.sin, (torch.tensor(0.0),), (torch.tensor(2.0),))
    (tensor(0.), tensor(2.))
    """
    check_callable(fun, "jvp")
    if torch.compiler.is_dynamo_compiling():
        return jvp_in_compiler(fun, primals, tangents, has_aux)
    for what in (primals, tangents):
        if not isinstance(what, tuple | list):
            raise DerivativeTypeError(
                "primal and tangent arguments to jvp must be tuples or lists; found "
                f"{type(primals).__name__} and {type(tangents).__name__}."
            )
    flat = Flattened(fun, tuple(primals), {}, tuple(range(len(primals))), has_aux)
    given = _check_tangents(flat, tuple(tangents))
    found, found_tangents, rest = push_forward(flat, given)
    out, aux = flat.unflatten_result(found, rest)
    out_tangent = flat.unflatten_tangents(found_tangents)
    return (out, out_tangent, aux) if has_aux else (out, out_tangent)


def push_forward(
    flat: Flattened, tangents: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """Run `flat` with tangents of its inputs: outputs, their tangents, other results."""
    values = flat.values
    if not values:
        found, rest = flat()
        return found, [torch.zeros_like(t) for t in found], rest

    with _torch.dual_level_as_functorch_level():
        found, moved, rest = torch.func.jvp(  # type: ignore[misc]
            flat.call_for_functorch, tuple(values), tuple(tangents), has_aux=True
        )
    count = flat.num_inexact
    # PyTorch's tangent of `x * 0.1` is of 64 bits where x is one number of 32
    pairs = zip(found[:count], moved[:count], strict=True)
    return found[:count], [tangent.to(value.dtype) for value, tangent in pairs], rest


def _check_tangents(flat: Flattened, tangents: tuple[Any, ...]) -> list[Tensor]:
    leaves, spec = _torch.tree_flatten(tangents)
    if spec != flat.spec:
        raise DerivativeTypeError(
            "primal and tangent arguments to jvp must have the same tree structure; primals have "
            f"tree structure {describe_tree(flat.args)} whereas tangents have tree structure "
            f"{describe_tree(tangents)}."
        )
    paths = [_path(p) for p, _ in _torch.tree_flatten_with_path(tangents)[0]]
    found = []
    for primal, tangent, path in zip(flat.leaves, leaves, paths, strict=True):
        if not is_inexact(primal):
            if tangent is not None:
                raise DerivativeTypeError(
                    "primal and tangent arguments to jvp do not match; dtypes must be equal, or in "
                    f"case of int/bool primal dtype the tangent must be None. At {path} the primal "
                    f"is {_describe_leaf(primal)} and the tangent {_describe_leaf(tangent)}."
                )
            continue
        found.append(_check_tangent(primal, tangent, path))
    return found


def _path(path: Any) -> str:
    return f"argument {path[0].idx}{_torch.keystr(path[1:])}"


def _check_tangent(primal: Tensor, tangent: Any, path: str) -> Tensor:
    aval = Aval.of(primal)
    tangent = as_scalar_tensor(tangent, aval)
    if isinstance(tangent, Tensor) and tuple(tangent.shape) != aval.shape:
        raise DerivativeShapeError(
            f"jvp called with different primal and tangent shapes; at {path} got primal shape "
            f"{aval.shape} and tangent shape {tuple(tangent.shape)}."
        )
    if not isinstance(tangent, Tensor) or not fits(tangent, aval):
        raise DerivativeTypeError(
            "primal and tangent arguments to jvp do not match; dtypes must be equal, or in case of "
            f"int/bool primal dtype the tangent must be None. At {path} got primal dtype "
            f"{primal.dtype} and so expected tangent dtype {primal.dtype}, but got "
            f"{_describe_leaf(tangent)} instead."
        )
    return tangent


def _describe_leaf(value: Any) -> str:
    return f"dtype {value.dtype}" if isinstance(value, Tensor) else repr(value)
