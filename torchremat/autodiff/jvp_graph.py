"""Derivatives from graph to graph: `jvp_graph` and `transpose_graph`.

There is no rule for any operator here. A graph is run, operator by operator, under `torch.func.jvp`
or PyTorch's autograd inside a trace, and what runs is the new graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.bodies import Body, JvpBody, NotedInterpreter
from torchremat.autodiff.joint import Joint, TraceOptions, trace_joint
from torchremat.core.trees import HOLE, Structure
from torchremat.errors import ArgumentValueError, GraphError
from torchremat.graph.nodes import is_inexact
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.module_paths import ModulePaths
from torchremat.tracing.tracing import Tracing
from torchremat.typed_graph.building import Input, build_graph
from torchremat.typed_graph.dce import check_mask
from torchremat.typed_graph.equations import aval_of
from torchremat.typed_graph.typed_graph import TypedGraph


def jvp_graph(g: TypedGraph, nonzero_tangents: Sequence[bool] | None = None) -> TypedGraph:
    """The graph of a function together with its directional derivative.

        y = f(x)        y, dy = f(x), f'(x) dx

    Args:
        g: the graph of the function. It must write to nothing.
        nonzero_tangents: for each input of `g`, in the order of `in_avals`, whether it has a
            tangent. By default those have one that are floating-point or complex.

    Returns:
        A graph that takes the arguments of `g`, then tangents in the same structure, with `None`
        where there is none. It returns a pair of the result and its tangents, which are `None` for
        outputs that are integers, bools or Python values. If `g` takes keyword arguments, they are
        given as a dict after the positional ones, and so are their tangents.

    Raises:
        ValueError: if `nonzero_tangents` has not one entry for each input, or gives a tangent to
            an input that can have none.
        GraphError: (a `ValueError`) if `g` writes to its inputs or constants.
        TypeError: if an entry is not a bool.

    After `jax.interpreters.ad.jvp_jaxpr`.

    >>> import torch, torchremat as tr
    >>> g = tr.make_graph(torch.sin)(torch.ones(3))
    >>> jvp_graph(g)
    { lambda ; a:f32[3] b:f32[3]. let
        c:f32[3] = aten.sin a
        d:f32[3] = aten.cos a
        e:f32[3] = aten.mul.Tensor b d
      in (c, e) }
    >>> tr.eval_graph(jvp_graph(g), torch.zeros(3), torch.ones(3))
    (tensor([0., 0., 0.]), tensor([1., 1., 1.]))
    """
    check_pure(g, "jvp_graph")
    mask = nonzero_tangents
    if mask is None:
        mask = [is_inexact(node) for node in g.input_nodes]
    check_mask(mask, len(g.input_nodes), "nonzero_tangents", "input")
    check_inexact(g, mask, "nonzero_tangents")
    num_consts = len(g.consts)
    wrt = tuple(i + num_consts for i, nonzero in enumerate(mask) if nonzero)
    primals = [*g.const_nodes, *g.input_nodes]
    tensors = [value for value in g.outputs if isinstance(value, fx.Node)]
    inexact = tuple(i for i, value in enumerate(tensors) if is_inexact(value))
    body = JvpBody(TensorsOf(g), len(primals), wrt, inexact, keep_primals=True)
    specs = [spec_of(node) for node in (*primals, *(primals[i] for i in wrt))]
    names = [node.name for node in primals] + [f"{primals[i].name}_tangent" for i in wrt]
    traced = trace_body(g, body, specs, names)
    left = iter(traced.outputs)
    outputs = [next(left) if isinstance(v, fx.Node) else v for v in g.outputs]
    args, kwargs = g.in_structure.tree
    structure = (*args, kwargs) if kwargs else args
    in_tree = (*structure, *with_holes(structure, mask))
    has_tangent = [isinstance(v, fx.Node) and is_inexact(v) for v in g.outputs]
    out_tree = g.out_structure.tree
    return build_graph(
        traced.module,
        traced.inputs,
        [*outputs, *left],
        (Structure((in_tree, {})), Structure((out_tree, with_holes(out_tree, has_tangent)))),
    )


# --- what transformations share ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TensorsOf(Body):
    """The function of constants and inputs that a graph is, without those outputs that are numbers.

    `on_value` is called with each operator and its value.
    """

    graph: TypedGraph
    on_value: Callable[[fx.Node, Any], None] | None = None

    def run(self, tracing: Tracing, inputs: Sequence[Tensor]) -> list[Any]:
        results = _Runner(self.graph.graph_module, tracing, self.on_value).run(*inputs)
        return [value for value in results if isinstance(value, Tensor)]


class _Runner(NotedInterpreter):
    def __init__(
        self,
        module: fx.GraphModule,
        tracing: Tracing,
        on_value: Callable[[fx.Node, Any], None] | None,
    ) -> None:
        super().__init__(module, tracing)
        self.on_value = on_value

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if self.on_value is not None and n.op == "call_function":
            self.on_value(n, value)
        return value


@dataclass(frozen=True, eq=False)
class TracedBody:
    """A traced function: its graph, inputs with the captured tensors, outputs and joint graph."""

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Any, ...]
    joint: Joint


def trace_body(
    g: TypedGraph, body: Body, specs: Sequence[InputSpec], names: Sequence[str]
) -> TracedBody:
    """Trace `body`, whose first inputs are the constants of `g`. There are no gradients in it."""
    options = TraceOptions(with_gradients=False, whole_calls=True)
    joint, tracing = trace_joint(body, specs, names, ModulePaths({}), options)
    labels = [*names, *("const" for _ in tracing.captured)]
    no_tensors = [None] * (len(specs) - len(g.consts))
    tensors = [*g.consts, *no_tensors, *tracing.captured]
    inputs = tuple(map(Input, joint.inputs, labels, tensors))
    return TracedBody(joint.module, inputs, joint.outputs, joint)


def spec_of(node: fx.Node) -> InputSpec:
    """The shape, dtype and device of a node as those of an input that requires no gradient."""
    return replace(InputSpec.of(node.meta["val"]), requires_grad=False, is_leaf=True)


def check_pure(g: TypedGraph, what: str) -> None:
    """Raise `GraphError` if `g` writes to an input or constant. `what` names the caller."""
    if g.writes:
        nodes = [(*g.const_nodes, *g.input_nodes)[i].name for i in g.writes]
        raise GraphError(
            f"{what} takes a graph that writes to nothing, but this one writes to "
            f"{', '.join(nodes)}. Return the new values instead, or switch the module that keeps "
            "running statistics to eval()."
        )


def check_inexact(g: TypedGraph, mask: Sequence[bool], what: str) -> None:
    """Raise `ArgumentValueError` if `mask`, the argument `what`, chooses a discrete input."""
    for i, (node, chosen) in enumerate(zip(g.input_nodes, mask, strict=True)):
        if chosen and not is_inexact(node):
            raise ArgumentValueError(
                f"{what} names the input {node.name} (number {i}), which is {aval_of(node)}: only "
                "floating-point and complex values have derivatives. Say False for it"
            )


def with_holes(tree: Any, mask: Sequence[bool]) -> Any:
    """`tree` with `None` at each leaf for which `mask` has False."""
    left = iter(mask)
    return _torch.tree_map(lambda leaf: HOLE if leaf is HOLE and next(left) else None, tree)
