"""`partial_eval_graph`: a graph in two, what can run now and what must wait."""

from collections.abc import Sequence
from typing import Any

from torch import fx

from torchremat.autodiff.joint import Joint
from torchremat.autodiff.jvp_graph import check_pure
from torchremat.autodiff.partial_eval import Residuals
from torchremat.core.avals import Aval
from torchremat.core.trees import positional, tuple_of
from torchremat.graph.nodes import call_of, is_forward, results_of
from torchremat.graph.notes import note, notes_of
from torchremat.graph.slicing import slice_graph
from torchremat.policies.builtin import everything_saveable
from torchremat.policies.policy import Policy, PolicyLike, as_policy
from torchremat.remat.op.open_bodies import Opener
from torchremat.remat.program.decisions import Decision, PolicyDecisions
from torchremat.typed_graph.building import Input, build_graph
from torchremat.typed_graph.dce import (
    check_mask,
    const_inputs,
    copy_graph,
    draws_random,
    eliminate_dead,
    set_outputs,
)
from torchremat.typed_graph.equations import aval_of
from torchremat.typed_graph.typed_graph import TypedGraph


def partial_eval_graph(
    g: TypedGraph, unknown_ins: Sequence[bool], *, policy: PolicyLike | None
) -> tuple[TypedGraph, TypedGraph, list[bool], list[Aval]]:
    """Split a graph, some of whose inputs are not known yet, in two.

        known outputs, residuals = known(known inputs)
        unknown outputs          = staged(residuals, unknown inputs)

    An operator that reads nothing unknown is known. A known value that the staged half needs is a
    residual if the policy lets it be saved. If not, the staged half recomputes it, from known
    inputs if need be, which are then residuals. Random operators are not recomputed. Those after an
    unknown one are unknown, so that each draws what it draws in the whole. Views are never
    residuals: their bases are. A checkpoint in the graph is opened: the policy decides
    about the values inside it, and what is unknown of it stays a checkpoint.

    Args:
        g: the graph. It must write to nothing. Its constants are known, and no residuals: each half
            has those that it reads.
        unknown_ins: for each input of `g`, in the order of `in_avals`, whether it is unknown.
        policy: a policy, its spelling (`"dots"`), or a callable; `None` saves nothing but inputs
            and what must not be recomputed.

    Returns:
        `known` and `staged`, which take their inputs one an argument and return tuples. Then for
        each output of `g` whether it is unknown, and the avals of the residuals, in order.

    Raises:
        ValueError: if `unknown_ins` has not one entry for each input; `GraphError`, if `g` writes
            to its inputs or constants.
        TypeError: if an entry is not a bool, or `policy` is not a policy.

    After `jax.interpreters.partial_eval.partial_eval_jaxpr_custom`.

    >>> import torch, torchremat as tr
    >>> g = tr.make_graph(lambda x, u: torch.sin(torch.sin(x)) * u)(torch.ones(3), torch.ones(3))
    >>> known, staged, out_unknowns, residuals = partial_eval_graph(g, [False, True], policy="full")
    >>> known
    { lambda ; a:f32[3]. let
      in (a,) }
    >>> staged
    { lambda ; a:f32[3] b:f32[3]. let
        c:f32[3] = aten.sin a
        d:f32[3] = aten.sin c
        e:f32[3] = aten.mul.Tensor d b
      in (e,) }
    >>> out_unknowns, residuals
    ([True], [f32[3]])
    """
    check_pure(g, "partial_eval_graph")
    check_mask(unknown_ins, len(g.input_nodes), "unknown_ins", "input")
    chosen = as_policy(policy)
    return _Splitter(g, unknown_ins, chosen, chosen).split()


def linearize_graph(
    g: TypedGraph, unknown_ins: Sequence[bool]
) -> tuple[TypedGraph, TypedGraph, list[bool], list[Aval]]:
    """`partial_eval_graph` that saves everything, but in a checkpoint what its policy lets be.

    It draws all random numbers that `g` draws, also those that nothing reads.
    """
    return _Splitter(g, unknown_ins, everything_saveable, None, keeps_draws=True).split()


class _Splitter:
    """`in_checkpoints` is the policy in them; `None` leaves each to its own."""

    def __init__(
        self,
        g: TypedGraph,
        unknown_ins: Sequence[bool],
        policy: Policy,
        in_checkpoints: Policy | None,
        *,
        keeps_draws: bool = False,
    ) -> None:
        self.g = g
        self.policy = policy
        self.in_checkpoints = in_checkpoints
        self.keeps_draws = keeps_draws
        self.module, copies = copy_graph(g)
        set_outputs(self.module.graph, [copies.get(value, value) for value in g.outputs])
        self.consts = const_inputs(g, copies)
        inputs = [copies[node] for node in g.input_nodes]
        pairs = list(zip(inputs, unknown_ins, strict=True))
        self.known_inputs = [node for node, unknown in pairs if not unknown]
        self.unknown_inputs = [node for node, unknown in pairs if unknown]

    def split(self) -> tuple[TypedGraph, TypedGraph, list[bool], list[Aval]]:
        module = self.module
        opener = Opener(self._residuals_of, self.in_checkpoints)
        unknown = opener.open(module, set(self.unknown_inputs))
        outputs = results_of(module)
        eliminate_dead(module, draws_later=self.keeps_draws)
        out_unknowns = [value in unknown for value in outputs]
        wanted = [value for value in outputs if value in unknown]
        anchors = [  # what has an effect, or draws before another that does
            node
            for node in module.graph.nodes
            if node in unknown and node.op == "call_function" and not node.users
        ]
        found = self._residuals_of(module, unknown, [*wanted, *anchors], "", self.policy, warn=True)
        consts = {i.node for i in self.consts}
        residuals = [*(n for n in found.inputs if n not in consts), *found.values]
        staged = self._build_staged(residuals, wanted, anchors)
        known_outputs = [value for value in outputs if value not in unknown]
        known = self._build_known(unknown, [*known_outputs, *residuals])
        avals = [aval_of(node) for node in residuals]
        return known, staged, out_unknowns, avals

    def _residuals_of(
        self,
        module: fx.GraphModule,
        unknown: set[fx.Node],
        wanted: Sequence[fx.Node],
        path: str,
        policy: Policy,
        *,
        warn: bool = False,
    ) -> Residuals:
        nodes = list(module.graph.nodes)
        for node in nodes:
            notes = notes_of(node)
            before = notes.phase_before or notes.phase or "forward"
            note(node, phase="backward" if node in unknown else "forward", phase_before=before)
        inputs = [n for n in nodes if n.op == "placeholder"]
        joint = Joint(
            module,
            inputs=tuple(n for n in inputs if n not in unknown),
            outputs=(),
            mutations=(),
            cotangents=tuple(n for n in inputs if n in unknown),
            gradients=tuple(wanted),
        )
        decisions = PolicyDecisions(joint, policy, path)
        for node in decisions.by_value:
            if draws_random(call_of(node), module):
                decisions.by_value[node] = Decision("saved", "it draws random numbers")
        if warn:
            decisions.warn_of_unmatched()
        return decisions.residuals(joint)

    def _build_staged(
        self, residuals: Sequence[fx.Node], wanted: Sequence[fx.Node], anchors: Sequence[fx.Node]
    ) -> TypedGraph:
        sources = [i.node for i in self.consts]
        given = [*sources, *residuals, *self.unknown_inputs]
        module = slice_graph(self.module, given, [*wanted, *anchors], lazy=is_forward)
        results = results_of(module)[: len(wanted)]
        set_outputs(module.graph, results)
        placeholders = module.graph.find_nodes(op="placeholder")
        tensors = [*(i.tensor for i in self.consts), *(None for _ in given[len(sources) :])]
        inputs = [
            Input(node, source.name, tensor)
            for node, source, tensor in zip(placeholders, given, tensors, strict=True)
        ]
        structures = positional(len(given) - len(sources)), tuple_of(len(results))
        return _with_phases(build_graph(module, inputs, results, structures))

    def _build_known(self, unknown: set[fx.Node], outputs: Sequence[Any]) -> TypedGraph:
        graph = self.module.graph
        draws_later = self.keeps_draws or any(draws_random(node, self.module) for node in unknown)
        set_outputs(graph, outputs)
        for node in reversed(list(graph.nodes)):
            if node in unknown:
                graph.erase_node(node)
        eliminate_dead(self.module, draws_later=draws_later)
        inputs = [*self.consts, *(Input(node, node.name) for node in self.known_inputs)]
        structures = positional(len(self.known_inputs)), tuple_of(len(outputs))
        return _with_phases(build_graph(self.module, inputs, outputs, structures))


def _with_phases(g: TypedGraph) -> TypedGraph:
    """Give the nodes back the phases that they had in the whole graph."""
    for node in g.graph_module.graph.nodes:
        if before := notes_of(node).phase_before:
            note(node, phase=before, phase_before=None)
    return g
