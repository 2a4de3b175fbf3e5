"""Dead-code elimination: a graph without what nobody reads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchremat import _torch
from torchremat.core.trees import positional, tuple_of
from torchremat.errors import ArgumentTypeError, ArgumentValueError
from torchremat.graph.nodes import attribute, is_checkpoint
from torchremat.typed_graph.building import Input, build_graph, prune_body
from torchremat.typed_graph.typed_graph import TypedGraph


def dce_graph(g: TypedGraph, used_outputs: Sequence[bool]) -> tuple[TypedGraph, list[bool]]:
    """Reduce a graph to what some of its outputs need.

    Operators that nobody reads go, inside checkpoints too, and so do constants and inputs. What has
    an effect besides its result stays: writes to constants and inputs, collectives and assertions;
    and a random operator before another that stays, which would draw other numbers without it.

    Args:
        g: the graph. It is not changed.
        used_outputs: for each output of `g`, in the order of `out_avals`, whether it is wanted.

    Returns:
        A graph and a list. The graph takes the used inputs, one an argument, and returns a tuple
        of the wanted outputs. The list says of each input of `g` whether it is used.

    Raises:
        ValueError: if `used_outputs` has not one entry for each output.
        TypeError: if an entry is not a bool.

    After `jax.interpreters.partial_eval.dce_jaxpr`.

    >>> import torch, torchremat as tr
    >>> g = tr.make_graph(lambda x, y: (x.sin(), y.cos()))(torch.ones(3), torch.ones(3))
    >>> dce_graph(g, [False, True])
    ({ lambda ; a:f32[3]. let
        b:f32[3] = aten.cos a
      in (b,) }, [False, True])
    """
    check_mask(used_outputs, len(g.outputs), "used_outputs", "output")
    module, copies = copy_graph(g)
    outputs = [copies.get(v, v) for v, used in zip(g.outputs, used_outputs, strict=True) if used]
    written = [copies[value] for value in g.written]
    set_outputs(module.graph, [*outputs, *written])
    eliminate_dead(module)
    used = [bool(copies[node].users) for node in g.input_nodes]
    for i in g.writes:
        if i >= len(g.consts):
            used[i - len(g.consts)] = True
    inputs = const_inputs(g, copies)
    inputs += [
        Input(copies[node], node.name)
        for node, is_used in zip(g.input_nodes, used, strict=True)
        if is_used
    ]
    by_node = {i.node: i for i in inputs}
    targets = [copies[(*g.const_nodes, *g.input_nodes)[i]] for i in g.writes]
    writes = [(by_node[t], value) for t, value in zip(targets, written, strict=True)]
    structures = positional(sum(used)), tuple_of(len(outputs))
    return build_graph(module, inputs, outputs, structures, writes), used


def check_mask(mask: Sequence[bool], count: int, what: str, of_what: str) -> None:
    if not isinstance(mask, Sequence) or isinstance(mask, str):
        raise ArgumentTypeError(
            f"{what} must be a sequence of bools, one for each {of_what}, but it is {mask!r} "
            f"({type(mask).__name__}): write [{', '.join(['True'] * min(count, 3))}], say"
        )
    wrong = [entry for entry in mask if not isinstance(entry, bool)]
    if wrong:
        raise ArgumentTypeError(
            f"{what} must be a sequence of bools, but it contains {wrong[0]!r} "
            f"({type(wrong[0]).__name__})"
        )
    if len(mask) != count:
        raise ArgumentValueError(
            f"{what} must have one entry for each {of_what}: the graph has {count}, and {what} has "
            f"{len(mask)} entries"
        )


def copy_graph(g: TypedGraph) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(g.graph_module.graph, copies)
    graph.output(())
    return fx.GraphModule(g.graph_module, graph), copies


def set_outputs(graph: fx.Graph, outputs: Sequence[Any]) -> None:
    (output,) = graph.find_nodes(op="output")
    output.args = (tuple(outputs),)


def const_inputs(g: TypedGraph, copies: dict[fx.Node, fx.Node]) -> list[Input]:
    pairs = zip(g.const_nodes, g.consts, strict=True)
    return [Input(copies[node], node.name, tensor) for node, tensor in pairs]


def eliminate_dead(module: fx.GraphModule, *, draws_later: bool = False) -> None:
    """Erase the operators that nobody reads, last ones first, so that readers go before.

    With `draws_later`, random operators stay: a graph that runs after this one draws after them.
    """
    for node in reversed(list(module.graph.nodes)):
        if node.op != "call_function":
            continue
        draws = draws_random(node, module)
        if not node.users and not has_effect(node) and not (draws and draws_later):
            module.graph.erase_node(node)
            continue
        if is_checkpoint(node) and not (draws and draws_later):
            prune_body(module, node)
        draws_later |= draws
    for node in list(module.graph.find_nodes(op="get_attr")):
        if not node.users:
            module.graph.erase_node(node)


def has_effect(node: fx.Node) -> bool:
    return node.op == "call_function" and node.is_impure(impure_random=False)


def draws_random(node: fx.Node, module: fx.GraphModule) -> bool:
    if isinstance(node.target, _torch.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    if node.op != "call_function":
        return False
    references = [used for used in node.all_input_nodes if used.op == "get_attr"]
    bodies = [attribute(module, str(reference.target)) for reference in references]
    return any(getattr(body, "draws_random", False) for body in bodies) or any(
        draws_random(inner, body)
        for body in bodies
        if isinstance(body, fx.GraphModule)
        for inner in body.graph.nodes
    )
