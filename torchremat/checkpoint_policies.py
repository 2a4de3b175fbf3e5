"""The policies that say what `checkpoint` may save: the namespace `torchremat.checkpoint_policies`.

JAX's, with its names (`jax.checkpoint_policies`), and others that PyTorch's users want.

>>> from torchremat import checkpoint_policies as cp
>>> cp.dots_saveable | cp.save_only_these_names("attn")
dots_saveable | save_only_these_names('attn')
"""

from torchremat.planning.budget_policy import memory_budget
from torchremat.planning.from_plan import from_plan
from torchremat.policies.builtin import (
    checkpoint_dots,
    checkpoint_dots_with_no_batch_dims,
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
    recompute_modules,
    recompute_ops,
    save_any_names_but_these,
    save_anything_except_these_names,
    save_from_both_policies,
    save_modules,
    save_only_these_names,
    save_ops,
)
from torchremat.policies.from_selective import from_selective
from torchremat.policies.offload import (
    offload_dot_with_no_batch_dims,
    save_and_offload_only_these_names,
)

__all__ = [
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "from_plan",
    "from_selective",
    "memory_budget",
    "nothing_saveable",
    "offload_dot_with_no_batch_dims",
    "recompute_modules",
    "recompute_ops",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "save_from_both_policies",
    "save_modules",
    "save_only_these_names",
    "save_ops",
]


def __dir__() -> list[str]:
    return sorted(__all__)
