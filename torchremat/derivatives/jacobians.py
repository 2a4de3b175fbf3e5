"""`jacfwd`, `jacrev` and `hessian`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.derivatives.flat_functions import Flattened, check_callable, resolve_argnums
from torchremat.derivatives.gradients import build_pull_back, push_forward
from torchremat.derivatives.in_compiler import jacobian_in_compiler
from torchremat.derivatives.rule_arguments import name_of
from torchremat.derivatives.rules import is_inexact, place_axis
from torchremat.errors import DerivativeTypeError
from torchremat.tracing.axes.mapped_functions import run_mapped


def jacfwd(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Make a function that gives the Jacobian of `fun`, a column at a time in forward mode.

    Args:
        fun: a function of trees of tensors and Python values, or an `nn.Module`.
        argnums: the position, or positions, of the arguments to differentiate, which must hold
            floating-point tensors alone.
        has_aux: whether `fun` returns a pair, of which only the first is differentiated.

    Returns:
        A function of the arguments of `fun`. It gives a tree like the result, with a tree like
        the argument in place of each tensor: a tuple of such if `argnums` is a sequence. Their
        tensors have shape `(*output.shape, *input.shape)`. With `has_aux`, a pair of it and the
        auxiliary data.

    Raises:
        TypeError: for an argument or result without derivatives, or `argnums` out of range.

    Random numbers that `fun` draws are the same for all columns.

    After `jax.jacfwd`.

    >>> import torch
    >>> jacfwd(lambda x: x**2)(torch.tensor([1.0, 2.0]))
    tensor([[2., 0.],
            [0., 4.]])
    """
    return _jacobian(fun, argnums, has_aux, "jacfwd", _compute_columns)


def jacrev(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Make a function that gives the Jacobian of `fun`, a row at a time in reverse mode.

    As `jacfwd`.

    After `jax.jacrev`.

    >>> import torch
    >>> jacrev(lambda x, y: {"sum": x.sum() * y}, argnums=(0, 1))(torch.ones(2), torch.tensor(3.0))
    {'sum': (tensor([3., 3.]), tensor(2.))}
    """
    return _jacobian(fun, argnums, has_aux, "jacrev", _compute_rows)


def hessian(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Make a function that gives the second derivatives of `fun`, forward mode over reverse.

    As `jacfwd` of `jacrev`. (A function with `custom_vjp` rules has them too: forward mode meets
    only what the rules compute.)

    After `jax.hessian`.

    >>> import torch
    >>> hessian(lambda x: (x**3).sum())(torch.tensor([1.0, 2.0]))
    tensor([[ 6.,  0.],
            [ 0., 12.]])
    """
    return jacfwd(jacrev(fun, argnums, has_aux), argnums, has_aux)


def _jacobian(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    what: str,
    blocks_of: Callable[[Flattened], tuple[list[list[Tensor]], Sequence[Tensor]]],
) -> Callable[..., Any]:
    check_callable(fun, what)

    def jacobian(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return jacobian_in_compiler(what, fun, argnums, has_aux, args, kwargs)
        chosen = resolve_argnums(argnums, args)
        flat = Flattened(fun, args, kwargs, chosen, has_aux, _check_result(what))
        for leaf in flat.leaves:
            if not is_inexact(leaf):
                given = leaf.dtype if isinstance(leaf, Tensor) else repr(leaf)
                raise DerivativeTypeError(
                    f"{what} requires real- or complex-valued inputs (input dtype that is "
                    f"floating-point or complex), but got {given}."
                )
        blocks, rest = blocks_of(flat)
        rows = [flat.unflatten_inputs(row) for row in blocks]
        if isinstance(argnums, int):
            rows = [row[0] for row in rows]
        result, aux = flat.unflatten_result(rows, rest)
        return (result, aux) if has_aux else result

    if torch.compiler.is_dynamo_compiling():  # Dynamo's functions have no names to set
        return jacobian
    jacobian.__name__ = jacobian.__qualname__ = f"{what}({name_of(fun)})"
    return jacobian


def _check_result(what: str) -> Callable[[Any], None]:
    def check(result: Any) -> None:
        for leaf in _torch.tree_flatten(result)[0]:
            if not is_inexact(leaf):
                given = leaf.dtype if isinstance(leaf, Tensor) else repr(leaf)
                raise DerivativeTypeError(
                    f"{what} requires outputs with a floating-point or complex dtype, but got "
                    f"{given}. Return it as auxiliary data: has_aux=True."
                )

    return check


def _compute_rows(flat: Flattened) -> tuple[list[list[Tensor]], Sequence[Tensor]]:
    """Compute, for each output, the derivative with respect to each input.

    The rows of the Jacobian are the cotangents that unit vectors are pulled back to.
    """
    outputs, rest, pull = build_pull_back(flat)
    if not outputs:  # PyTorch's vmap takes no function without arguments
        return [], rest
    sizes = [t.numel() for t in outputs]
    # a checkpoint draws again what its forward pass drew, which is the same for all rows
    pull_rows = torch.func.vmap(lambda *cts: tuple(pull(cts)), randomness="same")
    found = pull_rows(*_generate_basis(outputs))
    blocks = []
    for i, output in enumerate(outputs):
        rows = [t.split(sizes)[i] for t in found]
        blocks.append(
            [r.reshape((*output.shape, *t.shape)) for r, t in zip(rows, flat.values, strict=True)]
        )
    return blocks, rest


def _compute_columns(flat: Flattened) -> tuple[list[list[Tensor]], Sequence[Tensor]]:
    """Compute the same blocks: the tangents that unit vectors are pushed forward to."""

    def push(*tangents: Tensor) -> tuple[Tensor, ...]:
        found, moved, others = push_forward(flat, tangents)
        return (*moved, *found, *others)

    values = flat.values
    sizes = [t.numel() for t in values]
    total = sum(sizes)
    # all columns are derivatives of one function, so they have the same draws
    results, dims = run_mapped(push, (0,) * len(values), total, "same")(*_generate_basis(values))
    count = flat.num_inexact
    blocks = []
    for moved, dim in zip(results[:count], dims, strict=False):
        # a tangent without the axis is zero, of an output that depends on no input, say
        columns = place_axis(moved, dim, 0, total).movedim(0, -1)
        shape = columns.shape[:-1]
        parts = zip(columns.split(sizes, -1), values, strict=True)
        blocks.append([part.reshape((*shape, *t.shape)) for part, t in parts])
    return blocks, [
        value if dim is None else value.select(dim, 0)
        for value, dim in zip(results[2 * count :], dims[2 * count :], strict=True)
    ]


def _generate_basis(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield, for each tensor, its part of all unit vectors of the space of all tensors.

    >>> [unit.tolist() for unit in _generate_basis([torch.ones(1), torch.ones(2)])]
    [[[1.0], [0.0], [0.0]], [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]
    """
    total = sum(t.numel() for t in tensors)
    start = 0
    for tensor in tensors:
        count = tensor.numel()
        unit = tensor.new_zeros(total, count)  # mapped as `tensor` is: rules write into tangents
        unit[start : start + count] = torch.eye(count, dtype=tensor.dtype, device=tensor.device)
        yield unit.view((total, *tensor.shape))
        start += count
