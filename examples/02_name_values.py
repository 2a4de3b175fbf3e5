"""Names for values, and policies that save named values, in a function and in a model.

python examples/02_name_values.py
"""

import torch
from torch import Tensor, nn

import torchremat as tr


class Block(nn.Module):
    """A gated perceptron, two values of which have names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = tr.checkpoint_name(self.gate(x), "gate")
        up = tr.checkpoint_name(self.up(x), "up")
        return x + self.down(nn.functional.silu(gate) * up)


def main() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(16), Block(16)), torch.randn(8, 16)
    for policy in ("full", "names:up", "names:up,gate", "save_any_names_but_these:up"):
        tr.nn.wrap(model, policy, select=Block)
        model(x).sum().backward()
        report = tr.nn.report(model)
        saved = [row.name for row in report if row.decision == "saved"]
        print(f"{policy}: saved {saved}, {report.total} B")
    print("The first block keeps:")
    tr.print_saved_residuals(model[0], x)


if __name__ == "__main__":
    main()
