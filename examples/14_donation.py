"""A training step that updates parameters and momenta in the memory they already have.

    python examples/14_donation.py --backend eager

`jit(step, donate_argnums=(0, 1))` promises that the caller is done with the first two arguments:
their storage becomes that of the outputs. Keeping an old reference is an error that says where it
went, not stale memory.
"""

import argparse

import torch

import torchremat as tr
from torchremat.errors import DonationError


def loss(params, x, y):
    hidden = torch.tanh(x @ params["w1"])
    return (hidden @ params["w2"] - y).square().mean()


def step(params, momenta, grads):
    momenta = {name: 0.9 * momenta[name] + grads[name] for name in params}
    return {name: params[name] - 0.1 * momenta[name] for name in params}, momenta


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(0)
    params = {"w1": torch.randn(16, 64) / 4, "w2": torch.randn(64, 1) / 8}
    momenta = {name: torch.zeros_like(p) for name, p in params.items()}
    x = torch.randn(128, 16)
    y = torch.sin(x.sum(1, keepdim=True))

    update = tr.jit(step, donate_argnums=(0, 1), backend=options.backend)
    gradients = torch.func.grad(loss)
    where = {name: p.data_ptr() for name, p in params.items()}
    before = loss(params, x, y).item()
    for _ in range(options.steps):
        old = params
        params, momenta = update(params, momenta, gradients(params, x, y))
    after = loss(params, x, y).item()

    print(f"loss {before:.3f} -> {after:.3f}")
    print("same memory:", all(p.data_ptr() == where[name] for name, p in params.items()))
    print("the old parameters:", old["w2"])
    try:
        old["w2"].sum()
    except DonationError as error:
        print(f"using them: {error}")


if __name__ == "__main__":
    main()
