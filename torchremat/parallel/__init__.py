"""Several devices, of one process and of many."""

from torchremat.parallel.agreed_plan import agreed_plan as agreed_plan
from torchremat.parallel.mesh_axes import mesh_axes as mesh_axes
from torchremat.parallel.pmap import pmap as pmap
