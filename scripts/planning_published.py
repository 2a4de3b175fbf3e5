"""More models of `bench_planning.py`: of the kinds that papers on rematerialisation measure.

Dense and recurrent networks, trees, and steps with several backward passes. Those take gradients
inside of the loss: an unrolled generative adversarial network, a penalty on a gradient, and
learning to learn (MAML).
"""

import torch
import torch.nn.functional as F
from planning_models import Model, on_meta
from torch import Tensor, nn
from torch.func import functional_call

Weights = dict[str, Tensor]


class DenseLayer(nn.Module):
    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(before), nn.BatchNorm2d(4 * growth)
        self.narrow = nn.Conv2d(before, 4 * growth, 1, bias=False)
        self.wide = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(F.relu(self.norm1(x)))
        return torch.cat([x, self.wide(F.relu(self.norm2(y)))], 1)


class Transition(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm, self.narrow = nn.BatchNorm2d(before), nn.Conv2d(before, after, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.narrow(F.relu(self.norm(x))), 2)


class DenseNet(nn.Module):
    def __init__(self, depth: int, growth: int) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        layers: list[nn.Module] = []
        for stage in range(3):
            if stage:
                layers.append(Transition(width, width // 2))
                width //= 2
            for _ in range(depth):
                layers.append(DenseLayer(width, growth))
                width += growth
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, 100)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(F.relu(x).mean((2, 3))), labels)


class LstmStep(nn.Module):
    """One step with weights that all steps share."""

    def __init__(self, gates: nn.Linear) -> None:
        super().__init__()
        self.gates = gates

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = self.gates(torch.cat([x, h], -1)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class Lstm(nn.Module):
    def __init__(self, steps: int, width: int) -> None:
        super().__init__()
        gates = nn.Linear(2 * width, 4 * width)
        self.steps = nn.ModuleList(LstmStep(gates) for _ in range(steps))
        self.head = nn.Linear(width, width)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        h = c = torch.zeros_like(inputs[0])
        for step, x in zip(self.steps, inputs, strict=True):
            h, c = step(x, h, c)
        return F.mse_loss(self.head(h), target)


class TreeLstm(nn.Module):
    """A tree LSTM on a full binary tree, after Tai et al. (2015)."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.depth = depth
        self.leaf, self.inner = nn.Linear(width, 3 * width), nn.Linear(2 * width, 5 * width)

    def forward(self, leaves: Tensor, target: Tensor) -> Tensor:
        nodes = [self.enter(x) for x in leaves]
        while len(nodes) > 1:
            nodes = [self.join(*pair) for pair in zip(nodes[::2], nodes[1::2], strict=True)]
        return F.mse_loss(nodes[0][0], target)

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        i, g, o = self.leaf(x).chunk(3, -1)
        c = i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def join(
        self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        joined = self.inner(torch.cat([left[0], right[0]], -1))
        i, f, e, g, o = joined.chunk(5, -1)
        c = i.sigmoid() * g.tanh() + f.sigmoid() * left[1] + e.sigmoid() * right[1]
        return o.sigmoid() * c.tanh(), c


def _layers(before: int, width: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(before, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, after),
    )


class UnrolledGan(nn.Module):
    """The loss of a generator against a discriminator some steps ahead (Metz et al. 2017)."""

    def __init__(self, steps: int, width: int) -> None:
        super().__init__()
        self.steps = steps
        self.generator, self.discriminator = _layers(64, width, 2), _layers(2, width, 1)

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        fake = self.generator(noise)
        weights: Weights = dict(self.discriminator.named_parameters())
        for _ in range(self.steps):
            weights = self.improve(weights, real, fake)
        return -self.loss(weights, real, fake)

    def improve(self, weights: Weights, real: Tensor, fake: Tensor) -> Weights:
        loss = self.loss(weights, real, fake)
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        pairs = zip(weights.items(), gradients, strict=True)
        return {name: weight - 0.01 * gradient for (name, weight), gradient in pairs}

    def loss(self, weights: Weights, real: Tensor, fake: Tensor) -> Tensor:
        true = functional_call(self.discriminator, weights, (real,))
        false = functional_call(self.discriminator, weights, (fake,))
        return F.softplus(-true).mean() + F.softplus(false).mean()


class Maml(nn.Module):
    """The loss after some steps on a task of its own (Finn et al. 2017)."""

    def __init__(self, steps: int, width: int) -> None:
        super().__init__()
        self.steps = steps
        self.network = _layers(width, width, width)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        weights: Weights = dict(self.network.named_parameters())
        for _ in range(self.steps):
            loss = F.mse_loss(functional_call(self.network, weights, (x,)), target)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            pairs = zip(weights.items(), gradients, strict=True)
            weights = {name: weight - 0.01 * gradient for (name, weight), gradient in pairs}
        return F.mse_loss(functional_call(self.network, weights, (x,)), target)


class GradientPenalty(nn.Module):
    """A critic, with a penalty on its gradient for the input (Gulrajani et al. 2017)."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = x
        for layer in self.layers:
            y = F.silu(layer(y))
        value = self.head(y).mean()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + 10 * (gradient.norm(dim=-1) - 1).square().mean()


def _densenet(depth: int, growth: int, batch: int, size: int):
    labels = torch.zeros(batch, dtype=torch.long)
    return DenseNet(depth, growth), (torch.zeros(batch, 3, size, size), labels)


def _lstm(steps: int, width: int, batch: int):
    return Lstm(steps, width), (torch.zeros(steps, batch, width), torch.zeros(batch, width))


def _tree(depth: int, width: int, batch: int):
    inputs = (torch.zeros(2**depth, batch, width), torch.zeros(batch, width))
    return TreeLstm(depth, width), inputs


def _gan(steps: int, width: int, batch: int):
    return UnrolledGan(steps, width), (torch.zeros(batch, 64), torch.zeros(batch, 2))


def _maml(steps: int, width: int, batch: int):
    return Maml(steps, width), (torch.zeros(batch, width), torch.zeros(batch, width))


def _penalty(depth: int, width: int, batch: int):
    return GradientPenalty(depth, width), (torch.zeros(batch, width),)


PUBLISHED: dict[str, Model] = {
    "densenet-6": Model(on_meta(_densenet, 6, 24, 16, 32), ("layers.*",)),
    "lstm-48": Model(on_meta(_lstm, 48, 256, 64), ("steps.*",)),
    "treelstm-5": Model(on_meta(_tree, 5, 256, 64), ()),
    "gan-6": Model(on_meta(_gan, 6, 512, 4096), ()),
    "maml-4": Model(on_meta(_maml, 4, 512, 4096), ()),
    "penalty-12": Model(on_meta(_penalty, 12, 512, 4096), ("layers.*",)),
}
