"""The rules that rewrite a joint graph before a policy sees it.

A rule changes operators of the backward pass alone. So a policy decides about the operators that
the user wrote, and saves no more than without it.
"""

from torch import fx

from torchremat.autodiff.rewrites.encodings import encode_saved_values
from torchremat.autodiff.rewrites.loop_invariants import hoist_invariants
from torchremat.autodiff.rewrites.loss_gradient import merge_loss_gradients
from torchremat.autodiff.rewrites.repeated_values import repeat_by_views
from torchremat.graph.slicing import erase_dead


def rewrite_joint(graph: fx.Graph) -> None:
    """Apply the rules to a joint graph in place: nodes of its results stay what they are.

    It is for graphs that run. A derivative of a derivative is traced without them. What no gradient
    needs is erased, so that the graph does not depend on how its cotangents became fewer.
    """
    merge_loss_gradients(graph)
    repeat_by_views(graph)
    erase_dead(graph)
    hoist_invariants(graph)
    encode_saved_values(graph)
