"""Memory did not drop: the report lists the saved values, with line and reason, and compares runs.

python examples/10_debug_with_the_report.py
"""

import torch
from torch import Tensor, nn

import torchremat as tr


class Head(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).logsumexp(-1).mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)
        ]
        self.layers = nn.Sequential(*blocks)
        self.head = Head(32, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def main() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(16, 8, 32)
    tr.nn.wrap(model, "full", select="layers.*")
    before = tr.explain(model, x)
    print(before)
    largest = max((row for row in before if row.decision == "saved"), key=lambda row: row.nbytes)
    print(f"\nMost is {largest.name}: {largest.reason}. Wrapped too:\n")
    tr.nn.wrap(model, "full", select="head")
    print(before.diff(tr.explain(model, x)))


if __name__ == "__main__":
    main()
