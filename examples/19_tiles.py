"""Train on a long sequence under a budget that nothing but tiles can meet.

The logits of a long sequence are most of what a step makes, and no choice of what to save changes
that. With tiles they are never whole: a few rows at a time go through the head, the loss and back.

    python examples/19_tiles.py
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

import torchremat as tr
from torchremat.measure import LiveBytes

VOCABULARY, WIDTH, LENGTH = 8192, 128, 1024


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(gelu(self.up(x)))
        return cross_entropy(self.head(x[:-1]), tokens[1:])


def train(policy: str | None) -> tuple[list[float], int]:
    """Take three steps; the losses, and the peak of the last step in bytes."""
    torch.manual_seed(0)
    model, tokens = Model(), torch.arange(LENGTH) * 31 % VOCABULARY
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if policy is not None:
        tr.nn.wrap(model, policy)
    losses = []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        with LiveBytes() as memory:
            loss = model(tokens)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if policy is not None:
        tiled = [row.name for row in tr.nn.report(model) if row.decision == "tiled"]
        print(f"  never whole: {', '.join(tiled)}")
    return losses, memory.peak


def main() -> None:
    plain, peak = train(None)
    print(f"plain: losses {plain[0]:.4f} -> {plain[-1]:.4f}, peak {peak / 2**20:.1f} MiB")
    try:
        train("budget:30%")
    except tr.errors.BudgetError as error:
        print(f"budget:30% is refused: {error.least_bytes / peak:.0%} of it at least")
    tiled, tiled_peak = train("budget:30%+tile")
    print(
        f"budget:30%+tile: losses {tiled[0]:.4f} -> {tiled[-1]:.4f}, peak {tiled_peak / peak:.0%}"
    )
    difference = max(abs(a - b) for a, b in zip(plain, tiled, strict=True))
    print(f"losses differ by {difference:.0e} at most")


if __name__ == "__main__":
    main()
