"""Graphs in inductor's operators.

Policies decide about `gelu` or `native_layer_norm`. Inductor wants these decomposed into
arithmetic, which it fuses.
"""

from typing import Any

import torch
from torch import fx

from torchremat import _torch
from torchremat.compile.dynamo.scheduled_joint import merge_within_runs
from torchremat.compile.lowering import lower_tile
from torchremat.compile.tile_calls import name_tiles


def find_random_decompositions() -> dict[Any, Any]:
    """Inductor's decompositions of random operators: the forward pass then saves their seed."""
    table = _torch.inductor_decompositions()
    seeded = torch.Tag.nondeterministic_seeded
    return {op: rule for op, rule in table.items() if seeded in getattr(op, "tags", ())}


def decompose_for_inductor(module: fx.GraphModule) -> fx.GraphModule:
    """Trace `module` anew in inductor's operators; inputs keep their names, outputs their order."""
    module = name_tiles(module, lower_tile)
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
