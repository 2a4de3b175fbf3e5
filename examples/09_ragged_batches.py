"""Gradients of each example of a transformer, over sequences of different lengths, unpadded.

    python examples/09_ragged_batches.py

`vmap` over a `Pile` maps the loss of one sequence over many, of lengths 1 to 40, laid end to end.
No number is computed for padding. Its gradient is that of each sequence, as differentially private
training needs it. The blocks are checkpoints, so that each saves few bytes for the backward pass.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import torchremat as tr
from torchremat.batching import Pile, pile_axis

VOCABULARY, WIDTH, HEADS = 50, 32, 4


class Block(nn.Module):
    """Attention and a perceptron over one sequence, `[length, WIDTH]`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """`x` after the block, of the same shape."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = (heads[:, i].transpose(0, 1) for i in range(3))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Two blocks that predict the next token of one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """The mean loss over a sequence: both `[length]`."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x), following)


def main() -> None:
    """Compare the gradients of all sequences at once with those of a loop."""
    torch.manual_seed(0)
    plain = Model()
    model = tr.nn.wrap(copy.deepcopy(plain), "dots", select="blocks.*")
    parameters = dict(model.named_parameters())
    lengths = torch.randint(1, 41, (16,)).tolist()
    tokens = [torch.randint(VOCABULARY, (n,)) for n in lengths]
    following = [torch.randint(VOCABULARY, (n,)) for n in lengths]

    def loss_of(model: Model) -> Callable[..., Tensor]:
        return lambda parameters, *pair: torch.func.functional_call(model, parameters, pair)

    per_example = tr.vmap(tr.grad(loss_of(model)), in_axes=(None, pile_axis, pile_axis))
    found = per_example(parameters, Pile.from_list(tokens), Pile.from_list(following))

    each = torch.func.grad(loss_of(plain))
    looped = [each(parameters, *pair) for pair in zip(tokens, following, strict=True)]
    worst = max(
        (found[name][i] - looped[i][name]).abs().max().item()
        for name in parameters
        for i in range(len(lengths))
    )
    norms = torch.stack([g.flatten(1).square().sum(1) for g in found.values()]).sum(0).sqrt()
    print(f"{len(lengths)} sequences, {sum(lengths)} tokens; padded they would be "
          f"{len(lengths) * max(lengths)}")  # fmt: skip
    print("norms of the gradients:", " ".join(f"{norm:.2f}" for norm in norms.tolist()))
    print(f"greatest difference from a loop: {worst:.1e}")


if __name__ == "__main__":
    main()
