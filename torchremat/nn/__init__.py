"""Whole modules under `checkpoint`: `wrap`, `unwrap`, `report`, `split_budget`, `fit`.
A wrapped module keeps its class, its names and its `state_dict`. It uses plans and compilers,
and knows no trainer. Begin with `wrap.py`.
"""

from torchremat.nn.fit import Fit, fit
from torchremat.nn.split_budget import BudgetSplit, LayerShare, split_budget
from torchremat.nn.wrap import report, unwrap, wrap
from torchremat.policies.module_selection import select_modules

__all__ = [
    "BudgetSplit",
    "Fit",
    "LayerShare",
    "fit",
    "report",
    "select_modules",
    "split_budget",
    "unwrap",
    "wrap",
]


def __dir__() -> list[str]:
    return sorted(__all__)
