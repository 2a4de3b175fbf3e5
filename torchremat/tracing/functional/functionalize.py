"""Remove in-place operators from a graph, and say which inputs the graph writes to.

Most programs have none, or only such that a new tensor serves as well, and cost nothing here. A
graph with others is run again, node by node, under PyTorch's own functionalisation. So each new
operator gets the notes of the one that it replaces.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.errors import EffectError
from torchremat.graph.inplace import functionalize_unaliased_writes, is_mutable
from torchremat.graph.nodes import results_of
from torchremat.graph.notes import Notes, notes_of
from torchremat.graph.symbolic_sizes import Interpreter, literal_size
from torchremat.tracing.axes.mapped_operators import let_vmap_scatter
from torchremat.tracing.dynamic_inputs import shapes_of
from torchremat.tracing.functional.batch_norm_ops import find_functional
from torchremat.tracing.functional.nested_results import flatten_nested_results
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.tracing import Tracing

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class FunctionalGraph:
    """A graph without in-place operators.

    `mutations` has pairs: the position of an input, and the node of its new value. `renamed` maps
    the placeholders of the original graph to those of this.
    """

    module: fx.GraphModule
    outputs: tuple[Any, ...]
    mutations: tuple[tuple[int, fx.Node], ...]
    renamed: dict[fx.Node, fx.Node]

    def node(self, placeholder: fx.Node) -> fx.Node:
        return self.renamed.get(placeholder, placeholder)


def functionalize(module: fx.GraphModule, inputs: Sequence[fx.Node]) -> FunctionalGraph:
    """The functional graph of `module`; `inputs` are the placeholders that it may write to."""
    let_vmap_scatter()
    graph = module.graph
    _expose_batch_norm_updates(graph)
    renamed: dict[fx.Node, fx.Node] = {}
    functionalize_unaliased_writes(graph)
    if any(is_mutable(node) for node in graph.nodes):
        _draw_in_order_of_memory(graph)
        _refuse_out_besides_others(graph)
        module, renamed = _retrace(module)
        graph = module.graph
    flatten_nested_results(graph)  # at the end: a trace has made lists of flat ones again
    _end_within_sizes(graph)
    mutations = _pop_writes(graph, [renamed.get(n, n) for n in inputs])
    return FunctionalGraph(module, tuple(results_of(module)), mutations, renamed)


def _expose_batch_norm_updates(graph: fx.Graph) -> None:
    """Write the update of running statistics, which the operator hides, as a `copy_`.

    `native_batch_norm` and its kin declare no write. The functional form returns the new
    statistics.
    """
    for node in list(graph.nodes):
        functional = find_functional(node)
        if functional is None:
            continue
        op, first = functional
        mean, var = node.args[3:5]
        with graph.inserting_before(node):
            new = graph.call_function(op, node.args)
            statistics = (mean.meta["val"], var.meta["val"])
            new.meta = {**node.meta, "val": (*node.meta["val"], *statistics)}
        node.replace_all_uses_with(new)
        with graph.inserting_after(new):
            for i, statistic in ((first + 1, var), (first, mean)):
                item = graph.call_function(operator.getitem, (new, i))
                item.meta = dict(node.meta, val=statistic.meta["val"])
                with graph.inserting_after(item):
                    write = graph.call_function(aten.copy_.default, (statistic, item))
                    write.meta = dict(node.meta, val=statistic.meta["val"])
        graph.erase_node(node)
    drop_running_statistics(graph)


def drop_running_statistics(graph: fx.Graph) -> None:
    """Take the running statistics from derivatives of batch normalisation that do not read them.

    In training the derivative reads the statistics of the batch alone. Those of cuDNN and MIOpen
    are for training.
    """
    for op in _DERIVATIVES:
        for node in graph.find_nodes(op="call_function", target=op):
            if op is not _DERIVATIVES[0] or node.args[7]:
                node.args = (*node.args[:3], None, None, *node.args[5:])


_DERIVATIVES = (
    aten.native_batch_norm_backward.default,
    aten.cudnn_batch_norm_backward.default,
    aten.miopen_batch_norm_backward.default,
)


def _refuse_out_besides_others(graph: fx.Graph) -> None:
    """Raise for an operator that writes to `out` and to other arguments too.

    PyTorch's functionalisation takes one of its results for another.
    """
    for node in filter(is_mutable, graph.nodes):
        written = [
            argument
            for argument in _torch.schema_arguments(node.target)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if len({argument.is_out for argument in written}) > 1:
            raise EffectError(
                f"{node.target} at {notes_of(node).source} writes to `out`, and in place to others "
                "of its arguments, of which PyTorch makes a graph with other results. Call it "
                "without `out`, and copy its results."
            )


def _draw_in_order_of_memory(graph: fx.Graph) -> None:
    """Let random numbers that are drawn in place go where they go in plain PyTorch.

    `x.bernoulli_(p)` fills a transposed x in the order of its memory. The functional form fills a
    contiguous tensor in the order of its indices: another mask. So draw into a view of x that has
    its indices in the order of memory.
    """
    for node in graph.nodes:
        if node.target not in (aten.bernoulli_.float, aten.normal_.default):
            continue
        drawn_into = node.args[0].meta["val"]
        if drawn_into.is_contiguous():
            continue
        if node.target is aten.normal_.default:
            raise EffectError(
                f"normal_() at {notes_of(node).source} fills a tensor that is not contiguous, "
                "which PyTorch does with other numbers than a graph would draw. Fill a contiguous "
                "one: torch.randn(shape)."
            )
        order = sorted(range(drawn_into.dim()), key=lambda i: -drawn_into.stride(i))
        with graph.inserting_before(node):
            view = graph.call_function(aten.permute.default, (node.args[0], order))
        view.meta = dict(node.meta)
        node.replace_all_uses_with(node.args[0])
        node.args = (view, *node.args[1:])


def _retrace(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    specs = [InputSpec.of(node.meta["val"]) for node in placeholders]
    tracing = Tracing(may_capture=False, shapes=shapes_of(specs))
    with tracing.recording(), torch.no_grad():
        fakes = [
            tracing.input(spec, node.name) for spec, node in zip(specs, placeholders, strict=True)
        ]
        for fake, placeholder in zip(fakes, placeholders, strict=True):
            tracing.placeholder_of(fake).meta = dict(placeholder.meta)
        run = _NotedInterpreter(module, tracing).run_flat
        outputs = torch.func.functionalize(run, remove="mutations")(*fakes)
        tracing.node_notes = None
        result = tracing.finish(outputs)
    renamed = {
        old: tracing.placeholder_of(fake) for old, fake in zip(placeholders, fakes, strict=True)
    }
    return result, renamed


class _NotedInterpreter(Interpreter):
    """Runs a graph in a trace, handing the notes of each operator on to what it turns into."""

    def __init__(self, module: fx.GraphModule, tracing: Tracing) -> None:
        super().__init__(module)
        self.tracing = tracing

    def run_flat(self, *inputs: Tensor) -> tuple[Any, ...]:
        return tuple(self.run(*inputs))

    def run_node(self, n: fx.Node) -> Any:
        # views of what was written follow the last operator, of either pass
        notes = Notes(is_for_output=True) if n.op == "output" else notes_of(n)
        if is_mutable(n):
            notes = replace(notes, written_by=n.target)
        self.tracing.node_notes = notes
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not aten.binary_cross_entropy_with_logits.default:
            return super().call_function(target, args, kwargs)
        # any level of torch.func computes it by another formula, which rounds otherwise
        positions = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]

        def run(tensors: Sequence[Tensor]) -> tuple[Tensor]:
            full = list(args)
            for i, tensor in zip(positions, tensors, strict=True):
                full[i] = tensor
            return (target(*full, **kwargs),)

        (loss,) = _torch.apply_to_functional(run, [args[i] for i in positions])
        return loss

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self.tracing.constant(value) if isinstance(value, Tensor) else value


# The end of `x[1:]` in a graph.
_LARGEST = 2**63 - 1
# Dimension, start, end and step of `slice_scatter`, as its schema has them.
_SLICE_DEFAULTS = (0, None, None, 1)


def _end_within_sizes(graph: fx.Graph) -> None:
    """Give writes to slices the size of their dimension as the end, where they go further.

    A write to `x[1:]` ends at 2**63 - 1, and PyTorch's batching rule counts up to there.
    """
    for node in graph.find_nodes(op="call_function", target=aten.slice_scatter.default):
        defaults: tuple[Any, ...] = _SLICE_DEFAULTS[len(node.args) - 2 :]
        x, source, dim, start, end, step = node.args + defaults
        size = x.meta["val"].shape[dim]
        if end is None or end == _LARGEST:
            end = size
        elif isinstance(end, int) and isinstance(size, int):
            end = min(end, size)
        node.args = (x, source, dim, start, literal_size(end), step)


def _pop_writes(graph: fx.Graph, inputs: Sequence[fx.Node]) -> tuple[tuple[int, fx.Node], ...]:
    writes: dict[int, fx.Node] = {}
    for node in list(graph.find_nodes(op="call_function", target=aten.copy_.default)):
        target, value = node.args[:2]
        if target in inputs:
            writes[inputs.index(target)] = value
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    return tuple(sorted(writes.items(), key=lambda pair: pair[0]))
