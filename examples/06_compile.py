"""A model under `torch.compile`, with a policy that decides which values are saved.

    python examples/06_compile.py --policy dots
    python examples/06_compile.py --policy budget:60% --codegen inductor

The script prints the values that each policy saves, in eager mode and compiled: they are the same.
"""

import argparse

import torch
from torch import nn

import torchremat as tr


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        hidden = tr.checkpoint_name(nn.functional.gelu(self.up(self.norm(x))), "hidden")
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])

    def forward(self, x):
        return self.blocks(x).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", nargs="+", default=["none", "names:hidden", "budget:60%"])
    parser.add_argument("--codegen", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()

    torch.manual_seed(0)
    model, x = Model(options.layers, options.width), torch.randn(16, 64, options.width)
    plain = torch.autograd.grad(model(x), [*model.parameters()])
    for policy in options.policy:
        reports: list = []
        settings = {"policy": policy, "codegen": options.codegen, "report": reports.append}
        compiled = torch.compile(model, backend="torchremat", options=settings)
        grads = torch.autograd.grad(compiled(x), [*model.parameters()])
        error = max(float((a - b).abs().max()) for a, b in zip(grads, plain, strict=True))
        eager = tr.explain(model, x, policy=policy)
        (report,) = reports
        print(f"{policy}: keeps {report.total} B compiled, {eager.total} B in eager mode; ", end="")
        print(f"gradients differ by {error:.1e}")
        torch.compiler.reset()


if __name__ == "__main__":
    main()
