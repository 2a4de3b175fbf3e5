"""Modules under `checkpoint`: `wrap`, `unwrap`, what they kept, `report`, and `split_budget`."""

from torchremat.nn.budgets import BudgetSplit, LayerShare, split_budget
from torchremat.nn.wrap import report, unwrap, wrap
from torchremat.remat.select import select_modules

__all__ = [
    "BudgetSplit",
    "LayerShare",
    "report",
    "select_modules",
    "split_budget",
    "unwrap",
    "wrap",
]
