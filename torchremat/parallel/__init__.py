"""Several devices and processes: `pmap`, mesh axes, and one plan for all processes.

`pmap` maps a function over devices; other files let processes agree on one plan. It uses
`batching` and `planning`, and neither imports it. Begin with `pmap.py`.
"""

from torchremat.parallel.agreed_plan import agreed_plan
from torchremat.parallel.mesh_axes import mesh_axes
from torchremat.parallel.pmap import pmap

__all__ = ["agreed_plan", "mesh_axes", "pmap"]


def __dir__() -> list[str]:
    return sorted(__all__)
