"""Random programs of a few operators, for tests of laws that hold for all graphs."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

import torchremat as tr

SHAPE = (3, 3)


def inputs(seed: int = 0, count: int = 3) -> list[Tensor]:
    """Square matrices in double precision."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator, dtype=torch.double) for _ in range(count)]


class Program:
    """A function of three matrices, made of operators that a seed chooses; it gives three values.

    `names` lists the kinds of steps that may be chosen: see `STEPS`.
    """

    def __init__(self, seed: int, num_steps: int = 12, without: tuple[str, ...] = ()) -> None:
        rng = random.Random(seed)
        kinds = sorted(set(STEPS) - set(without))
        self.weight = inputs(seed + 1, 1)[0].requires_grad_()
        self.steps = [
            (rng.choice(kinds), rng.randrange(10**6), rng.randrange(10**6))
            for _ in range(num_steps)
        ]
        self.results = [rng.randrange(num_steps + 3) for _ in range(3)]

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        """Run the steps, each on two earlier values."""
        values = list(args)
        for kind, i, j in self.steps:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(STEPS[kind](self, a, b))
        return tuple(values[i] for i in self.results)


def _written(p: Program, a: Tensor, b: Tensor) -> Tensor:
    c = a * 0.5
    c[0] = b[1]
    c.add_(b)
    return c


def _without_grad(p: Program, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        c = a.sin()
    return c * b


def _checkpointed(p: Program, a: Tensor, b: Tensor) -> Tensor:
    @tr.checkpoint(policy="names:inside")
    def block(a, b):
        return tr.checkpoint_name(a.sin(), "inside").cos() @ (b + p.weight)

    return block(a, b).tanh()


def _two_outputs(p: Program, a: Tensor, b: Tensor) -> Tensor:
    values, indices = a.topk(2, dim=1)
    return b + values.sum(1, keepdim=True) + indices.sum()


STEPS: dict[str, Callable[[Program, Tensor, Tensor], Tensor]] = {
    "matmul": lambda p, a, b: (a @ b).tanh(),
    "weight": lambda p, a, b: torch.sigmoid(a @ p.weight),
    "mul": lambda p, a, b: (a * b).sin(),
    "add": lambda p, a, b: torch.add(a, b, alpha=0.5).cos(),
    "exp": lambda p, a, b: torch.exp(-a.abs()),
    "view": lambda p, a, b: a.t() + b.reshape(-1).flip(0).view(SHAPE),
    "index": lambda p, a, b: a[[0, 2, 1]] - b[:, :1],
    "sum": lambda p, a, b: b + a.sum(0) / (1 + b.mean() ** 2),
    "softmax": lambda p, a, b: torch.softmax(a, 1) @ b.t(),
    "where": lambda p, a, b: torch.where(a > b, a.relu(), b * 0.1),
    "cat": lambda p, a, b: torch.cat([a, b])[1:4],
    "constant": lambda p, a, b: a * torch.tensor([1.0, -1.0, 0.5], dtype=torch.double),
    "name": lambda p, a, b: tr.checkpoint_name(a.sin(), "named") * b,
    "detach": lambda p, a, b: a.detach() * b.sin(),
    "no_grad": _without_grad,
    "write": _written,
    "checkpoint": _checkpointed,
    "topk": _two_outputs,
    "random": lambda p, a, b: a * torch.rand(SHAPE, dtype=torch.double),
    "dropout": lambda p, a, b: torch.nn.functional.dropout(b, 0.5) + a,
}
