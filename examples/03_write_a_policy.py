"""Policies of one's own: a function of an operator, alone and combined with those of the library.

python examples/03_write_a_policy.py
"""

import torch
from torch import nn

import torchremat as tr
from torchremat import checkpoint_policies as policies

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def long_products(op, *avals, **params):
    """Matrix products that sum over at least 64 numbers: the others are cheap to recompute."""
    return op in PRODUCTS and avals[-1].shape[0] >= 64


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 16), nn.GELU(), nn.LayerNorm(16)
    )
    x = torch.randn(32, 16)
    for policy in (
        policies.dots_saveable,
        long_products,
        policies.save_modules("1") | long_products,
        policies.dots_saveable & ~tr.policy("modules:0"),
    ):
        report = tr.explain(model, x, policy=policy)
        saved = [row.name for row in report if row.decision == "saved"]
        print(f"{getattr(policy, '__name__', policy)}: {', '.join(saved)}, {report.total} B")


if __name__ == "__main__":
    main()
