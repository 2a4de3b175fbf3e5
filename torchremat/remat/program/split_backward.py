"""The graph of a backward pass, cut in two: the gradients of some inputs, then those of others."""

from dataclasses import dataclass

from torchremat.graph.nodes import ancestors, results_of
from torchremat.graph.slicing import slice_graph
from torchremat.remat.program.compiled_graph import Compiled
from torchremat.remat.program.region import Mask


@dataclass(frozen=True, eq=False)
class TwoParts:
    """A backward pass cut in two.

    Both take what the whole takes, the second what the first has `handed` on before that. They give
    the gradients of the whole, `None` for those of the other part.
    """

    first: Compiled
    second: Compiled
    num_handed: int

    @classmethod
    def of(cls, whole: Compiled, first: Mask, program: object) -> "TwoParts":
        """The parts of `whole`, the first for the gradients of the inputs `first`."""
        module = whole.module
        inputs = module.graph.find_nodes(op="placeholder")
        gradients = results_of(module)
        early = [g if now else None for g, now in zip(gradients, first, strict=True)]
        late = [None if now else g for g, now in zip(gradients, first, strict=True)]
        done = ancestors(early)
        handed = list(
            dict.fromkeys(
                value
                for node in (ancestors(late) - done)
                for value in node.all_input_nodes
                if value in done and value.op not in ("placeholder", "get_attr")
            )
        )
        handed += [g for g in late if g in done and g not in handed and g.op != "placeholder"]
        return cls(
            Compiled.of(slice_graph(module, inputs, [*early, *handed]), "backward_first", program),
            Compiled.of(slice_graph(module, [*handed, *inputs], late), "backward_second", program),
            len(handed),
        )
