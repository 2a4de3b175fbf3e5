"""Open the checkpoints of a graph that is not known in part: what is known inside comes out.

    y = remat_p[z = sin(x); y = mul(z, u)] x u      u unknown, z saveable

becomes

    z = sin(x)
    y = remat_p[y = mul(z, u)] z u

so that a policy for the whole graph decides on z, or that of the outermost checkpoint around it.
What is known altogether comes out altogether; what is not stays a checkpoint.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchremat.autodiff.partial_eval import Residuals
from torchremat.graph.nodes import attribute, is_checkpoint, results_of
from torchremat.graph.notes import graph_notes_of, note, note_graph, notes_of
from torchremat.graph.slicing import add_body, slice_graph
from torchremat.policies.builtin import nothing_saveable
from torchremat.policies.policy import Policy
from torchremat.remat.op.op_rules import policy_of
from torchremat.tracing.modules.module_paths import below
from torchremat.typed_graph.dce import draws_random

ResidualsOf = Callable[[fx.GraphModule, set[fx.Node], Sequence[fx.Node], str, Policy], Residuals]
"""Chooses what to save of a graph: unknown nodes, wanted ones, the module's name, the policy."""


@dataclass
class Opener:
    """Finds the unknown nodes of a graph, and opens its checkpoints on the way.

    After a random operator that is unknown, those that follow are too: they draw after it.
    """

    residuals_of: ResidualsOf
    policy: Policy | None
    """Decides in all checkpoints; `None` leaves each, with those inside it, to its own policy."""
    _draws_unknown: bool = field(default=False)

    def open(
        self,
        module: fx.GraphModule,
        unknown_inputs: set[fx.Node],
        prefix: str = "",
        policy: Policy | None = None,
    ) -> set[fx.Node]:
        """Open the checkpoints of `module`, a copy that may be changed; its unknown nodes.

        `policy` is that of a checkpoint around.
        """
        unknown = set(unknown_inputs)
        node = next(iter(module.graph.nodes))
        while node.op != "output":
            following = node.next
            if node.op == "call_function":
                is_unknown = any(used in unknown for used in node.all_input_nodes)
                if is_checkpoint(node):
                    first = self._open_call(module, node, unknown, prefix, policy or self.policy)
                    node = first if first is not None else following
                    continue
                if draws_random(node, module):
                    is_unknown = self._draws_unknown = is_unknown or self._draws_unknown
                if is_unknown:
                    unknown.add(node)
            node = following
        return unknown

    def _open_call(
        self,
        module: fx.GraphModule,
        node: fx.Node,
        unknown: set[fx.Node],
        prefix: str,
        policy: Policy | None,
    ) -> fx.Node | None:
        """Open one checkpoint. If all of it came out, return the first of those nodes to visit."""
        reference, *operands = node.args
        assert isinstance(reference, fx.Node)
        body = copy_module(attribute(module, str(reference.target)))
        inputs = list(body.graph.find_nodes(op="placeholder"))
        env = dict(zip(inputs, operands, strict=True))
        path = below(prefix, notes_of(node).module)
        if not any(operand in unknown for operand in operands):
            return self._inline(module, node, body, env, path)
        own = policy_of(body) if policy is None else policy
        around = own if own.applies_to_nested else None
        unknown_inside = self.open(body, {i for i in inputs if env[i] in unknown}, path, around)
        # a plan is for a step: here what is within every budget is to save nothing
        chosen = nothing_saveable if own.is_whole_graph and policy is None else own
        self._split(module, node, body, env, unknown_inside, path, chosen)
        unknown |= {node, *node.users}
        return node.next

    def _inline(
        self,
        module: fx.GraphModule,
        node: fx.Node,
        body: fx.GraphModule,
        env: dict[Any, Any],
        path: str,
    ) -> fx.Node:
        before = node.prev
        _copy_before(
            node, [n for n in body.graph.nodes if n.op == "call_function"], env, module, body, path
        )
        _replace_items(node, [env.get(r, r) for r in results_of(body)])
        module.graph.erase_node(node)
        return before.next

    def _split(
        self,
        module: fx.GraphModule,
        node: fx.Node,
        body: fx.GraphModule,
        env: dict[Any, Any],
        unknown: set[fx.Node],
        path: str,
        policy: Policy,
    ) -> None:
        results = results_of(body)
        staged = [r for r in results if r in unknown]
        found = self.residuals_of(body, unknown, staged, path, policy)
        known = [n for n in body.graph.nodes if n.op == "call_function" and n not in unknown]
        _copy_before(node, known, env, module, body, path)
        left = [n for n in body.graph.find_nodes(op="placeholder") if n in unknown]
        inner = slice_graph(body, [*found.inputs, *found.values, *left], staged)
        inner.meta = dict(body.meta)  # those of `copy_module`
        positions = {r: i for i, r in enumerate(staged)}
        values = node.meta["val"]
        for user in list(node.users):
            result = results[user.args[1]]  # type: ignore[index]
            if result in positions:
                user.args = (node, positions[result])
            else:
                user.replace_all_uses_with(env[result])
                module.graph.erase_node(user)
        node.meta["val"] = tuple(v for v, r in zip(values, results, strict=True) if r in positions)
        with module.graph.inserting_before(node):
            reference = _add_body(module, inner, node.args[0])  # type: ignore[arg-type]
        node.args = (reference, *(env[n] for n in (*found.inputs, *found.values, *left)))


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = fx.GraphModule(module, graph)
    note_graph(copy, policy=policy_of(module), is_tidy=graph_notes_of(module).is_tidy)
    return copy


def _copy_before(
    where: fx.Node,
    nodes: Sequence[fx.Node],
    env: dict[Any, Any],
    module: fx.GraphModule,
    body: fx.GraphModule,
    path: str,
) -> None:
    with module.graph.inserting_before(where):
        for node in nodes:
            for used in node.all_input_nodes:
                if used.op == "get_attr" and used not in env:
                    env[used] = _add_body(module, attribute(body, str(used.target)), used)
            copy = module.graph.node_copy(node, env.__getitem__)
            note(copy, module=below(path, notes_of(node).module))
            env[node] = copy


def _replace_items(node: fx.Node, results: Sequence[Any]) -> None:
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        node.graph.erase_node(user)


def _add_body(module: fx.GraphModule, body: torch.nn.Module, like: fx.Node) -> fx.Node:
    node = add_body(module, body)
    node.meta = dict(like.meta)
    return node
