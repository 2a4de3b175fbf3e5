"""`TypedGraph`: a function as a graph of typed equations, and how to run it.

What JAX calls a closed jaxpr: a graph of ATen operators without Python in it, the tensors that it
closes over, and the structure of what it takes and gives.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.api_util import WrapHashably
from torchremat.core.accelerators import list_kinds
from torchremat.core.avals import Aval
from torchremat.core.formatting import ShownInNotebook
from torchremat.core.trees import Structure
from torchremat.errors import ArgumentTypeError, ArgumentValueError
from torchremat.graph.nodes import results_of
from torchremat.tracing.tracing import lift_all
from torchremat.typed_graph.equations import Eqn, Literal, Names, aval_of, equations
from torchremat.typed_graph.printing import format_graph


@dataclass(frozen=True, eq=False)
class TypedGraph(ShownInNotebook):
    """A graph of typed equations, made by `make_graph` or by a transformation of one that was.

    It prints like a jaxpr: constants, inputs and equations with their types, outputs.

    >>> import torch, torchremat as tr
    >>> w = torch.ones(3)
    >>> g = tr.make_graph(lambda x: (x * w).sum(0))(torch.ones(2, 3))
    >>> g
    { lambda a:f32[3]; b:f32[2,3]. let
        c:f32[2,3] = aten.mul.Tensor b a
        d:f32[3] = aten.sum.dim_IntList[dim=[0]] c
      in (d,) }
    >>> g.in_avals, g.out_avals, [eqn.op for eqn in g.eqns]
    ([f32[2,3]], [f32[3]], [<OpOverload(op='aten.mul', overload='Tensor')>,
                            <OpOverload(op='aten.sum', overload='dim_IntList')>])
    """

    graph_module: fx.GraphModule
    """The operators. It is called with `consts`, then the inputs, and gives a tuple: the outputs,
    then the new values of what `writes` names. Its placeholders stand in the same order."""
    consts: list[Tensor]
    """The tensors that the function closed over: parameters, buffers and others. They are the very
    ones, so that they get gradients and new values are seen. Those that it made
    (`torch.tensor([1., 2.])`) come last."""
    in_structure: Structure
    """The structure of `(args, kwargs)`, of inputs and Python values."""
    out_structure: Structure
    """The structure of the result, of outputs and Python values."""
    writes: tuple[int, ...] = ()
    """Positions, among constants and inputs, of the tensors that the function writes to."""

    @cached_property
    def const_nodes(self) -> tuple[fx.Node, ...]:
        """The placeholders of the constants."""
        return self._placeholders[: len(self.consts)]

    @cached_property
    def input_nodes(self) -> tuple[fx.Node, ...]:
        """The placeholders of the inputs."""
        return self._placeholders[len(self.consts) :]

    @cached_property
    def outputs(self) -> tuple[Any, ...]:
        """The outputs: nodes, and numbers for those that are literals."""
        return self._results[: len(self._results) - len(self.writes)]

    @cached_property
    def written(self) -> tuple[fx.Node, ...]:
        """The new values of what `writes` names."""
        return self._results[len(self.outputs) :]

    @cached_property
    def in_avals(self) -> list[Aval]:
        """The avals of the inputs, in the order of `in_tree`."""
        return [aval_of(node) for node in self.input_nodes]

    @cached_property
    def out_avals(self) -> list[Aval]:
        """The avals of the outputs, in the order of `out_tree`; those of literals are weak."""
        return [
            aval_of(value) if isinstance(value, fx.Node) else Literal(value).aval
            for value in self.outputs
        ]

    @property
    def in_tree(self) -> _torch.TreeSpec:
        """The structure of `(args, kwargs)`; a Python value among them is an empty tuple."""
        return self.in_structure.spec

    @property
    def out_tree(self) -> _torch.TreeSpec:
        """The structure of the result; a Python value that is not a number is an empty tuple."""
        return self.out_structure.spec

    @cached_property
    def eqns(self) -> list[Eqn]:
        """The equations in program order. An operator with several outputs is one."""
        names = Names()
        for node in self._placeholders:
            names.of(node)
        return list(equations(self.graph_module, names))

    def text(self, *, sources: bool = False) -> str:
        """The graph as text; with `sources`, each equation tells the user's line and module."""
        return format_graph(self.graph_module, num_consts=len(self.consts), sources=sources)

    def __repr__(self) -> str:
        return self.text()

    @cached_property
    def _placeholders(self) -> tuple[fx.Node, ...]:
        return tuple(self.graph_module.graph.find_nodes(op="placeholder"))

    @cached_property
    def _results(self) -> tuple[Any, ...]:
        return tuple(results_of(self.graph_module))


def eval_graph(g: TypedGraph, /, *args: Any, **kwargs: Any) -> Any:
    """Run a graph on arguments like those that it was traced for.

    It computes what the function computes, with its derivatives: autograd records what runs, and
    gives gradients to arguments and constants. `torch.func` transforms it, and checkpoints in it
    stay checkpoints. `no_grad`, `detach` and `autograd.Function`s mean what they mean in the
    function. Random operators draw anew. It may run on fake tensors and inside other traces.
    Autocast is off in it, since the traced casts are operators of the graph.

    Args:
        g: the graph.
        *args: arguments of the structure of those that it was traced for: the same trees, tensors
            of the same shapes and dtypes, and the same Python values, static ones included.
        **kwargs: keyword arguments, likewise.

    Returns:
        The result, of the structure of the function's.

    Raises:
        ValueError: if the arguments have another structure, or a Python value is another.
        TypeError: if a tensor has another shape, dtype or device, or is none.

    After `jax.core.eval_jaxpr`.

    >>> import torch, torchremat as tr
    >>> g = tr.make_graph(lambda d: {"y": d["x"] * 2, "n": 3})({"x": torch.ones(2)})
    >>> eval_graph(g, {"x": torch.arange(2.0)})
    {'y': tensor([0., 2.]), 'n': 3}
    """
    inputs = flatten_arguments(g, args, kwargs)
    tensors = [*_consts_beside(inputs, g.consts), *inputs]
    operands = list(tensors)
    if g.writes and torch.is_grad_enabled():
        for i in g.writes:  # autograd may keep what will be written to
            operands[i] = tensors[i].clone()
    with ExitStack() as stack:
        for device in list_kinds():
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        # not `graph_module(...)`: the user's modules alone have hooks and a name that are seen
        results = g.graph_module.forward(*operands)
    with torch.no_grad():
        for i, value in zip(g.writes, results[len(g.outputs) :], strict=True):
            tensors[i].copy_(value)
    return g.out_structure.unflatten(results[: len(g.outputs)])


def flatten_arguments(g: TypedGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    wanted_args, wanted_kwargs = g.in_structure.tree
    args = tuple(
        WrapHashably(a) if i < len(wanted_args) and _is_static(wanted_args[i]) else a
        for i, a in enumerate(args)
    )
    named = {
        name: WrapHashably(value) if _is_static(wanted_kwargs.get(name)) else value
        for name, value in sorted(kwargs.items())
    }
    try:
        inputs = g.in_structure.flatten((args, named))
    except ValueError as error:
        raise ArgumentValueError(
            f"eval_graph takes arguments like those that the graph was traced for: {error}. "
            "Python values are part of a graph: trace it anew for others with make_graph, or make "
            "tensors of them."
        ) from None
    for node, aval, value in zip(g.input_nodes, g.in_avals, inputs, strict=True):
        given = Aval.of(value) if isinstance(value, Tensor) else value
        if given != aval:
            raise ArgumentTypeError(
                f"eval_graph takes {aval} on {aval.device} for the input {node.name}, but it is "
                f"given {given!r}"
                + (f" on {given.device}" if isinstance(given, Aval) else "")
                + ". Trace the function for such arguments with make_graph."
            )
    return inputs


def _is_static(value: Any) -> bool:
    return isinstance(value, WrapHashably)


def _consts_beside(inputs: list[Tensor], consts: list[Tensor]) -> list[Tensor]:
    if not consts:
        return consts
    if _torch.innermost_proxy_mode() is not None:
        return list(lift_all(consts))
    modes = [t.fake_mode for t in map(_torch.innermost_tensor, inputs) if _is_fake(t)]  # type: ignore[attr-defined]
    if not modes:
        return consts
    return [c if _is_fake(_torch.innermost_tensor(c)) else modes[0].from_tensor(c) for c in consts]


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, _torch.FakeTensor)
