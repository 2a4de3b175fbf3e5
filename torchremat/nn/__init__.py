"""Modules under `checkpoint`: `wrap`, `unwrap`, what they kept, `report`, and `split_budget`."""

from torchremat.nn.split_budget import BudgetSplit, LayerShare, split_budget
from torchremat.nn.wrap import report, unwrap, wrap
from torchremat.policies.module_selection import select_modules

__all__ = [
    "BudgetSplit",
    "LayerShare",
    "report",
    "select_modules",
    "split_budget",
    "unwrap",
    "wrap",
]
