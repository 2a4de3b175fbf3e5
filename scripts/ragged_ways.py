"""The ways that `bench_ragged.py` compares: piles, padding and nested tensors, of each task."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import torchremat as tr
from torchremat.batching import Pile, pile_axis
from torchremat.kernels.segments.segments import offsets_of

HEADS, DIM = 8, 64
LAYER_WIDTH = 256
CHANNELS = 64
"""Numbers in a row of softmax and sum."""


@dataclass(frozen=True)
class Batch:
    """Sequences of seeded lengths: where they lie in the packed and in the padded form."""

    lengths: Tensor
    longest: int
    dtype: torch.dtype

    @staticmethod
    def of(num: int, longest: int, device: torch.device, dtype: torch.dtype) -> "Batch":
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, longest + 1, (num,), generator=generator)
        return Batch(lengths.to(device), int(lengths.max()), dtype)

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    @property
    def total(self) -> int:
        return int(self.lengths.sum())

    @property
    def offsets(self) -> Tensor:
        return offsets_of(self.lengths)

    @property
    def is_there(self) -> Tensor:
        """`[num, longest]`: which rows of the padded form are some."""
        return torch.arange(self.longest, device=self.device) < self.lengths[:, None]

    def rand(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(self.device, self.dtype)

    def pad(self, packed: Tensor) -> Tensor:
        out = packed.new_zeros((len(self.lengths), self.longest, *packed.shape[1:]))
        out[self.is_there] = packed
        return out


@dataclass(frozen=True)
class Run:
    """A function, its arguments, the cotangent, and how its results are packed."""

    function: Callable[..., Tensor]
    args: Sequence[Tensor]
    cotangent: Tensor
    unpad: Callable[[Tensor], Tensor]

    def step(self) -> tuple[Tensor, ...]:
        """Output and gradients."""
        out = self.function(*self.args)
        return out.detach(), *torch.autograd.grad(out, self.args, self.cotangent)

    def packed(self) -> list[Tensor]:
        return [self.unpad(x) for x in self.step()]


Way = Callable[[Batch], Run]


def ways(
    rows: Callable[[Batch], tuple[list[Tensor], list[Tensor], Tensor]],
    ours: Callable[..., Callable[..., Tensor]],
    padded: Callable[..., Callable[..., Tensor]],
    nested: Callable[..., Callable[..., Tensor]],
) -> dict[str, Way]:
    """The three ways of a task.

    `rows` returns packed rows, weights, and a cotangent, of rows or of sequences. The others take
    the batch and return the function of rows and weights. The function of `nested` takes packed
    rows too, and makes nested tensors of them without a copy.
    """

    def of_packed(make: Callable[..., Callable[..., Tensor]]) -> Way:
        def way(batch: Batch) -> Run:
            args, weights, cotangent = rows(batch)
            leaves = [x.clone().requires_grad_() for x in (*args, *weights)]
            return Run(make(batch), leaves, cotangent, lambda x: x)

        return way

    def of_padded(batch: Batch) -> Run:
        args, weights, cotangent = rows(batch)
        leaves = [x.clone().requires_grad_() for x in (*map(batch.pad, args), *weights)]
        if cotangent.shape[0] == batch.total:
            cotangent = batch.pad(cotangent)
        shape = (len(batch.lengths), batch.longest)
        return Run(
            padded(batch),
            leaves,
            cotangent,
            lambda x: x[batch.is_there] if x.shape[:2] == shape else x,
        )

    return {"ours": of_packed(ours), "padding": of_padded, "torch.nested": of_packed(nested)}


def mapped(
    function: Callable[..., Tensor], num_rows: int, *, gives_rows: bool = True
) -> Callable[[Batch], Callable[..., Tensor]]:
    """Ours: `function`, of the rows of one sequence and of weights, mapped over piles.

    The first `num_rows` arguments are rows.
    """

    def make(batch: Batch) -> Callable[..., Tensor]:
        bound = 1 << (batch.longest - 1).bit_length()

        def run(*args: Tensor) -> Tensor:
            piles = [Pile.of(x, [batch.lengths], [0], x.shape, [bound]) for x in args[:num_rows]]
            axes = (*[pile_axis] * num_rows, *[None] * (len(args) - num_rows))
            out = tr.vmap(function, axes, pile_axis if gives_rows else 0)(*piles, *args[num_rows:])
            return out.data if gives_rows else out

        return run

    return make


def nest(batch: Batch) -> Callable[[Tensor], Tensor]:
    offsets, longest = batch.offsets, batch.longest
    return lambda x: torch.nested.nested_tensor_from_jagged(
        x, offsets, min_seqlen=1, max_seqlen=longest
    )


# --- softmax and sum -----------------------------------------------------------------------------


def channels(batch: Batch) -> tuple[list[Tensor], list[Tensor], Tensor]:
    x, cotangent = (batch.rand(batch.total, CHANNELS, seed=n) for n in (1, 2))
    return [x], [], cotangent


def channels_to_sums(batch: Batch) -> tuple[list[Tensor], list[Tensor], Tensor]:
    return channels(batch)[0], [], batch.rand(len(batch.lengths), CHANNELS, seed=2)


def softmax_of_one(x: Tensor) -> Tensor:
    return x.softmax(0)


def softmax_padded(batch: Batch) -> Callable[[Tensor], Tensor]:
    is_missing = ~batch.is_there[..., None]
    return lambda x: x.masked_fill(is_missing, -torch.inf).softmax(1)


def softmax_nested(batch: Batch) -> Callable[[Tensor], Tensor]:
    nested = nest(batch)
    return lambda x: torch.softmax(nested(x), 1).values()


def sum_of_one(x: Tensor) -> Tensor:
    return x.sum(0)


def sum_padded(batch: Batch) -> Callable[[Tensor], Tensor]:
    is_missing = ~batch.is_there[..., None]
    return lambda x: x.masked_fill(is_missing, 0).sum(1)


def sum_nested(batch: Batch) -> Callable[[Tensor], Tensor]:
    nested = nest(batch)
    return lambda x: nested(x).sum(1)


# --- attention -----------------------------------------------------------------------------------


def heads(batch: Batch) -> tuple[list[Tensor], list[Tensor], Tensor]:
    *rows, cotangent = (batch.rand(batch.total, HEADS, DIM, seed=n) for n in range(4))
    return rows, [], cotangent


def attention_of_one(*args: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in args)
    return F.scaled_dot_product_attention(q, k, v).transpose(0, 1)


def attention_padded(batch: Batch) -> Callable[..., Tensor]:
    mask = batch.is_there[:, None, None, :]

    def attend(*args: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in args)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return attend


def attention_nested(batch: Batch) -> Callable[..., Tensor]:
    nested = nest(batch)

    def attend(*args: Tensor) -> Tensor:
        q, k, v = (nested(x).transpose(1, 2) for x in args)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()

    return attend


# --- a layer -------------------------------------------------------------------------------------


def layer_inputs(batch: Batch) -> tuple[list[Tensor], list[Tensor], Tensor]:
    x, cotangent = (batch.rand(batch.total, LAYER_WIDTH, seed=n) for n in (1, 2))
    width = LAYER_WIDTH
    shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    weights = [batch.rand(*shape, seed=5 + i) / shape[1] ** 0.5 for i, shape in enumerate(shapes)]
    return [x], weights, cotangent


def split_after(normed: Tensor, qkv: Tensor) -> list[Tensor]:
    return list(F.linear(normed, qkv).chunk(3, -1))


def split_before(normed: Tensor, qkv: Tensor) -> list[Tensor]:
    """For `torch.nested`, whose attention takes no part of a row."""
    return [F.linear(normed, weight) for weight in qkv.chunk(3)]


def layer_of(
    attend: Callable[..., Tensor],
    split: Callable[[Tensor, Tensor], list[Tensor]] = split_after,
    finish: Callable[[Tensor], Tensor] = lambda x: x,
) -> Callable[..., Tensor]:
    """Layer norm, attention, layer norm and MLP, on the last dimension."""

    def layer(x: Tensor, qkv: Tensor, proj: Tensor, up: Tensor, down: Tensor) -> Tensor:
        normed = F.layer_norm(x, (LAYER_WIDTH,))
        heads = (y.unflatten(-1, (LAYER_WIDTH // DIM, DIM)) for y in split(normed, qkv))
        x = x + F.linear(attend(*heads).flatten(-2), proj)
        hidden = F.gelu(F.linear(F.layer_norm(x, (LAYER_WIDTH,)), up))
        return finish(x + F.linear(hidden, down))

    return layer


def layer_nested(batch: Batch) -> Callable[..., Tensor]:
    nested = nest(batch)

    def attend(*args: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in args)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    layer = layer_of(attend, split_before, lambda x: x.values())
    return lambda x, *weights: layer(nested(x), *weights)


_layer_of_one = layer_of(attention_of_one)
TASKS: dict[str, dict[str, Way]] = {
    "softmax": ways(channels, mapped(softmax_of_one, 1), softmax_padded, softmax_nested),
    "sum": ways(channels_to_sums, mapped(sum_of_one, 1, gives_rows=False), sum_padded, sum_nested),
    "attention": ways(heads, mapped(attention_of_one, 3), attention_padded, attention_nested),
    "layer": ways(
        layer_inputs,
        mapped(_layer_of_one, 1),
        lambda batch: layer_of(attention_padded(batch)),
        layer_nested,
    ),
}
