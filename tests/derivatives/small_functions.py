"""Small random functions of two vectors, written as a list of steps that can be shortened.

A function is its text: `SmallFunction(steps, outputs)` runs each step on earlier values, and
returns a dict of some. Its kinds of steps are those that transformations have to get right beside
arithmetic: views, writes to copies, integers, constants, `no_grad`, dropout, unused inputs.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SIZE = 3
TABLE = torch.tensor([[0.3, -0.2, 0.5], [0.1, 0.7, -0.4], [-0.6, 0.2, 0.9]], dtype=torch.double)


def _write_row(a: Tensor, b: Tensor) -> Tensor:
    copy = torch.stack([a, b])
    copy[0] = b * 2
    copy.mul_(0.5)
    return copy.sum(0)


def _write_view(a: Tensor, b: Tensor) -> Tensor:
    copy = a * 1.0
    part = copy[1:]
    part.add_(b[:-1])
    return copy


def _without_grad(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.sin(a)
    return scale * b


Step = Callable[[Tensor, Tensor], Tensor]

# Each takes two vectors and gives one. There is no layer_norm: PyTorch's derivatives of its
# forward-mode formula are wrong (2.13), also without this library.
SMOOTH: dict[str, Step] = {
    "sin": lambda a, b: torch.sin(a),
    "tanh": lambda a, b: torch.tanh(a),
    "exp": lambda a, b: torch.exp(-a * a),
    "sigmoid": lambda a, b: torch.sigmoid(a),
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: 2 * a - b,
    "divide": lambda a, b: a / (1 + b * b),
    "matmul": lambda a, b: TABLE @ a,
    "outer": lambda a, b: torch.outer(a, b).sum(1),
    "mean": lambda a, b: a.mean() * b,
    "norm": lambda a, b: a / (a * a).sum().add(1).sqrt(),
    "softmax": lambda a, b: torch.softmax(a, 0) * b,
    "cumsum": lambda a, b: torch.cumsum(a, 0),
    "where": lambda a, b: torch.where(a > 0.5, a * b, torch.sin(b)),
    "gelu": lambda a, b: F.gelu(a),
}
VIEWS: dict[str, Step] = {
    "flip view": lambda a, b: torch.stack([a, b]).t()[:, 1],
    "slice": lambda a, b: torch.cat([a[1:], b[:1]]),
    "view": lambda a, b: a.view(SIZE, 1).squeeze(1),
    "view as": lambda a, b: a.view_as(a),
    "expand": lambda a, b: a[0].expand(SIZE),
    "unbind": lambda a, b: torch.stack(a.unbind()),
    "split": lambda a, b: torch.cat(torch.cat([a, b]).split(2)[::-1])[:SIZE],
}
OTHERS: dict[str, Step] = {
    "constant": lambda a, b: torch.full((SIZE,), 0.25, dtype=torch.double),
    "zeros": lambda a, b: torch.zeros_like(a),
    "detach": lambda a, b: a.detach() * b,
    "no_grad": _without_grad,
    "gather": lambda a, b: a[torch.tensor([2, 0, 1])],
    "sort": lambda a, b: a[torch.argsort(b)],
    "write row": _write_row,
    "write view": _write_view,
    "clone": lambda a, b: a.clone(),
}
DRAWS: dict[str, Step] = {
    "dropout": lambda a, b: F.dropout(a, 0.5),
    "noise": lambda a, b: a + torch.rand(SIZE, dtype=torch.double),
}
STEPS = SMOOTH | VIEWS | OTHERS | DRAWS

# each makes an output of a vector
OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "vector": lambda a: a,
    "sum": torch.sum,
    "part": lambda a: a[1],
    "column": lambda a: a.unsqueeze(1),
    "integer": lambda a: a.argmax(),
    "integers": torch.argsort,
    "mask": lambda a: a > 0.5,
    "constant": lambda a: torch.ones(2, dtype=torch.double),
}


@dataclass(frozen=True)
class SmallFunction:
    """`steps` are (kind, first operand, second operand); `outputs` are (kind, value).

    Values 0 and 1 are the arguments, value i + 2 is the result of step i.
    """

    steps: tuple[tuple[str, int, int], ...]
    outputs: tuple[tuple[str, int], ...]

    @classmethod
    def draw(cls, rng: random.Random, *, draws: bool) -> "SmallFunction":
        """Draw a function of one to five steps and up to three outputs."""
        kinds = [*SMOOTH, *SMOOTH, *VIEWS, *OTHERS, *(DRAWS if draws else ())]
        steps = tuple(
            (rng.choice(kinds), rng.randrange(i + 2), rng.randrange(i + 2))
            for i in range(rng.randint(1, 5))
        )
        most = len(steps) + 2
        first = (rng.choice(["vector", "sum"]), rng.randrange(2, most))
        others = [(rng.choice(list(OUTPUTS)), rng.randrange(most)) for _ in range(rng.randrange(3))]
        return cls(steps, (first, *others))

    def __call__(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Run it."""
        values = [x, y]
        for kind, i, j in self.steps:
            values.append(STEPS[kind](values[i], values[j]))
        return {f"{i} {kind}": OUTPUTS[kind](values[n]) for i, (kind, n) in enumerate(self.outputs)}

    @property
    def draws_random(self) -> bool:
        """Whether a step draws random numbers."""
        return any(kind in DRAWS for kind, _, _ in self.steps)

    def shorter(self) -> list["SmallFunction"]:
        """Functions with a step or an output less; what a step gave is its first operand then."""
        found = [
            SmallFunction(self.steps, self.outputs[:i] + self.outputs[i + 1 :])
            for i in range(len(self.outputs))
            if len(self.outputs) > 1
        ]
        for i, (_, first, _) in enumerate(self.steps):
            instead = _without(i + 2, first)
            steps = tuple((k, instead(a), instead(b)) for k, a, b in self.steps if k or a or b)
            steps = steps[:i] + steps[i + 1 :]
            found.append(SmallFunction(steps, tuple((k, instead(n)) for k, n in self.outputs)))
        return found


def _without(removed: int, instead: int) -> Callable[[int], int]:
    """Renumber values after the removal of one."""
    return lambda n: instead if n == removed else n - (n > removed)
