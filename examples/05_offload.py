"""Save the values that the backward pass needs in the host's memory instead of the device's.

The same small model is trained three times. First autograd saves its values, then only results of
matrix products are saved, and last these are offloaded. On a CPU the host's memory is emulated, so
that the same bytes are counted.

    python examples/05_offload.py
    python examples/05_offload.py --layers 12 --width 512 --device cuda
"""

import argparse

import torch
from torch import nn

import torchremat as tr
from torchremat.measure import HeldBytes, host_stats

POLICIES = {
    "saved": None,
    "dots saved": tr.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots offloaded": tr.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    ),
}


def build(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(layers)
    )
    return nn.Sequential(*blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(f"{'':16} {'device KiB':>12} {'host KiB':>10}   losses")
    for name, policy in POLICIES.items():
        model = build(args.layers, args.width).to(args.device)
        if policy is not None:
            tr.nn.wrap(model, policy)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(1024, args.width, device=args.device)
        losses = []
        for _ in range(args.steps):
            optimizer.zero_grad()
            with HeldBytes(model, x) as held:
                loss = model(x).square().mean()
            host = host_stats().nbytes
            loss.backward()
            optimizer.step()
            losses.append(f"{loss.item():.6f}")
        print(f"{name:16} {held.total / 1024:12.0f} {host / 1024:10.0f}   {' '.join(losses)}")


if __name__ == "__main__":
    main()
