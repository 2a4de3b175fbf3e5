"""Functions and graphs mapped over an axis: `vmap`, its rules, collectives, ragged batches.

The counterpart of `jax.interpreters.batching`. It uses `remat` for checkpoints inside a mapped
function, and no plan. Begin with `vmap.py`; a rule for an operator stands in
`batching_rules.py`.
"""

from torchremat.batching.axis_positions import (
    bdim_at_front,
    broadcast,
    matchaxis,
    moveaxis,
    not_mapped,
)
from torchremat.batching.batch_graph import batch_graph
from torchremat.batching.batching_rules import (
    axis_primitive_batchers,
    defbroadcasting,
    defreducer,
    defvectorized,
    primitive_batchers,
    spmd_axis_primitive_batchers,
)
from torchremat.batching.collectives.exchange import (
    all_gather,
    all_to_all,
    ppermute,
    pshuffle,
    psum_scatter,
)
from torchremat.batching.collectives.reduce import axis_index, axis_size, pmax, pmean, pmin, psum
from torchremat.batching.custom_vmap import custom_vmap, sequential_vmap
from torchremat.batching.ragged.pile import ConcatAxis, Pile, PileTy, pile_axis
from torchremat.batching.segment_sum import segment_sum
from torchremat.batching.sharding import with_sharding_constraint
from torchremat.batching.vmap import vmap
from torchremat.batching.vmappable import is_vmappable, register_vmappable, unregister_vmappable
from torchremat.batching.vtile import vtile

__all__ = [
    "ConcatAxis",
    "Pile",
    "PileTy",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_primitive_batchers",
    "axis_size",
    "batch_graph",
    "bdim_at_front",
    "broadcast",
    "custom_vmap",
    "defbroadcasting",
    "defreducer",
    "defvectorized",
    "is_vmappable",
    "matchaxis",
    "moveaxis",
    "not_mapped",
    "pile_axis",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "primitive_batchers",
    "pshuffle",
    "psum",
    "psum_scatter",
    "register_vmappable",
    "segment_sum",
    "sequential_vmap",
    "spmd_axis_primitive_batchers",
    "unregister_vmappable",
    "vmap",
    "vtile",
    "with_sharding_constraint",
]


def __dir__() -> list[str]:
    return sorted(__all__)
