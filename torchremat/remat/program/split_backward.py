"""The graph of a backward pass cut in two: the gradients of some inputs, then those of others."""

from dataclasses import dataclass

from torchremat.graph.nodes import ancestors, results_of
from torchremat.graph.slicing import slice_graph
from torchremat.remat.program.compiled_graph import CompiledGraph
from torchremat.remat.program.program import Program, cache_by_program
from torchremat.remat.program.region import Mask


@dataclass(frozen=True, eq=False)
class SplitBackward:
    """A backward pass cut in two.

    Both parts take the inputs of the whole, the second after `num_carried` results of the first.
    Each returns the gradients of the whole, `None` for those of the other part.
    """

    first: CompiledGraph
    second: CompiledGraph
    num_carried: int


@cache_by_program
def split_backward(
    program: Program,
    outputs_with_cotangent: Mask,
    inputs_needing_grad: Mask,
    first: Mask,
    *,
    with_states: bool,
) -> SplitBackward:
    """`program.backward` in two parts: the gradients of the inputs `first` before the others."""
    whole = program.backward(outputs_with_cotangent, inputs_needing_grad, with_states=with_states)
    module = whole.module
    inputs = module.graph.find_nodes(op="placeholder")
    gradients = results_of(module)
    first = tuple(program.by_slot(first))
    early = [g if now else None for g, now in zip(gradients, first, strict=True)]
    late = [None if now else g for g, now in zip(gradients, first, strict=True)]
    done = ancestors(early)
    carried = list(
        dict.fromkeys(
            value
            for node in (ancestors(late) - done)
            for value in node.all_input_nodes
            if value in done and value.op not in ("placeholder", "get_attr")
        )
    )
    carried += [g for g in late if g in done and g not in carried and g.op != "placeholder"]
    return SplitBackward(
        CompiledGraph.of(
            slice_graph(module, inputs, [*early, *carried]), "backward_first", program
        ),
        CompiledGraph.of(
            slice_graph(module, [*carried, *inputs], late), "backward_second", program
        ),
        len(carried),
    )
