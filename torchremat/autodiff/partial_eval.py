"""Partial evaluation: the part of a graph that runs now, the part that runs later, the residuals.

A graph, some of whose inputs are not known yet, is split in two. With x known, ct unknown, and a
rule by which products of matrices may be saved and the rest not:

    y = mm(x, w)                known   y = mm(x, w); z = sin(y)        -> z, y
    z = sin(y)                  staged  c = cos(y); g = mul(ct, c)      -> g
    c = cos(y)                  saved   y
    g = mul(ct, c)

One rule serves reverse mode (the cotangents are unknown), linearisation (the tangents are) and
nested checkpoints. It is that of `partial_eval_jaxpr_custom` in JAX: a known value that a staged
operator reads is saved if it may be, else recomputed from saved values.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from torchremat.graph.nodes import is_view

MaySave = Callable[[fx.Node], bool]
"""Whether the value of a known operator may be saved."""


@dataclass(frozen=True)
class Residuals:
    """The values of the known half that the staged half needs.

    `values` are saved, `inputs` are known inputs of the graph, which the caller has anyway, and
    `recomputed` are known values that the staged half recomputes.
    """

    values: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    recomputed: frozenset[fx.Node]


def find_residuals(
    wanted: Iterable[fx.Node], is_known: Callable[[fx.Node], bool], may_save: MaySave
) -> Residuals:
    """Find the values that the staged half needs to compute `wanted`, walking back from it.

    A view is never saved for its own sake: its base is. `may_save` decides only on values that an
    operator computes.
    """
    saved: set[fx.Node] = set()
    inputs: set[fx.Node] = set()
    recomputed: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_known(node):
            if node.op == "placeholder":
                inputs.add(node)
                continue
            if node.op == "call_function":
                if not is_view(node) and may_save(node):
                    saved.add(node)
                    continue
                recomputed.add(node)
        stack.extend(node.all_input_nodes)
    order = {node: i for i, node in enumerate(_graph_of(seen))}
    return Residuals(
        tuple(sorted(saved, key=order.__getitem__)),
        tuple(sorted(inputs, key=order.__getitem__)),
        frozenset(recomputed),
    )


def _graph_of(nodes: Iterable[fx.Node]) -> Iterable[fx.Node]:
    for node in nodes:
        return node.graph.nodes
    return ()
