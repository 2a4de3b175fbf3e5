"""Plans: what is saved, recomputed or offloaded so that a step fits in so many bytes.

A traced step becomes numbers, a solver finds a schedule, and a policy hands it to the
checkpoint. It uses `remat` and the rooms below it. Begin with `api.py`, then `planner.py` and
`solver.py`.

>>> import torch
>>> def f(x, w):
...     for _ in range(6):
...         x = torch.tanh(x @ w)
...     return x.sum()
>>> x, w = torch.ones(256, 64), torch.ones(64, 64, requires_grad=True)
>>> found = plan(f, x, w, budget="60%")
>>> found.peak_bytes <= 0.6 * found.baseline.peak_bytes
True
"""

from torchremat.autodiff.tiles.tile_joint import Tiling
from torchremat.planning import cost_model
from torchremat.planning.api import pareto, plan
from torchremat.planning.cost_model import CostModel
from torchremat.planning.estimate import Estimate, estimate
from torchremat.planning.memory.simulate import simulate
from torchremat.planning.memory.timeline import Timeline
from torchremat.planning.plan import Figures, Pareto, ParetoPoint, Plan

__all__ = [
    "CostModel",
    "Estimate",
    "Figures",
    "Pareto",
    "ParetoPoint",
    "Plan",
    "Tiling",
    "Timeline",
    "cost_model",
    "estimate",
    "pareto",
    "plan",
    "simulate",
]


def __dir__() -> list[str]:
    return sorted(__all__)
