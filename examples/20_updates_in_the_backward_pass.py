"""Train under a budget that the gradients alone exceed.

All gradients are alive at the end of a backward pass. Here each parameter is updated as soon as its
gradient is there. The loop and its results are those of plain PyTorch.

    python examples/20_updates_in_the_backward_pass.py
"""

import torch
from torch import Tensor, nn

import torchremat as tr
from torchremat.measure import LiveBytes, resident_bytes
from torchremat.optim import step_in_backward

WIDTH, DEPTH = 256, 8


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(DEPTH)
    ]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[float, int]:
    """Take three steps; the last loss, and the peak of its step in bytes."""
    for _ in range(3):
        optimizer.zero_grad()
        with LiveBytes() as memory:
            loss = (model(x) - x).square().mean()
            loss.backward()
        optimizer.step()
    return loss.item(), memory.peak


def main() -> None:
    x = torch.randn(16, WIDTH)
    model, optimizer = make()
    plain_loss, plain_peak = train(model, optimizer, x)

    stepped, other = make()
    there = resident_bytes(stepped, other, x)
    plan = tr.plan(stepped, x, budget=there + plain_peak // 2, optimizer=other)
    tr.nn.wrap(stepped, tr.checkpoint_policies.from_plan(plan))
    loss, peak = train(stepped, other, x)

    pairs = zip(model.parameters(), stepped.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    print(f"plain: {plain_peak / 2**10:.0f} KiB; {plan.updates_in_backward} parameters updated in")
    print(f"the backward pass: {peak / 2**10:.0f} KiB, same parameters: {same}")
    assert loss == plain_loss

    wrapped, third = make()
    step_in_backward(third)  # before the first step, so that the budget counts on it
    tr.nn.wrap(wrapped, f"budget:{plain_peak // 2}B")
    loss, peak = train(wrapped, third, x)
    print(f"the same budget as a policy: {peak / 2**10:.0f} KiB")
    assert loss == plain_loss and peak <= plain_peak // 2


if __name__ == "__main__":
    main()
