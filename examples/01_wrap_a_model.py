"""A Transformer whose layers run under checkpoints: fewer saved bytes, and nothing else changes.

python examples/01_wrap_a_model.py
"""

import copy

import torch
from torch import nn

import torchremat as tr


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a step, with dropout masks that depend on the seed alone."""
    torch.manual_seed(1)
    return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))


def main() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    plain = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    x = torch.randn(4, 16, 32)
    expected = gradients(plain, x)
    print(f"plain: {tr.explain(plain, x).total} B held")
    for policy, select in [("full", "layers.*"), ("dots", "layers.*"), ("full", "first:2")]:
        model = tr.nn.wrap(copy.deepcopy(plain), policy, select=select)
        same = all(map(torch.equal, gradients(model, x), expected))
        names = list(model.state_dict()) == list(plain.state_dict())
        print(
            f"{policy} on {select}: {tr.explain(model, x).total} B held, "
            f"gradients bit-equal: {same}, state_dict as before: {names}"
        )


if __name__ == "__main__":
    main()
