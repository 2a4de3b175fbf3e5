"""Graphs in the operators that inductor compiles well.

A graph is cut in the operators that policies know: `gelu`, `native_layer_norm`. Inductor wants them
broken into arithmetic, which it fuses.
"""

from typing import Any

import torch
from torch import fx

from torchremat import _torch
from torchremat.compile.dynamo.scheduled_joint import merge_within_runs


def find_random_decompositions() -> dict[Any, Any]:
    """How inductor breaks operators that draw random numbers: to be done before a graph is cut.

    A number is then a function of a seed, which is what the forward pass keeps.
    """
    table = _torch.inductor_decompositions()
    seeded = torch.Tag.nondeterministic_seeded
    return {op: rule for op, rule in table.items() if seeded in getattr(op, "tags", ())}


def decompose_for_inductor(module: fx.GraphModule) -> fx.GraphModule:
    """`module` in inductor's operators, with the same inputs by the same names and same outputs."""
    old = module.graph.find_nodes(op="placeholder")
    (old_output,) = module.graph.find_nodes(op="output")
    fakes = [node.meta["val"] for node in old]
    traced = _torch.decompose(module, fakes, _torch.inductor_decompositions())
    _torch.simplify_for_inductor(traced, merge_within_runs)
    new = traced.graph.find_nodes(op="placeholder")
    taken = {node.name for node in old}
    for node in traced.graph.nodes:
        if node.op != "placeholder" and node.name in taken:
            node.name = f"{node.name}_again"
    for before, after in zip(old, new, strict=True):
        after.name = after.target = before.name
        after.meta = dict(before.meta)
    (output,) = traced.graph.find_nodes(op="output")
    output.meta = dict(old_output.meta)
    traced.meta.update(module.meta)
    traced.recompile()
    return traced
