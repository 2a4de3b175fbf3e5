"""The transpose of a linear graph, through PyTorch's reverse mode.

    y = A x  (and z, which is not linear)       ct_x = A' ct_y

The derivative of a linear function does not depend on where it is taken: a graph whose derivative
reads the values of its linear inputs is not linear in them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.bodies import Body, gradients
from torchremat.autodiff.jvp_graph import (
    TensorsOf,
    TracedBody,
    check_inexact,
    check_pure,
    spec_of,
    trace_body,
    with_holes,
)
from torchremat.core.trees import HOLE, Structure, tuple_of
from torchremat.errors import GraphError
from torchremat.graph.nodes import is_inexact, results_of
from torchremat.graph.notes import notes_of
from torchremat.tracing.tracing import Tracing
from torchremat.typed_graph.building import build_graph
from torchremat.typed_graph.dce import check_mask, eliminate_dead
from torchremat.typed_graph.dependence import find_dependents, read_by
from torchremat.typed_graph.printing import format_graph
from torchremat.typed_graph.typed_graph import TypedGraph

aten = torch.ops.aten


def transpose_graph(g: TypedGraph, linear: Sequence[bool] | None = None) -> TypedGraph:
    """The transpose of a graph that is linear in some of its inputs, the others fixed.

    It is the transpose, not the adjoint: for complex values nothing is conjugated. A constant part
    (`x + 1`) is taken for granted, as in JAX: it has no transpose.

    Args:
        g: the graph. It must write to nothing.
        linear: for each input of `g`, in the order of `in_avals`, whether the graph is linear in
            it, jointly with the others so marked. By default it is in all.

    Returns:
        A graph that takes the other inputs, one an argument, then cotangents in the structure of
        the result of `g`. They are `None` for integers, bools and Python values. It returns a
        tuple of cotangents, one for each linear input, zeros for one without part in the result.

    Raises:
        ValueError: if `linear` has not one entry for each input, or names one that can have no
            derivative.
        GraphError: (a `ValueError`) if the graph is not linear in these inputs, or writes.
        TypeError: if an entry is not a bool.

    After `jax.linear_transpose`.

    >>> import torch, torchremat as tr
    >>> g = tr.make_graph(torch.mv)(torch.ones(2, 3), torch.ones(3))
    >>> transpose_graph(g, [False, True])
    { lambda ; a:f32[2,3] b:f32[2]. let
        c:f32[3,2] = aten.t a
        d:f32[3] = aten.mv c b
      in (d,) }
    >>> transpose_graph(g)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    torchremat.errors.GraphError: transpose_graph takes a graph that is linear in ...
    """
    check_pure(g, "transpose_graph")
    mask = [True] * len(g.input_nodes) if linear is None else linear
    check_mask(mask, len(g.input_nodes), "linear", "input")
    check_inexact(g, mask, "linear")
    transposition = _Transposition(
        g, [n for n, chosen in zip(g.input_nodes, mask, strict=True) if chosen]
    )
    traced = transposition.trace()
    fixed = [chosen for chosen in mask if not chosen]
    cotangents = with_holes(
        g.out_structure.tree, [isinstance(v, fx.Node) and is_inexact(v) for v in g.outputs]
    )
    structures = (
        Structure((((HOLE,) * len(fixed)) + (cotangents,), {})),
        tuple_of(len(traced.outputs)),
    )
    return build_graph(traced.module, traced.inputs, traced.outputs, structures)


class _Transposition:
    def __init__(self, g: TypedGraph, linear: Sequence[fx.Node]) -> None:
        self.g = g
        self.linear = linear
        self.inexact = [v for v in g.outputs if isinstance(v, fx.Node) and is_inexact(v)]

    def trace(self) -> TracedBody:
        g = self.g
        primals = [*g.const_nodes, *g.input_nodes]
        specs = [replace(spec_of(node), requires_grad=node in self.linear) for node in primals] + [
            spec_of(node) for node in self.inexact
        ]
        names = [node.name for node in primals] + [f"{n.name}_cotangent" for n in self.inexact]
        wrt = [i for i, node in enumerate(primals) if node in self.linear]
        body = _TransposeBody(g, len(primals), tuple(wrt))
        traced = trace_body(g, body, specs, names)
        inputs = [i.node for i in traced.inputs]
        self._check(body, traced, [inputs[i] for i in wrt], inputs[len(primals) :])
        outputs = tuple(results_of(traced.module)[: len(traced.outputs)])
        eliminate_dead(traced.module)
        for i in wrt:
            _take_for_zeros(inputs[i])
        left = tuple(i for n, i in enumerate(traced.inputs) if n not in wrt)
        return replace(traced, inputs=left, outputs=outputs)

    def _check(
        self,
        body: "_TransposeBody",
        traced: TracedBody,
        linear: Sequence[fx.Node],
        cotangents: Sequence[fx.Node],
    ) -> None:
        self._check_differentiability(body)
        graph = traced.module.graph
        varying = find_dependents(linear, graph)
        backward = [n for n in graph.nodes if notes_of(n).phase == "backward"]
        wanted = {value for value in traced.outputs if isinstance(value, fx.Node)}
        for node in backward:
            for used in read_by(node):
                if used in varying:
                    self._fail(node, f"its derivative, {node.target}, reads a value of it")
        flowing = find_dependents(cotangents, graph)
        for group in body.groups(graph):
            inside = set(group.nodes)
            for node in group.nodes:
                readers = (user for user in node.users if node in read_by(user))
                leaves = node in wanted or any(user not in inside for user in readers)
                if leaves and is_inexact(node) and node not in flowing:
                    self._fail(group.of, "its derivative is zero")

    def _check_differentiability(self, body: "_TransposeBody") -> None:
        varying = find_dependents(self.linear, self.g.graph_module.graph)
        for node, requires_grad in body.recorded:
            if node in varying and not requires_grad and is_inexact(node):
                self._fail(node, "nothing is differentiated through it")
        for value in self.g.outputs:
            if isinstance(value, fx.Node) and value in varying and not is_inexact(value):
                self._fail(value, f"it is an output of dtype {value.meta['val'].dtype}")

    def _fail(self, node: fx.Node, reason: str) -> NoReturn:
        source = notes_of(node).source
        varying = find_dependents(self.linear, self.g.graph_module.graph)
        here = [n for n in varying if n.op == "call_function" and notes_of(n).source == source]
        mark = node if node in varying else (here[0] if here else None)
        text = format_graph(self.g.graph_module, num_consts=len(self.g.consts), mark=mark)
        names = ", ".join(n.name for n in self.linear)
        raise GraphError(
            f"transpose_graph takes a graph that is linear in {names}, but at {source} it is not: "
            f"{reason}. Say of each of its {len(self.g.input_nodes)} inputs whether it is linear "
            f"in it: transpose_graph(g, [True, False, ...])\n"
            f"{text}"
        )


@dataclass(frozen=True, eq=False)
class _Group:
    of: fx.Node
    nodes: list[fx.Node]


@dataclass(eq=False)
class _TransposeBody(Body):
    g: TypedGraph
    num_primals: int
    wrt: tuple[int, ...]
    recorded: list[tuple[fx.Node, bool]] = field(default_factory=list)
    _marks: list[tuple[str, fx.Node | None]] = field(default_factory=list)
    _tracing: Tracing | None = None

    def run(self, tracing: Tracing, inputs: Sequence[Tensor]) -> list[Any]:
        self._tracing = tracing
        primals, cotangents = inputs[: self.num_primals], inputs[self.num_primals :]
        outputs = TensorsOf(self.g, self._note).run(tracing, primals)
        inexact = [o for o in outputs if o.dtype.is_floating_point or o.dtype.is_complex]
        wrt = [primals[i] for i in self.wrt]
        tracing.phase = "backward"
        found = gradients(inexact, wrt, _conjugate(cotangents), create_graph=False)
        results = [
            torch.zeros_like(primal) if gradient is None else gradient
            for gradient, primal in zip(found, wrt, strict=True)
        ]
        results = _conjugate(results)
        tracing.phase, tracing.node_notes = "forward", None
        return results

    def _note(self, node: fx.Node, value: Any) -> None:
        tensors = [
            v
            for v in (value if isinstance(value, tuple | list) else [value])
            if isinstance(v, Tensor)
        ]
        self.recorded.append((node, any(t.requires_grad for t in tensors)))
        for function in {t.grad_fn for t in tensors if t.grad_fn is not None}:
            function.register_prehook(lambda _, node=node: self._enter(node))
            function.register_hook(lambda *_: self._enter(None))

    def _enter(self, node: fx.Node | None) -> None:
        """Mark that later operators differentiate `node`, or with `None` add up gradients."""
        assert self._tracing is not None
        last = next(iter(reversed(self._tracing.graph.nodes)))
        self._marks.append((last.name, node))
        if node is not None:
            self._tracing.node_notes = replace(notes_of(node), phase="backward")

    def groups(self, graph: fx.Graph) -> Iterator[_Group]:
        starts = {name: node for name, node in self._marks}
        current: _Group | None = None
        for node in graph.nodes:
            if current is not None and node.op == "call_function":
                current.nodes.append(node)
            if node.name in starts:
                if current is not None:
                    yield current
                start = starts[node.name]
                current = None if start is None else _Group(start, [])
        if current is not None:
            yield current


def _conjugate(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Autograd's vector-Jacobian product conjugates; conjugated before and after, it does not."""
    return [t.conj().resolve_conj() if t.dtype.is_complex else t for t in tensors]


def _take_for_zeros(node: fx.Node) -> None:
    """Replace an input of which only the shape is read by zeros that need no memory."""
    if not node.users:
        return
    value = node.meta["val"]
    graph = node.graph
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with _torch.isolate(), value.fake_mode:
        fake = torch.zeros((), dtype=value.dtype, device=value.device)
    with graph.inserting_before(first):
        zero = graph.call_function(
            aten.zeros.default, ([],), {"dtype": value.dtype, "device": value.device}
        )
        zeros = graph.call_function(aten.expand.default, (zero, list(value.shape)))
    zeros.meta = dict(node.meta)
    zero.meta = node.meta | {"val": fake}
    node.replace_all_uses_with(zeros)
