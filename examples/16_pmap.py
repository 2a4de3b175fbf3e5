"""Data-parallel training with `pmap`: each process has its part of a batch, and the gradients meet.

    torchrun --nproc-per-node 2 examples/16_pmap.py
    python examples/16_pmap.py                         # one process: the same program

A step is written for one device. It reaches the other devices by the name of their axis: `pmean`
averages the gradients, and the statistics of the batch inside the model. The checkpoint round each
layer saves the results of `pmean`, since to recompute them is to communicate twice. Process 0
prints the losses, and how far the trained weights are from those of one process that has the whole
batch.
"""

import argparse
import os

import torch
from torch import distributed

import torchremat as tr


def normalised(x, axis):
    """Batch norm over the examples of all devices."""
    mean = tr.pmean(x.mean(0), axis)
    variance = tr.pmean((x - mean).square().mean(0), axis)
    return (x - mean) * torch.rsqrt(variance + 1e-5)


def loss(weights, x, y):
    @tr.checkpoint
    def layer(w, x):
        return torch.tanh(normalised(x @ w, "devices"))

    for w in weights[:-1]:
        x = layer(w, x)
    return (x @ weights[-1] - y).square().mean()


def step(weights, x, y, rate):
    """One device's share of a step: all of them have the same weights before and after."""
    value, grads = tr.value_and_grad(lambda w: loss(w, x, y))(weights)
    grads = [tr.pmean(g, "devices") for g in grads]
    new = [w - rate * g for w, g in zip(weights, grads, strict=True)]
    return new, tr.pmean(value, "devices")


def trained(update, weights, batches):
    losses = []
    for x, y in batches:
        weights, value = update(weights, x, y, 0.2)
        losses.append(float(value))
    return weights, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32, help="examples of a device")
    options = parser.parse_args()

    if "RANK" in os.environ:  # started by torchrun
        distributed.init_process_group("gloo")
    rank, size = tr.process_index(), tr.process_count()
    torch.manual_seed(0)
    width = options.width
    weights = [torch.randn(width, width, dtype=torch.double) / width**0.5 for _ in range(4)]
    teacher = torch.randn(width, width, dtype=torch.double) / width**0.5
    inputs = torch.randn(options.steps, size, options.batch, width, dtype=torch.double)
    batches = [(x, torch.tanh(x @ teacher)) for x in inputs]

    update = tr.pmap(
        step,
        axis_name="devices",
        in_axes=(None, 0, 0, None),
        out_axes=None,
        static_broadcasted_argnums=3,
    )
    own = [(x[rank : rank + 1], y[rank : rank + 1]) for x, y in batches]
    found, losses = trained(update, weights, own)
    # the same, of one process that has it all
    whole = tr.vmap(step, in_axes=(None, 0, 0, None), out_axes=None, axis_name="devices")
    expected, _ = trained(whole, weights, batches)
    error = max((a - b).abs().max() for a, b in zip(found, expected, strict=True))
    if rank == 0:
        print(f"{size} processes: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(f"weights differ by at most {error:.1e}")
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
