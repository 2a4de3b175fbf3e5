"""Functions that cannot be one graph train as plain PyTorch does, to the bit, and hold less."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import torchremat as tr
from torchremat.measure import LiveBytes
from torchremat.nn import wrap  # its import draws a random number of Python's


class Routed(nn.Module):
    """A mixture of experts whose routing Python reads."""

    def __init__(self, width=16, experts=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, width))
            for _ in range(experts)
        )

    def forward(self, x):
        flat = self.norm(x).reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if token.numel():
                y = expert(flat[token]) * weights[token, place, None]
                out.index_add_(0, token, tr.checkpoint_name(y, "routed"))
        return x + out.view_as(x)


class Dropped(nn.Module):
    """Layers dropped by Python's random numbers, and a scale by NumPy's."""

    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            if random.random() < 0.5:
                x = torch.tanh(layer(x)) * float(np.random.rand()) + x
        return x.exp().log1p()


class Counted(nn.Module):
    """Batch norm, a counter, and a value left in an attribute."""

    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.calls = 0
        self.seen = []

    def forward(self, x):
        self.calls += 1
        y = self.norm(x.flatten(0, -2)).view_as(x).sigmoid()
        self.seen.append(y.mean().item())
        return y * self.calls + y.exp()


class Written(nn.Module):
    """Writes in place, to views and to memory that was empty, before and after it is saved."""

    def __init__(self, width=16):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x):
        y = x * self.weight
        y[..., ::2] += x[..., 1::2].sin()
        y.clamp_(min=-2).mul_(1.5)
        parts = torch.empty(2, *x.shape)
        parts[0] = y.cos()
        parts[1].copy_(y.exp())
        z = torch.zeros_like(x)
        z.view(-1).scatter_add_(0, torch.arange(x.numel()).flip(0), parts.prod(0).reshape(-1))
        for _ in range(int(x.shape[0] + (z.sum() > 0).item())):
            z = torch.relu_(z - 0.1).add(1).sqrt_().square()
        return z


class Sampled(nn.Module):
    """A distribution that validates its arguments, and dropout in place."""

    def __init__(self, width=16):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x):
        normal = torch.distributions.Normal(x, self.scale.exp(), validate_args=True)
        y = nn.functional.dropout(normal.rsample().sin(), 0.3, self.training)
        return y * normal.log_prob(y.detach()).exp() + torch.rand_like(y).sqrt() * y.tanh()


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with_numpy = torch.empty_like(x)
        with_numpy.numpy()[:] = x.detach().numpy() ** 3  # no operator writes it
        return with_numpy

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * 3 * x * x


class WithKernels(nn.Module):
    """Kernels that PyTorch does not know: a function with a derivative, and one without."""

    def __init__(self, width=16):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        y = Cubed.apply(self.inner(x).sin())
        sign = torch.empty_like(y)
        sign.numpy()[:] = np.sign(y.detach().numpy())
        return (y * sign).exp() * (sign + y).cos()


MODELS = [Routed, Dropped, Counted, Written, Sampled, WithKernels]
POLICIES = [
    "full",
    "none",
    "dots",
    "names:routed",
    "save_anything_except_these_names:routed",
    "modules:inner|modules:experts.1",
    "ops:aten.gelu,aten.sin",
    "recompute_ops:aten.mm",
]


def seed_all():
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def train(make, policy, steps=3):
    """Outputs, gradients, state and the next random numbers, of plain PyTorch if `policy` is None.

    Beside it the bytes that are alive between forward and backward pass.
    """
    seed_all()
    model = make()
    if policy is not None:
        wrap(model, policy)
    x = torch.randn(6, 8, 16, requires_grad=True)
    found, held = [], []
    for _ in range(steps):
        with LiveBytes() as live:
            y = model(x)
        held.append(live.live)
        y.square().sum().backward()
        found += [y.detach().clone(), x.grad.clone()]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    found += [b.clone() for b in model.buffers()]
    found += [torch.rand(1), torch.tensor([random.random(), np.random.rand()])]
    extra = [getattr(model, name, None) for name in ("calls", "seen")]
    return found, extra, held


@pytest.mark.filterwarnings("ignore:.*matches nothing:torchremat.errors.UnmatchedWarning")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.sampled(3)
def test_as_plain_pytorch_does_it(make, policy):
    plain, extra, held = train(make, None)
    ours, our_extra, our_held = train(make, policy)
    assert len(plain) == len(ours)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert our_extra == extra
    assert all(a <= b for a, b in zip(our_held, held, strict=True))


@pytest.mark.parametrize("make", MODELS)
def test_memory_is_freed(make):
    held = train(make, None)[2]
    ours = train(make, "full")[2]
    assert all(a < b for a, b in zip(ours, held, strict=True))


def test_a_policy_saves_what_it_names():
    full, named, plain = (train(Routed, p)[2][-1] for p in ("full", "names:routed", None))
    tokens = 6 * 8 * 2
    assert full < named < plain
    assert named - full == tokens * 16 * 4


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_recurrent_network_has_the_workspace_of_its_grad_mode(kind, is_frozen):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = kind(8, 8, batch_first=True), kind(8, 8, batch_first=True)

        def forward(self, x):
            with torch.set_grad_enabled(not is_frozen):
                y = self.first(x)[0].sin()
            y = self.second(x * y)[0]
            return y if y.sum() > -1e9 else -y

    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(3, 5, 8, requires_grad=True)
    inputs = (x, *model.second.parameters())
    expected = torch.autograd.grad(model(x).pow(2).sum(), inputs)
    found = torch.autograd.grad(wrap(model)(x).pow(2).sum(), inputs)
    assert all(map(torch.equal, found, expected))


class ReadsAValue(nn.Module):
    """A model with a norm that Python's reading of a value puts on a tape."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 4), norm, nn.Linear(4, 4)

    def forward(self, x):
        y = self.norm(self.first(x).sin()).tanh()
        return self.last(y) if y.sum().item() > -1e9 else y


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "without weights": lambda: nn.BatchNorm1d(4, affine=False),
    "without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "cumulative": lambda: nn.BatchNorm1d(4, momentum=None),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(0, (1, -1)), nn.InstanceNorm1d(3, track_running_stats=True), nn.Flatten(0, 1)
    ),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("policy", ["full", "dots"])
def test_norms_in_eval_mode_have_their_statistics(norm, policy):
    plain, ours = ReadsAValue(NORMS[norm]()), ReadsAValue(NORMS[norm]())
    tr.nn.wrap(ours, policy)
    for step in range(12):
        for model in (plain, ours):
            model.train(step < 2)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [model(x) for model, x in zip((plain, ours), inputs, strict=True)]
        for out in outputs:
            out.square().sum().backward()
        assert torch.equal(*outputs)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        for a, b in zip(plain.buffers(), ours.buffers(), strict=True):
            assert torch.equal(a, b)
    assert {row.way for row in tr.nn.report(ours).rows} == {"tape"}
