"""The policy of what is traced for speed alone: `jit`, and calls of `vmap` that repeat."""

from dataclasses import dataclass

from torchremat.remat.policies import EverythingSaveable


@dataclass(frozen=True, repr=False)
class PlainAutograd(EverythingSaveable):
    """What plain autograd keeps; a checkpoint inside keeps what its own policy says."""

    function = "plain_autograd"
    looks_inside = False


plain_autograd = PlainAutograd()
