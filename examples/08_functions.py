"""A checkpointed function under `torch.func`: gradients of each example, and a Hessian.

python examples/08_functions.py
"""

import torch

import torchremat as tr


def plain(params, x, y):
    hidden = tr.checkpoint_name(torch.tanh(x @ params["w1"]), "hidden")
    return (hidden @ params["w2"] - y).square().mean()


def main() -> None:
    torch.manual_seed(0)
    params = {"w1": torch.randn(4, 8).double(), "w2": torch.randn(8, 1).double()}
    x, y = torch.randn(16, 4).double(), torch.randn(16, 1).double()
    loss = tr.checkpoint(plain, policy="names:hidden")
    print("kept:")
    tr.print_saved_residuals(loss, params, x, y)
    for name, of in {
        "gradients of each example": lambda f: torch.func.vmap(torch.func.grad(f), (None, 0, 0)),
        "Hessian": torch.func.hessian,
        "JAX's spelling, tr.jacrev": tr.jacrev,
    }.items():
        torch.testing.assert_close(of(loss)(params, x, y), of(plain)(params, x, y))
        print(f"{name}: as without a checkpoint")


if __name__ == "__main__":
    main()
