"""Random programs of a few operators, for tests of laws that hold for all graphs."""

import random
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

import torchremat as tr

SHAPE = (3, 3)


def inputs(seed: int = 0, count: int = 3) -> list[Tensor]:
    """Square matrices in double precision."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator, dtype=torch.double) for _ in range(count)]


class Program:
    """A function of three matrices, made of operators that a seed chooses; it gives three values.

    The kinds of steps are those of `STEPS` but `without`, and `more` of other kinds. Those that
    write to buffers and draw from a generator of the user's change the `state` of the program.
    """

    def __init__(
        self,
        seed: int,
        num_steps: int = 12,
        without: tuple[str, ...] = (),
        more: Mapping[str, "Step"] | None = None,
    ) -> None:
        rng = random.Random(seed)
        self.kinds = {k: s for k, s in {**STEPS, **(more or {})}.items() if k not in without}
        kinds = sorted(self.kinds)
        self.checkpoint = tr.checkpoint
        self.weight = inputs(seed + 1, 1)[0].requires_grad_()
        self.generator = torch.Generator().manual_seed(seed)
        self.mean, self.var = torch.zeros(3, dtype=torch.double), torch.ones(3, dtype=torch.double)
        self.sum, self.count = torch.zeros(SHAPE, dtype=torch.double), torch.tensor(0)
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
            values.append(self.kinds[kind](self, a, b))
        return tuple(values[i] for i in self.results)

    def without_checkpoints(self) -> "Program":
        """The same program in plain PyTorch."""
        self.checkpoint = lambda fun=None, **options: fun or (lambda fun: fun)
        return self

    def state(self) -> list[Tensor]:
        """Copies of all that a call changes: buffers, and the states of the generators."""
        buffers = [t.clone() for t in (self.mean, self.var, self.sum, self.count)]
        return [*buffers, self.generator.get_state(), torch.get_rng_state()]


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
    @p.checkpoint(policy="names:inside")
    def block(a, b):
        return tr.checkpoint_name(a.sin(), "inside").cos() @ (b + p.weight)

    return block(a, b).tanh()


def _two_outputs(p: Program, a: Tensor, b: Tensor) -> Tensor:
    values, indices = a.topk(2, dim=1)
    return b + values.sum(1, keepdim=True) + indices.sum()


Step = Callable[[Program, Tensor, Tensor], Tensor]
"""A step: from the program and two matrices to one."""

STEPS: dict[str, Step] = {
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


# --- steps that write in place -------------------------------------------------------------------


def _written_views(p: Program, a: Tensor, b: Tensor) -> Tensor:
    c = a * 1
    rows = c[1:]
    rows.mul_(b[:2])
    rows.t()[0].add_(b[0, :2])
    c.diagonal().copy_(b[0])
    return c.reshape(-1).flip(0).view(SHAPE)


def _written_through_indices(p: Program, a: Tensor, b: Tensor) -> Tensor:
    c = a.sin()
    c[:, 1] = b[:, 0]
    c[b > 0.5] = 0.25
    c.index_add_(0, torch.tensor([0, 2]), b[:2])
    return c.masked_fill_(a < -1, -1.0)


def _written_after_use(p: Program, a: Tensor, b: Tensor) -> Tensor:
    c = a + b
    d = c * 2  # does not need the value of c
    c.clamp_(-1, 1)
    return c.cos() + d


def _written_input_of_view(p: Program, a: Tensor, b: Tensor) -> Tensor:
    c = a * 0.5
    view = c.t()
    c.add_(b)
    return view @ b


def _activated_in_place(p: Program, a: Tensor, b: Tensor) -> Tensor:
    return (a * 0.5).tanh_() + F.leaky_relu_(b - 0.1)


def _without_grad_in_place(p: Program, a: Tensor, b: Tensor) -> Tensor:
    c = b.detach().clone()
    with torch.no_grad():
        c.mul_(0.5).add_(a)
    return a * c


WRITES: dict[str, Step] = {
    "views": _written_views,
    "indices": _written_through_indices,
    "after use": _written_after_use,
    "input of view": _written_input_of_view,
    "activation": _activated_in_place,
    "no_grad write": _without_grad_in_place,
}


# --- steps that write to buffers -----------------------------------------------------------------


def _normalized(p: Program, a: Tensor, b: Tensor) -> Tensor:
    mean, var = a.mean(0), a.var(0)
    with torch.no_grad():
        p.mean.lerp_(mean, 0.1)
        p.var.mul_(0.9).add_(0.1 * var)
        p.count.add_(1)
    return (a - mean) / (var + 0.1).sqrt() + b


def _batch_norm(p: Program, a: Tensor, b: Tensor) -> Tensor:
    mean, var = p.mean.clone(), p.var.clone()
    c = F.batch_norm(a, mean, var, p.weight[0], b[0], training=True, eps=0.1)
    p.mean.copy_(mean)
    p.var.copy_(var)
    return c


def _averaged(p: Program, a: Tensor, b: Tensor) -> Tensor:
    p.sum.mul_(0.5).add_(a.detach())
    p.sum[1] = b[0].detach()
    return b * p.sum.clone().sigmoid()


def _counted(p: Program, a: Tensor, b: Tensor) -> Tensor:
    p.count.add_((a.detach() > b.detach()).sum())
    return a / (1 + p.count.clone())


def _checkpointed_writer(p: Program, a: Tensor, b: Tensor) -> Tensor:
    @p.checkpoint
    def block(a, b):
        p.sum.add_(b.detach(), alpha=0.25)
        return (a * p.sum.clone().cos()).sin()

    return block(a, b)


BUFFERS: dict[str, Step] = {
    "running": _normalized,
    "batch norm": _batch_norm,
    "average": _averaged,
    "count": _counted,
    "read": lambda p, a, b: a * p.sum.clone().tanh() + p.mean.clone(),
    "writer": _checkpointed_writer,
}


# --- steps that draw random numbers --------------------------------------------------------------


def _checkpointed_draw(p: Program, a: Tensor, b: Tensor) -> Tensor:
    @p.checkpoint(policy="names:inside")
    def block(a, b):
        return F.dropout(tr.checkpoint_name(a.sin(), "inside"), 0.3) @ b

    return block(a, b).tanh()


def _doubly_checkpointed_draw(p: Program, a: Tensor, b: Tensor) -> Tensor:
    inner = p.checkpoint(lambda a: F.dropout(a, 0.5).sin())
    return p.checkpoint(lambda a, b: inner(a.cos()) * torch.rand_like(b) + inner(b))(a, b)


def _chosen(p: Program, a: Tensor, b: Tensor) -> Tensor:
    indices = torch.multinomial(torch.softmax(a.detach(), 1), 3, replacement=True)
    return b.gather(1, indices) + a


def _drawn_in_place(p: Program, a: Tensor, b: Tensor) -> Tensor:
    c = torch.empty(SHAPE, dtype=torch.double).uniform_(0.5, 1)
    return a * c.mul_(torch.zeros(SHAPE, dtype=torch.double).bernoulli_(0.5)) - b


DRAWS: dict[str, Step] = {
    "bernoulli": lambda p, a, b: a * torch.bernoulli(torch.full_like(a, 0.5)),
    "bernoulli of value": lambda p, a, b: b * torch.bernoulli(torch.sigmoid(a.detach())),
    "rand_like": lambda p, a, b: (a + torch.rand_like(b)).sin(),
    "randn": lambda p, a, b: a * torch.randn(SHAPE, dtype=torch.double) + b,
    "normal": lambda p, a, b: torch.normal(0.0, 0.1, SHAPE, dtype=torch.double) + a.cos(),
    "normal of value": lambda p, a, b: torch.normal(a.detach(), 0.1) * b,
    "multinomial": _chosen,
    "randperm": lambda p, a, b: a[torch.randperm(3)] * b,
    "randint": lambda p, a, b: a * torch.randint(0, 2, SHAPE),
    "dropout in place": lambda p, a, b: F.dropout(a * 0.5, 0.5, inplace=True) + b,
    "alpha dropout": lambda p, a, b: F.alpha_dropout(a, 0.3, training=True) * 0.5,
    "dropout of features": lambda p, a, b: F.dropout1d(a, 0.4) + b,
    "native dropout": lambda p, a, b: torch.native_dropout(a, 0.4, True)[0] + b,
    "rrelu": lambda p, a, b: F.rrelu(a, training=True) * b,
    "gumbel": lambda p, a, b: F.gumbel_softmax(a, hard=True) @ b,
    "in place": _drawn_in_place,
    "generator": lambda p, a, b: b * torch.rand(SHAPE, generator=p.generator, dtype=torch.double),
    "unread": lambda p, a, b: (torch.rand(2), a.sin())[1],
    "checkpoint draw": _checkpointed_draw,
    "checkpoints draw": _doubly_checkpointed_draw,
}
