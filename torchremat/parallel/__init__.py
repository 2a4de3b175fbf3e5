"""Several devices, of one process and of many."""

from torchremat.parallel.mesh import mesh_axes as mesh_axes
from torchremat.parallel.plans import agreed_plan as agreed_plan
from torchremat.parallel.pmap import pmap as pmap
