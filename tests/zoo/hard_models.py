"""Small models that are hard to checkpoint: each has one thing that plain PyTorch does."""

import random
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

from tests.zoo.zoo_model import Arguments, ZooModel

WIDTH = 32


class Block(nn.Module):
    """A layer of which the models below are made."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


class Stack(nn.Module):
    """Two layers of a class."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(), kind()])

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


# --- decisions by values -------------------------------------------------------------------------


class RoutedByValue(Block):
    """Tokens go to one of two experts, as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.other = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, choice = self.router(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate((super().forward, self.other)):
            hit = (choice == i).nonzero().squeeze(1)
            if len(hit):
                out.index_add_(0, hit, expert(rows[hit]) * weights[hit, None])
        return out.reshape(x.shape)


class DroppedLayer(Block):
    """The layer is left out by a number of PyTorch's generator."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand([]) < 0.3:
            return x
        return super().forward(x)


class DroppedByPython(Block):
    """The same by a generator of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.random.random() < 0.3:
            return x
        return super().forward(x)


class MaskedByNumpy(Block):
    """A mask that NumPy draws."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.from_numpy(np.random.rand(*x.shape) < 0.8)
        return super().forward(x * mask)


class UntilItConverges(Block):
    """A loop that ends by a value: a fixed point."""

    def forward(self, x: Tensor) -> Tensor:
        state = x
        for _ in range(8):
            new = 0.5 * state + 0.1 * super().forward(x).tanh()
            if (new - state).norm() < 0.05 * state.norm():
                break
            state = new
        return state


class Validated(Block):
    """A distribution that checks its arguments, and is drawn from."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        normal = torch.distributions.Normal(hidden, F.softplus(hidden) + 0.1)
        return normal.rsample() + normal.entropy()


class Uniques(Block):
    """Sizes made of values: `unique`, `bincount`, `masked_select`."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        levels, inverse = (x.detach() * 2).round().unique(return_inverse=True)
        counts = torch.bincount(inverse.flatten(), minlength=len(levels)).float()
        positive = hidden.masked_select(hidden > 0)
        return hidden / counts[inverse] + positive.mean()


# --- state ---------------------------------------------------------------------------------------


class Counting(Block):
    """A number and a tensor are set on the module in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.average = 0.9 * self.average + 0.1 * x.detach().reshape(-1, WIDTH).mean(0)
        self.last = x.detach().norm()
        return super().forward(x) * (1 + 0.01 * self.calls) - self.average


class Memoising(Block):
    """A table is made in the first call and kept in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.tables:
            angles = torch.arange(x.shape[1]).float()[:, None] / 10
            self.tables[x.shape[1]] = (angles.sin(), angles.cos())
        sin, cos = self.tables[x.shape[1]]
        return super().forward(x * cos + x.flip(-1) * sin)


class Normalised(nn.Module):
    """Batch norm, whose statistics are updated once a step."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = Block(), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.block(x).transpose(1, 2)).transpose(1, 2)


class SpectrallyNormed(nn.Module):
    """A weight that power iterations make anew in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Hooked(Block):
    """Hooks on a part and on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(lambda _module, _args, out: out * 1.5)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * 0.5)
        return out


# --- arguments and results -----------------------------------------------------------------------


@dataclass
class State:
    """What a layer hands to the next: a class that nobody registered."""

    x: Tensor
    note: str
    extra: dict[Any, Tensor] | None = None


Pair = namedtuple("Pair", ["x", "gate"])


class HandsOver(nn.Module):
    """Layers that take and give a dataclass, a named tuple, an object and a dict with any keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_TakesState(), _TakesPair(), _TakesObject()])

    def forward(self, x: Tensor) -> Tensor:
        state: Any = State(x, "begin", {None: x, 3: x * 2})
        for layer in self.layers:
            state = layer(state)
        return state.x


class _TakesState(Block):
    def forward(self, state: State) -> Pair:
        x = super().forward(state.x + state.extra[3] + state.extra[None])
        return Pair(x, x.sigmoid())


class _TakesPair(Block):
    def forward(self, pair: Pair) -> SimpleNamespace:
        return SimpleNamespace(x=super().forward(pair.x * pair.gate), count=3, nothing=None)


class _TakesObject(Block):
    def forward(self, thing: SimpleNamespace) -> State:
        return State(super().forward(thing.x) * thing.count, "end")


class Packed(nn.Module):
    """A recurrent network over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(x.shape[0], 0, -1) + x.shape[1] - x.shape[0]
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out, _ = self.lstm(packed)
        return rnn.pad_packed_sequence(out, batch_first=True)[0]


# --- derivatives ---------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class OwnBackward(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(super().forward(x))


class CheckpointsItself(Block):
    """PyTorch's own checkpoint within."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class GradientWithin(Block):
    """A gradient in the forward pass: an energy, whose gradient is the output."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            x = x.requires_grad_()
        energy = super().forward(x).square().sum()
        (out,) = torch.autograd.grad(energy, x, create_graph=True)
        return out


class Converted(Block):
    """Mixed precision within."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


_STACKED = (
    RoutedByValue,
    DroppedLayer,
    DroppedByPython,
    MaskedByNumpy,
    UntilItConverges,
    Validated,
    Uniques,
    Counting,
    Memoising,
    Normalised,
    SpectrallyNormed,
    Hooked,
    Packed,
    OwnBackward,
    CheckpointsItself,
    GradientWithin,
    Converted,
)


def find_hard_models() -> dict[str, ZooModel]:
    found = {f"hard, {kind.__name__}": _stack(kind) for kind in _STACKED}
    found["hard, HandsOver"] = ZooModel(
        "torch", HandsOver, _sequences, blocks=("layers.0", "layers.1", "layers.2")
    )
    return found


def _stack(kind: Callable[[], nn.Module]) -> ZooModel:
    return ZooModel("torch", lambda: Stack(kind), _sequences)


def _sequences() -> Arguments:
    return (torch.randn(8, 32, WIDTH),)
