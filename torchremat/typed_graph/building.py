"""Make a `TypedGraph` of the graph of a trace."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.core.trees import Structure
from torchremat.graph.inplace import find_restride
from torchremat.graph.nodes import (
    VIEWS_BY_SHAPE,
    attribute,
    is_checkpoint,
    is_item,
    item_index,
    results_of,
)
from torchremat.graph.notes import graph_notes_of, note_graph
from torchremat.graph.slicing import add_body, slice_graph
from torchremat.typed_graph.typed_graph import TypedGraph

aten = torch.ops.aten

_PASS_THROUGH = {aten.alias.default, aten.lift_fresh.default}
_LIFTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}


@dataclass(frozen=True, eq=False)
class Input:
    """An input of a graph to build: its node in the trace, its name, its tensor if a constant."""

    node: fx.Node
    name: str
    tensor: Tensor | None = None


def build_graph(
    module: fx.GraphModule,
    inputs: Sequence[Input],
    outputs: Sequence[Any],
    structures: tuple[Structure, Structure],
    writes: Sequence[tuple[Input, fx.Node]] = (),
) -> TypedGraph:
    """The graph that computes `outputs`, nodes of `module` or numbers, from `inputs`.

    Operators stay, used or not, in their order. Constants that nobody uses go, and tensors that
    the trace put into `module` become constants. Bodies of checkpoints lose the outputs that
    nobody reads. `view` becomes `reshape`, since inputs may have other strides than those traced.
    """
    return _Builder(module).build(inputs, outputs, structures, writes)


class _Builder:
    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}

    def build(
        self,
        inputs: Sequence[Input],
        outputs: Sequence[Any],
        structures: tuple[Structure, Structure],
        writes: Sequence[tuple[Input, fx.Node]],
    ) -> TypedGraph:
        results = [*outputs, *(value for _, value in writes)]
        nodes = {value for value in results if isinstance(value, fx.Node)}
        written = {source.node for source, _ in writes}
        consts = [
            i
            for i in inputs
            if i.tensor is not None and (i.node.users or i.node in nodes | written)
        ]
        made = self._find_trace_constants()
        kept = [*consts, *made, *(i for i in inputs if i.tensor is None)]
        names: set[str] = set()
        for i in kept:
            name = _identifier(i.name)
            while name in names:
                name += "_"
            names.add(name)
            copy = self.graph.placeholder(name)
            copy.meta = dict(i.node.meta)
            self.copies[i.node] = copy
        self._alias_trace_constants(made, nodes)
        for node in self.module.graph.nodes:
            self._copy(node, nodes)
        self.graph.output(tuple(self.copies[r] if isinstance(r, fx.Node) else r for r in results))
        graph_module = fx.GraphModule(self.module, self.graph)
        prune_bodies(graph_module)
        positions = {i.node: n for n, i in enumerate(kept)}
        return TypedGraph(
            graph_module,
            [i.tensor for i in (*consts, *made) if i.tensor is not None],
            *structures,
            tuple(positions[source.node] for source, _ in writes),
        )

    def _find_trace_constants(self) -> list[Input]:
        found: dict[int, Input] = {}
        for node in self.module.graph.find_nodes(op="get_attr"):
            value = attribute(self.module, str(node.target))
            if isinstance(value, Tensor) and node.users:
                found.setdefault(id(value), Input(node, "const", value))
        return list(found.values())

    def _alias_trace_constants(self, made: Sequence[Input], results: set[fx.Node]) -> None:
        """Let the readers of such a tensor, or of a fresh copy of it, read the constant.

        No operator of a graph writes. A caller may write to a result, and so gets a copy.
        """
        copies = {id(i.tensor): self.copies[i.node] for i in made}
        for node in self.module.graph.find_nodes(op="get_attr"):
            const = copies.get(id(attribute(self.module, str(node.target))))
            if const is None:
                continue
            self.copies[node] = const
            for user in node.users:
                if user.target in _LIFTS and user not in results:
                    self.copies[user] = const

    def _copy(self, node: fx.Node, results: set[fx.Node]) -> None:
        if node in self.copies or node.op in ("placeholder", "output"):
            return
        unread = not node.users and node not in results
        if unread and (node.op == "get_attr" or is_item(node) or _is_vestige(node)):
            return
        if node.target in _PASS_THROUGH and node not in results:
            self.copies[node] = self.copies[node.args[0]]  # type: ignore[index]
            return
        if node.target is aten.copy.default:
            self.copies[node] = self._expand_copy(node, node in results)
            return
        copy = self.graph.node_copy(node, self.copies.__getitem__)
        copy.kwargs = {k: v for k, v in copy.kwargs.items() if not _is_number_of_trace(node, k)}
        if copy.target in VIEWS_BY_SHAPE:
            copy.target = aten.reshape.default
        self.copies[node] = copy

    def _expand_copy(self, node: fx.Node, is_result: bool) -> fx.Node:
        """Write `copy`, which has no derivative, as operators that have one.

        Functionalisation makes `y = copy(x, value)` of `x.copy_(value)` and `x[i] = value`.
        """
        source = node.args[1]
        assert isinstance(source, fx.Node)
        like, given = node.meta["val"], source.meta["val"]
        found = self.copies[source]
        if (like.dtype, like.device) != (given.dtype, given.device):
            options = {"dtype": like.dtype, "device": like.device}
            found = self._call(aten._to_copy.default, (found,), options, node, given.shape)
        if like.shape != given.shape:
            found = self._call(aten.expand.default, (found, list(like.shape)), {}, node, like.shape)
        elif like.stride() != given.stride() and (steps := find_restride(given, like)):
            for op, args, kwargs, value in steps:
                found = self._call(op, (found, *args), kwargs, node, value.shape)
            return found
        if is_result:
            found = self._call(aten.clone.default, (found,), {}, node, like.shape)
        return found

    def _call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node, shape: Any
    ) -> fx.Node:
        call = self.graph.call_function(target, args, kwargs)
        call.meta = dict(like.meta)
        value = like.meta["val"]
        with _torch.isolate(), value.fake_mode:
            call.meta["val"] = torch.empty(shape, dtype=value.dtype, device=value.device)
        return call


def prune_bodies(module: fx.GraphModule) -> None:
    for node in list(module.graph.nodes):
        if is_checkpoint(node):
            prune_body(module, node)
    module.recompile()


def prune_body(module: fx.GraphModule, node: fx.Node) -> None:
    """Drop the outputs that nobody reads, then the inputs, from the body that `node` runs.

    A differentiated checkpoint whose residuals nobody reads gets back the body of its trace.
    """
    reference = node.args[0]
    assert isinstance(reference, fx.Node)
    body = attribute(module, str(reference.target))
    used = sorted({item_index(user) for user in node.users})
    origin = graph_notes_of(body).origin
    if origin is not None and all(i < len(results_of(origin)) for i in used):
        body = origin
        node.meta["val"] = tuple(node.meta["val"][: len(results_of(origin))])
        reference = _replace_body(module, node, reference, body)
    results = results_of(body)
    if not used or (len(used) == len(results) and graph_notes_of(body).is_tidy):
        return
    body = _with_outputs(body, [results[i] for i in used])
    for user in list(node.users):
        user.args = (node, used.index(item_index(user)))
    node.meta["val"] = tuple(node.meta["val"][i] for i in used)
    operands = []
    inputs = body.graph.find_nodes(op="placeholder")
    for placeholder, operand in zip(list(inputs), node.args[1:], strict=True):
        if placeholder.users:
            operands.append(operand)
        else:
            body.graph.erase_node(placeholder)
    body.recompile()
    _replace_body(module, node, reference, body)
    node.args = (node.args[0], *operands)


def _with_outputs(body: fx.GraphModule, outputs: Sequence[Any]) -> fx.GraphModule:
    inputs = body.graph.find_nodes(op="placeholder")
    pruned = slice_graph(body, inputs, outputs)
    note_graph(pruned, policy=graph_notes_of(body).checkpoint_policy, is_tidy=True)
    for node in list(pruned.graph.nodes):
        if node.target in _PASS_THROUGH and all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            pruned.graph.erase_node(node)
        elif node.target in VIEWS_BY_SHAPE:
            node.target = aten.reshape.default
    return pruned


def _replace_body(
    module: fx.GraphModule, node: fx.Node, reference: fx.Node, body: fx.GraphModule
) -> fx.Node:
    with module.graph.inserting_before(node):
        new = add_body(module, body, "body")
    new.meta = dict(reference.meta)
    node.args = (new, *node.args[1:])
    if not reference.users:
        module.graph.erase_node(reference)
        delattr(module, str(reference.target))
    return new


def _is_vestige(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.target is aten.detach.default or not isinstance(value, Tensor | tuple | list)


def _is_number_of_trace(node: fx.Node, key: str) -> bool:
    return key == "call" and is_checkpoint(node)


def _identifier(label: str) -> str:
    """Make the name of a placeholder from the user's name of the tensor.

    >>> _identifier("x['w'][0]"), _identifier("layers.0.weight")
    ('x_w_0', 'layers_0_weight')
    """
    name = re.sub(r"\W+", "_", label).strip("_") or "value"
    return name if name[0].isalpha() else f"value_{name}"
