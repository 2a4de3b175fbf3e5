"""Functions that bring their own derivative, in a training step under a checkpoint.

    python examples/11_custom_rules.py

`custom_vjp`: weights are rounded to four bits in the forward pass. The gradient passes straight
through the rounding, whose true derivative is zero. `custom_jvp`: log(1 + exp(x)) whose derivative
does not overflow. Both rules apply under every transformation: `grad`, `vmap`, second derivatives,
in graphs, and in a checkpoint whose policy sees the operators inside of them.
"""

import argparse

import torch

import torchremat as tr


@tr.custom_vjp
def rounded(w, num_bits):
    """`w` on a grid of `2**num_bits` values between its least and its largest."""
    low, high = w.min(), w.max()
    step = (high - low) / (2**num_bits - 1)
    return torch.round((w - low) / step) * step + low


rounded.defvjp(
    lambda w, num_bits: (rounded(w, num_bits), None),
    lambda _, cotangent: (cotangent, None),
)


@tr.custom_jvp
def softplus(x):
    """log(1 + exp(x))."""
    return torch.where(x > 30, x, torch.log1p(torch.exp(x)))


@softplus.defjvp
def _softplus_rule(primals, tangents):
    (x,), (dx,) = primals, tangents
    return softplus(x), torch.sigmoid(x) * dx


def loss(params, x, y, num_bits):
    hidden = softplus(x @ rounded(params["w1"], num_bits))
    return (hidden @ rounded(params["w2"], num_bits) - y).square().mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    torch.manual_seed(0)
    params = {"w1": torch.randn(8, 64) / 3, "w2": torch.randn(64, 1) / 8}
    x = torch.randn(128, 8)
    y = torch.sin(x.sum(1, keepdim=True))

    step = tr.value_and_grad(tr.checkpoint(loss, policy="dots", static_argnums=3))
    losses = []
    for _ in range(options.steps):
        value, gradients = step(params, x, y, options.bits)
        params = {name: p - 0.005 * gradients[name] for name, p in params.items()}
        losses.append(value.item())
    print(f"loss with weights of {options.bits} bits: {losses[0]:.3f} -> {losses[-1]:.3f}")

    at = torch.tensor([-200.0, 0.0, 200.0])
    print("softplus'  =", tr.grad(lambda x: softplus(x).sum())(at).tolist())
    print("softplus'' =", torch.func.vmap(tr.grad(tr.grad(softplus)))(at).tolist())
    print(tr.make_graph(loss, static_argnums=3)(params, x, y, options.bits))


if __name__ == "__main__":
    main()
