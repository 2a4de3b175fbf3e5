"""Examples that communicate: named axes, in a contrastive loss and in a batch norm.

    python examples/12_named_axes.py
    python examples/12_named_axes.py --batch 64 --policy none

The model is written for one example. It reaches the other examples by the name of their axis.
`pmean` computes the statistics of the batch, and `all_gather` collects the examples to tell it
apart from. The script prints the values that the checkpoint of an example saves. It also prints how
far loss and gradients are from those of the same model written for a batch.
"""

import argparse

import torch
from torch.nn import functional as F

import torchremat as tr


def normalised(x):
    """Batch norm, of one example."""
    mean = tr.pmean(x, "batch")
    variance = tr.pmean((x - mean).square(), "batch")
    return (x - mean) * torch.rsqrt(variance + 1e-5)


def encode(weights, x):
    first, second = weights
    return F.normalize(torch.relu(normalised(x @ first)) @ second, dim=-1)


def loss_of_example(weights, image, text, policy):
    """How well the image of one example picks its text out of all in the batch."""
    encoder = tr.checkpoint(encode, policy=policy)
    image, text = encoder(weights[0], image), encoder(weights[1], text)
    scores = tr.all_gather(text, "batch") @ image / 0.1
    return torch.logsumexp(scores, 0) - (text @ image) / 0.1


def loss(weights, images, texts, policy):
    mapped = tr.vmap(
        lambda image, text: tr.pmean(loss_of_example(weights, image, text, policy), "batch"),
        out_axes=None,
        axis_name="batch",
    )
    return mapped(images, texts)


def loss_of_batch(weights, images, texts):
    """The same, written for a batch."""

    def encode_all(weights, x):
        first, second = weights
        hidden = F.batch_norm(x @ first, None, None, training=True)
        return F.normalize(torch.relu(hidden) @ second, dim=-1)

    images, texts = encode_all(weights[0], images), encode_all(weights[1], texts)
    return F.cross_entropy(images @ texts.mT / 0.1, torch.arange(len(images)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", nargs="+", default=["full", "dots", "ops:psum"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()

    torch.manual_seed(0)
    width = options.width
    weights = [
        [torch.randn(width, width, dtype=torch.double, requires_grad=True) for _ in range(2)]
        for _ in range(2)
    ]
    images, texts = torch.randn(2, options.batch, width, dtype=torch.double)
    flat = [w for pair in weights for w in pair]
    plain = loss_of_batch(weights, images, texts)
    plain_grads = torch.autograd.grad(plain, flat)
    for policy in options.policy:
        value = loss(weights, images, texts, policy)
        grads = torch.autograd.grad(value, flat)
        errors = [(a - b).abs().max() for a, b in zip(grads, plain_grads, strict=True)]
        print(f"{policy}: loss {value:.6f}, off by {abs(value - plain):.1e}; ", end="")
        print(f"gradients differ by at most {max(errors):.1e}")

    def keeps(image):
        residuals = tr.saved_residuals(tr.checkpoint(encode, policy="ops:psum"), weights[0], image)
        kept.extend(r for r in residuals if "argument" not in r.source)
        return image

    kept: list = []
    tr.vmap(keeps, axis_name="batch")(images)
    print("Under ops:psum an example keeps, besides its arguments:")
    for residual in kept:
        print(f"  {residual}")


if __name__ == "__main__":
    main()
