"""The graphs that a program runs, compiled to Python functions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from torchremat import config
from torchremat.autodiff.early_gradients import order_gradients_early
from torchremat.autodiff.joint import Joint
from torchremat.autodiff.replay_rules import reason_not_replayable
from torchremat.autodiff.rewrites.encodings import decode_in, undo_encodings
from torchremat.core.interrupts import hold_interrupts
from torchremat.errors import EffectError
from torchremat.graph.codegen import Runner, StagedRunner, compile_graph, compile_in_stages
from torchremat.graph.hand_outs import Groups, Targets, move_results_up
from torchremat.graph.nodes import VIEWS_BY_SHAPE, call_of, inner_graphs_of, is_forward, is_item
from torchremat.graph.notes import note_graph, note_roles, notes_of
from torchremat.graph.reuse import Reuse, reuse_in
from torchremat.graph.schedule import GraphSchedule, build_scheduled_graph
from torchremat.graph.slicing import UnavailableError, prune_bodies, simplify, slice_graph
from torchremat.graph.write_forms import values_after_writes, writes_into_first
from torchremat.graph.write_order import move_views_before_writes
from torchremat.remat.offload.graph_nodes import Memory, fetch_copies
from torchremat.remat.program.compilers import Compiler
from torchremat.remat.program.random_replay import is_run_again, replay_from_states

aten = torch.ops.aten


class GraphFunctions:
    """The functions that run a graph, each compiled when it is first needed."""

    def __init__(self, module: fx.GraphModule, name: str) -> None:
        self._module = module
        self._name = name
        self._staged: dict[tuple[Groups, Targets], StagedRunner] = {}

    @cached_property
    def _reuse(self) -> Reuse:
        return reuse_in(self._module)

    @cached_property
    def run(self) -> Runner:
        with hold_interrupts():
            return compile_graph(self._module, self._name, self._reuse)

    def in_stages(self, groups: Groups, targets: Targets) -> StagedRunner:
        """The function that hands out `groups` of results one after another."""
        key = groups, targets
        if key not in self._staged:
            with hold_interrupts():
                compiled = compile_in_stages(self._module, self._name, groups, self._reuse, targets)
            self._staged[key] = compiled
        return self._staged[key]


@dataclass(frozen=True, eq=False)
class CompiledGraph:
    module: fx.GraphModule
    functions: GraphFunctions

    @property
    def run(self) -> Runner:
        return self.functions.run

    @classmethod
    def around(cls, module: fx.GraphModule, run: Runner) -> "CompiledGraph":
        """The graph with a function that somebody else made of it."""
        functions = GraphFunctions(module, "graph")
        functions.run = run
        return cls(module, functions)

    @classmethod
    def of(
        cls,
        module: fx.GraphModule,
        name: str,
        program: object = None,
        compiler: Compiler | None = None,
    ) -> "CompiledGraph":
        note_graph(module, program=program)
        with hold_interrupts():
            simplify(module.graph)
            move_views_before_writes(module.graph)
            if compiler:
                return cls.around(module, compiler(module))
            return cls(module, GraphFunctions(module, name))


@dataclass(frozen=True, eq=False)
class BackwardInputs:
    """The inputs of a backward graph, and those of them that are not the values themselves.

    Attributes:
        roles: what each is: an input, a residual, a cotangent.
        draws: random values, by position, of which it is given a generator's state.
        copies: values, by position, that it is given in the host's memory; where each lies.
        codes: values, by position, that it is given in fewer bits; the encoding of each.
    """

    roles: Sequence[str] = ()
    draws: Mapping[int, fx.Node] = field(default_factory=dict)
    copies: Mapping[int, Memory] = field(default_factory=dict)
    codes: Mapping[int, fx.Node] = field(default_factory=dict)


_PLAIN_INPUTS = BackwardInputs()


@dataclass(frozen=True)
class BackwardOrder:
    """The order of a backward pass without a schedule.

    Attributes:
        at_once: what is recomputed runs before all others, else just before it is needed.
        is_autograds: the others run as autograd runs them, else as `order_gradients_early` says.
    """

    at_once: bool = False
    is_autograds: bool = True


_AUTOGRADS_ORDER = BackwardOrder()


def compile_backward(
    joint: Joint,
    inputs: Sequence[fx.Node | None],
    outputs: Sequence[Any],
    program: object,
    *,
    form: BackwardInputs = _PLAIN_INPUTS,
    schedule: GraphSchedule | None = None,
    compiler: Compiler | None = None,
    order: BackwardOrder = _AUTOGRADS_ORDER,
) -> CompiledGraph:
    """The graph from `inputs` to `outputs`, values of `joint`: a backward pass.

    Operators run as `schedule` says, else in `order`.
    """
    if schedule is None:
        lazy = None if order.at_once else is_forward
        try:
            graph = joint.module.graph
            nodes = list(graph.nodes) if order.is_autograds else order_gradients_early(graph)
            module = slice_graph(joint.module, inputs, outputs, lazy=lazy, order=nodes)
            undo_encodings(module.graph)
        except UnavailableError:  # of what must not run again, not even the inputs are saved
            _refuse_replay(slice_graph(joint.module, [*inputs, *joint.inputs], outputs).graph)
            raise
    else:
        given = {call_of(n) for n in inputs if n is not None and _is_drawn(n)}
        rerun = {call_of(node) for node in form.draws.values() if is_run_again(node)}
        calls = [call for call in schedule.backward if call not in given or call in rerun]
        module = build_scheduled_graph(joint.module, inputs, outputs, calls)
    prune_bodies(module)
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    _decode(module.graph, placeholders, form)
    _refuse_replay(module.graph)
    accept_any_layout(module.graph)
    move_results_up(module)
    if form.copies:
        early = _fetch(module.graph, placeholders, form, schedule)
        note_graph(module, fetched_first=early)
    note_graph(module, cut=(joint, list(inputs), list(outputs)))
    note_roles(module, form.roles)
    return CompiledGraph.of(module, "backward", program, compiler)


def _decode(graph: fx.Graph, placeholders: Sequence[fx.Node], form: BackwardInputs) -> None:
    """Let `graph` make the values of which it is given bits, or a generator's state."""
    for i, encoding in form.codes.items():
        decode_in(graph, placeholders[i], encoding)
    if form.draws:
        states = [placeholders[i] for i in form.draws]
        replay_from_states(graph, list(form.draws.values()), states)


def _is_drawn(node: fx.Node) -> bool:
    return node.op == "call_function" and reason_not_replayable(node) is not None


def _fetch(
    graph: fx.Graph,
    placeholders: Sequence[fx.Node],
    form: BackwardInputs,
    schedule: GraphSchedule | None,
) -> tuple[int, ...]:
    """Let `graph` bring its copies back; which of them, in their order, as soon as it starts."""
    roles = zip(placeholders, form.roles, strict=True)
    return fetch_copies(
        graph,
        [placeholders[i] for i in form.copies],
        list(form.copies.values()),
        [node for node, role in roles if role == "cotangent"],
        lead=1 if schedule is not None else max(config.offload_prefetch, 1),
        is_planned=schedule is not None,
    )


def _refuse_replay(graph: fx.Graph) -> None:
    """Raise where a derivative would run an operator again that must not run twice."""
    for node, whose in _find_replayed(graph, None):
        reason = reason_not_replayable(node)
        if reason is None:
            continue
        if whose is None:
            raise EffectError(
                f"a second derivative needs the value of {node.target} from "
                f"{notes_of(node).source} again, which was not saved: {reason}. Draw random "
                "numbers outside the innermost checkpoint or vmap, and pass them in."
            )
        raise EffectError(
            f"PyTorch's derivative of {whose.target}, at {notes_of(whose).source}, runs what is "
            f"inside again, with {node.target}: {reason}. Draw random numbers outside, and pass "
            "them in."
        )


def _find_replayed(
    graph: fx.Graph, whose: fx.Node | None
) -> Iterator[tuple[fx.Node, fx.Node | None]]:
    """The operators of the forward pass that a backward graph runs again, in bodies too.

    With each comes the call in whose body it is, if that is a derivative of PyTorch's.
    """
    for node in graph.nodes:
        if node.op != "call_function" or is_item(node):
            continue
        if is_forward(node):
            yield node, whose
            for body in inner_graphs_of(node):
                yield from ((inner, whose) for inner in _all_nodes(body.graph))
        else:
            for body in inner_graphs_of(node):
                yield from _find_replayed(body.graph, node)


def _all_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in graph.nodes:
        if not is_item(node):
            yield node
        for body in inner_graphs_of(node):
            yield from _all_nodes(body.graph)


_BY_MEMORY = {
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
}
"""They read the memory of their first argument as it lies."""


def accept_any_layout(graph: fx.Graph) -> None:
    """Let a backward graph take cotangents that lie otherwise in memory than when it was traced.

    `view` becomes `reshape`, which is a view where it can be. `view_as_complex` is given pairs that
    lie side by side, `as_strided` what was contiguous as that.
    """
    for node in list(graph.nodes):
        if is_forward(node):
            continue
        if node.target in VIEWS_BY_SHAPE:
            node.target = aten.reshape.default
        elif node.target is aten.view_as_complex.default or (
            node.target in _BY_MEMORY and node.args[0].meta["val"].is_contiguous()
        ):
            with graph.inserting_before(node):
                lying = graph.call_function(aten.contiguous.default, (node.args[0],))
            lying.meta = dict(node.args[0].meta)
            node.args = (lying, *node.args[1:])


def copy_inputs_among_last(graph: fx.Graph, count: int) -> None:
    """Make copies of the last `count` outputs, which are inputs that will be written to.

    A copy is made before the first write, which can then run in place.
    """
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    for i in range(len(results) - count, len(results)):
        lying = values_after_writes(results[i])
        place = next((n for n in graph.nodes if n in lying and writes_into_first(n)), output)
        with graph.inserting_before(place):
            copy = graph.call_function(aten.clone.default, (results[i],))
            copy.meta = dict(results[i].meta)
        results[i] = copy
    output.args = (tuple(results),)
