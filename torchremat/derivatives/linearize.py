"""`linearize` and `linear_transpose`: linear functions as graphs.

y, dy = jvp(f)(x, dx)       known       y, c = f(x), f'(x)
                            staged      dy = c dx                   linearize's function
                            transposed  ct_x = ct_y c               linear_transpose of that
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.api_util import StaticArguments
from torchremat.autodiff.jvp_graph import jvp_graph
from torchremat.autodiff.transpose_graph import transpose_graph
from torchremat.core.avals import Aval
from torchremat.core.trees import HOLE, Structure
from torchremat.derivatives.flat_functions import Flattened, as_scalar_tensor, check_callable, fits
from torchremat.derivatives.in_compiler import run_outside_compiler
from torchremat.derivatives.rule_arguments import describe_tree, flatten_up_to, name_of
from torchremat.errors import DerivativeShapeError, DerivativeTypeError, GraphError
from torchremat.remat.escapes.leave_as_found import leave_as_found
from torchremat.remat.op.make_graph import trace_graph
from torchremat.remat.op.partial_eval_graph import linearize_graph
from torchremat.typed_graph.dce import copy_graph, eliminate_dead, set_outputs
from torchremat.typed_graph.typed_graph import TypedGraph, eval_graph

aten = torch.ops.aten
_CHANGES_OF_FORM = {aten.expand.default, aten._to_copy.default}


def linearize(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The value of `fun`, and its derivative there as a linear function of tangents.

        y = f(x)        t_y = J t_x       (J the Jacobian at x)

    What depends on the primals alone is computed once, here: the linear function computes what is
    left, a graph, as often as it is called. `fun` is traced, so that it cannot branch on values.
    A value in a checkpoint is saved if the policy lets it be; else the linear function
    recomputes it. A budget, which is for a step, saves none.

    Args:
        fun: a function of trees of tensors and Python values, or an `nn.Module`.
        *primals: its arguments.
        has_aux: whether `fun` returns a pair, of which only the first is differentiated.

    Returns:
        `(out, linear)`, with `has_aux` `(out, linear, aux)`. `linear(*tangents)` takes trees like
        the primals (`None` for what has no derivatives) and gives one like `out`, with `None` for
        what has none. `linear.graph` is a `TypedGraph`, whose constants are what was computed.

    Raises:
        TypeError: if `fun` cannot be traced, and by `linear`, if the tangents are other trees;
            `ValueError`, by `linear`, if they have other shapes or dtypes.

    After `jax.linearize`.

    >>> import torch, torchremat as tr
    >>> out, linear = linearize(lambda x: torch.sin(x) * 3.0, torch.tensor([0.0, 1.0]))
    >>> linear(torch.ones(2))
    tensor([3.0000, 1.6209])
    >>> linearize(torch.sin, torch.ones(2))[1].graph
    { lambda a:f32[2]; b:f32[2]. let
        c:f32[2] = aten.mul.Tensor b a
      in (c,) }
    """
    check_callable(fun, "linearize")
    if torch.compiler.is_dynamo_compiling():
        return run_outside_compiler(linearize, fun, *primals, has_aux=has_aux)
    flat = Flattened(fun, primals, {}, tuple(range(len(primals))), has_aux)
    out, linear, aux = _linearize(flat)
    return (out, linear, aux) if has_aux else (out, linear)


def _linearize(flat: Flattened) -> tuple[Any, "Linearized", Any]:
    values = flat.values
    with leave_as_found(flat.fun, (flat.args, flat.kwargs)):
        g = trace_graph(flat, tuple(values), {}, StaticArguments(flat, (), ()))
    count = len(g.outputs)
    pushed = jvp_graph(g)
    outputs, staged = stage(pushed, values, len(values))
    found, rest = g.out_structure.unflatten(outputs[:count])
    out, aux = flat.unflatten_result(found, rest)
    return out, Linearized(flat, replace(staged, outputs=outputs[count:])), aux


_LATER = object()


@dataclass(frozen=True, eq=False)
class Staged:
    """A graph in which all that depends on known inputs alone has been computed."""

    graph: TypedGraph
    residuals: Sequence[Tensor]
    outputs: Sequence[Any]
    """The outputs of the whole graph; `_LATER` for those that `graph` computes."""

    def __call__(self, *inputs: Tensor) -> list[Any]:
        found = iter(eval_graph(self.graph, *self.residuals, *inputs))
        return [next(found) if value is _LATER else value for value in self.outputs]


def stage(
    g: TypedGraph, known_inputs: Sequence[Tensor], num_later: int
) -> tuple[list[Any], Staged]:
    """Run what depends on the first inputs alone, and return its outputs and the rest.

    y, dy = sin(x), cos(x) * dx         x known:    y and c = cos(x) are computed
                                        rest:       dy = c * dx
    """
    unknown = [False] * len(known_inputs) + [True] * num_later
    known, staged, are_unknown, residuals = linearize_graph(g, unknown)
    results = list(eval_graph(known, *known_inputs))
    saved = results[len(results) - len(residuals) :]
    left = iter(results)
    outputs = [_LATER if later else next(left) for later in are_unknown]
    return outputs, Staged(_tidy(staged), saved, outputs)


def _tidy(g: TypedGraph) -> TypedGraph:
    """Remove expansions and copies that change nothing: forward mode leaves them of `0 + t`.

    t' = expand(t);  t" = _to_copy(t')      t" is t
    """
    module, copies = copy_graph(g)
    outputs = [copies.get(value, value) for value in g.outputs]
    for node in module.graph.nodes:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or node.target not in _CHANGES_OF_FORM:
            continue
        if _is_same(node.meta["val"], source.meta["val"]):
            node.replace_all_uses_with(source)
            outputs = [source if value is node else value for value in outputs]
    set_outputs(module.graph, outputs)
    eliminate_dead(module)
    module.recompile()
    return replace(g, graph_module=module)


def _is_same(value: Tensor, source: Tensor) -> bool:
    return Aval.of(value) == Aval.of(source) and value.layout == source.layout


@dataclass(eq=False)
class Linearized:
    """The function of `linearize`: from tangents of the arguments to those of the result."""

    flat: Flattened
    staged: Staged

    def __call__(self, *tangents: Any) -> Any:
        """The tangents of the result."""
        return self._run(*self._check_tangents(tangents))

    def _run(self, *tangents: Tensor) -> Any:
        found = self.staged(*tangents)
        return self.flat.unflatten_tangents(found[: self.flat.num_inexact])

    @cached_property
    def graph(self) -> TypedGraph:
        """The function as a graph."""
        examples = self.flat.unflatten_inputs(self.flat.values)
        return trace_graph(self._of_trees, examples, {}, StaticArguments(self._of_trees, (), ()))

    def _of_trees(self, *tangents: Any) -> Any:
        leaves = _torch.tree_flatten(tangents)[0]
        return self._run(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))

    def _check_tangents(self, tangents: tuple[Any, ...]) -> list[Tensor]:
        leaves, spec = _torch.tree_flatten(tangents)
        if spec != self.flat.spec:
            raise DerivativeTypeError(
                "linearized function called with tangents of another structure than the primal "
                f"values: got {describe_tree(tangents)}, expected {describe_tree(self.flat.args)}"
            )
        wrt = self.flat.wrt
        return [
            _check_tangent(leaves[i], Aval.of(value))
            for i, value in zip(wrt, self.flat.values, strict=True)
        ]


def _check_tangent(tangent: Any, aval: Aval) -> Tensor:
    tangent = as_scalar_tensor(tangent, aval)
    if not isinstance(tangent, Tensor) or not fits(tangent, aval):
        given = Aval.of(tangent) if isinstance(tangent, Tensor) else repr(tangent)
        raise DerivativeShapeError(
            "linearized function called on tangent values inconsistent with the original primal "
            f"values: got tangent {given} for primal {aval}"
        )
    return tangent


def pull_back_graph(
    flat: Flattened, value_and_pull_back: Callable[[Flattened], tuple[Any, Any, Any]]
) -> TypedGraph:
    """Make the graph from cotangents of the result to those of the arguments, in their trees.

    Values of the backward pass that depend on the arguments alone are computed now.
    """

    def pull(values: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Any:
        _, _, back = value_and_pull_back(flat.replace_values(values))
        return tuple(back(cotangents))

    avals = [a for a, yes in zip(flat.out_avals, flat.is_inexact, strict=True) if yes]
    examples = tuple(map(_make_example, avals))
    values = tuple(flat.values)
    g = trace_graph(pull, (values, examples), {}, StaticArguments(pull, (), ()))
    _, staged = stage(g, values, len(examples))

    def of_trees(cotangents: Any) -> Any:
        leaves = _torch.tree_flatten(cotangents)[0]
        return flat.unflatten_inputs(staged(*(leaf for leaf in leaves if isinstance(leaf, Tensor))))

    tree = flat.unflatten_tangents(examples)
    return trace_graph(of_trees, (tree,), {}, StaticArguments(of_trees, (), ()))


# --- linear_transpose -----------------------------------------------------------------------------


def linear_transpose(fun: Callable[..., Any], *primals: Any) -> "Transposed":
    """The transpose of a linear function.

        y = A x        ct_x = A' ct_y

    It is the transpose, not the adjoint: nothing is conjugated. `fun` runs only to be traced.

    Args:
        fun: a linear function of trees of tensors.
        *primals: examples of its arguments: trees of tensors, of which only shape, dtype and
            device count, `Aval`s, or tensors of the device `meta` (for the default device).

    Returns:
        A function that takes a tree like the result of `fun` and gives a tuple, one entry an
        argument. It has the attribute `graph`, a `TypedGraph`.

    Raises:
        TypeError: if an argument has no derivatives.
        GraphError: (a `ValueError`) if `fun` is not linear, with the operator and the line.

    After `jax.linear_transpose`.

    >>> import torch
    >>> transposed = linear_transpose(lambda x: 2.0 * x.sum(), Aval((2,), torch.float32))
    >>> transposed(torch.tensor(3.0))
    (tensor([6., 6.]),)
    """
    check_callable(fun, "linear_transpose")
    if torch.compiler.is_dynamo_compiling():
        return run_outside_compiler(linear_transpose, fun, *primals)  # type: ignore[no-any-return]
    examples = _torch.tree_map(_make_example, primals)
    for leaf in _torch.tree_flatten(examples)[0]:
        if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            raise DerivativeTypeError(
                f"linear_transpose only supports float and complex inputs, but got {Aval.of(leaf)}"
            )
    g = trace_graph(fun, examples, {}, StaticArguments(fun, (), ()))
    try:
        graph = replace(transpose_graph(g), out_structure=Structure.of(examples))
    except GraphError as error:
        raise GraphError(f"linear_transpose of {name_of(fun)}: {error}") from error
    return Transposed(g, graph)


def _make_example(value: Any) -> Tensor:
    if isinstance(value, float | complex):
        return torch.tensor(value)
    if isinstance(value, Aval):
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if isinstance(value, Tensor):
        if value.device.type == "meta":
            return torch.empty(value.shape, dtype=value.dtype, device=torch.get_default_device())
        return value.detach()
    raise DerivativeTypeError(
        "linear_transpose takes trees of tensors or Avals as examples of arguments, but it was "
        f"given {value!r} ({type(value).__name__})"
    )


@dataclass(frozen=True, eq=False)
class Transposed:
    """The function of `linear_transpose`: from cotangents of the result to the arguments'."""

    forward: TypedGraph
    graph: TypedGraph

    def __call__(self, cotangents: Any) -> tuple[Any, ...]:
        """The cotangents of the arguments, a tuple."""
        tree = self.forward.out_structure.tree
        try:
            leaves = flatten_up_to(cotangents, tree)
        except ValueError:
            raise DerivativeTypeError(
                f"cotangent tree does not match function output, expected {tree} but got "
                f"{describe_tree(cotangents)}"
            ) from None
        kinds = _torch.tree_flatten(tree)[0]
        given = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind is HOLE]
        checked = [
            _check_cotangent(value, aval)
            for value, aval in zip(given, self.forward.out_avals, strict=True)
        ]
        ct = self.graph.in_structure.tree[0][0]
        left = iter(checked)
        found = [value for value in left if value is not None]
        return eval_graph(self.graph, Structure(ct).unflatten(found))  # type: ignore[no-any-return]


def _check_cotangent(value: Any, aval: Aval) -> Tensor | None:
    if not (aval.dtype.is_floating_point or aval.dtype.is_complex):
        return None
    value = as_scalar_tensor(value, aval)
    if not isinstance(value, Tensor) or not fits(value, aval):
        given = Aval.of(value) if isinstance(value, Tensor) else repr(value)
        raise DerivativeShapeError(
            f"cotangent type does not match function output, expected {aval} and got {given}"
        )
    return value
