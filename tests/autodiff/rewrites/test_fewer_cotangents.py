"""A backward pass for fewer outputs, where the function can no longer be traced for them."""

from contextlib import contextmanager
from contextvars import ContextVar

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same
from torchremat.errors import RetraceError

KEPT: ContextVar[list] = ContextVar("KEPT")


@contextmanager
def collecting():
    """As a library collects what layers leave for the time of a call."""
    found: list[torch.Tensor] = []
    token = KEPT.set(found)
    try:
        yield found
    finally:
        KEPT.reset(token)


def leave(tensor):
    KEPT.get().append(tensor)


class Constant(torch.autograd.Function):
    """Adds a constant to a gradient, as some libraries add an auxiliary loss."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return torch.full(ctx.shape, 2.0)


class Layer(nn.Module):
    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.only_aux = nn.Parameter(torch.randn(4))
        self.body = body

    def forward(self, x):
        return self.body(x, self.weight, self.only_aux)


def shared(x, w, v):
    """Both outputs read a value in between."""
    h = (x @ w).tanh()
    leave((h * v).exp())
    return h.sin() + x


def infinite(x, w, v):
    """The derivative of the root is infinite; zero times it would be no number."""
    h = x @ w
    leave((h - h.detach()).sqrt())
    return h.sin()


def joined(x, w, v):
    """A derivative of two outputs, of which one has no cotangent."""
    h = x @ w
    first, second = h.chunk(2, -1)
    leave(second * 3)
    return first.exp()


def normed(x, w, v):
    y = torch.nn.functional.layer_norm(x @ w, (4,), v)
    leave(y.square())
    return y.softmax(-1)


def several(x, w, v):
    h = x @ w
    leave(h.relu())
    leave(h.sum() * v)
    return h.cos(), h.sigmoid() * x


def run(layer, x, *, read):
    with collecting() as left:
        found = layer(x)
    outputs = [*(found if isinstance(found, tuple) else [found]), *left]
    sum(outputs[i].sum() for i in read).backward()
    gradients = [x.grad, *(p.grad for p in layer.parameters())]
    x.grad = None
    layer.zero_grad()
    return outputs, gradients


@pytest.mark.parametrize("policy", [None, "none", "dots", "budget:1MiB"])
@pytest.mark.parametrize(
    "body", [shared, infinite, joined, normed, several], ids=lambda f: f.__name__
)
def test_the_gradients_of_fewer_outputs_are_those_of_plain_autograd(body, policy):
    plain = Layer(body)
    wrapped = tr.nn.wrap(Layer(body), policy)
    for rows in (3, 3, 5, 7):
        x = torch.randn(rows, 4, requires_grad=True)
        for read in ([0], [-1], [0, -1]):
            expected = run(plain, x, read=read)
            assert_same(run(wrapped, x, read=read), expected, f"{rows} rows, outputs {read}")


def add_constant(x, w, v):
    h = (x @ w).tanh()
    leave(Constant.apply(h) * v)
    return h.sin()


def test_a_gradient_that_is_no_product_of_cotangents_is_refused():
    wrapped = tr.nn.wrap(Layer(add_constant))
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RetraceError, match="is gone in the backward pass"):
        run(wrapped, x, read=[0])


def test_a_second_derivative_of_fewer_outputs_says_what_is_gone():
    wrapped = tr.nn.wrap(Layer(shared))
    x = torch.randn(3, 4, requires_grad=True)
    with collecting():
        y = wrapped(x)
    with pytest.raises(RetraceError, match="is gone in the backward pass"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


class LossBesideOthers(nn.Module):
    """A model that returns its loss and more, as those of transformers do."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
        self.scale = scale

    def forward(self, x, target):
        hidden = self.layers(x)
        logits = self.scale(hidden * 2)
        return nn.functional.cross_entropy(logits, target), logits, hidden.square().mean()


def count_calls(function):
    calls = []

    def run(x):
        calls.append(type(x))
        return function(x)

    return run, calls


@pytest.mark.parametrize("policy", ["full", "dots", "budget:90%"])
@pytest.mark.parametrize("read", [(0,), (0, 2), (1,), (0, 1, 2)])
def test_one_trace_serves_whichever_outputs_have_a_gradient(policy, read):
    scale, calls = count_calls(torch.sigmoid)
    model = LossBesideOthers(torch.sigmoid)
    wrapped = tr.nn.wrap(LossBesideOthers(scale), policy)
    x, target = torch.randn(5, 8), torch.randint(0, 8, (5,))
    for each in (model, wrapped):
        outputs = each(x, target)
        sum(outputs[i].sum() for i in read).backward()
    assert_same([p.grad for p in wrapped.parameters()], [p.grad for p in model.parameters()])
    assert len(calls) == 1


class Halves(torch.autograd.Function):
    """Asks which gradients there are: only a trace tells what it does with fewer."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx, first, second):
        if second is None:
            return first * 3
        return second * 2 if first is None else first + second * 2


@pytest.mark.parametrize("read", [(0,), (1,), (0, 1)])
def test_a_backward_pass_that_asks_for_its_gradients_is_traced(read):
    weight = torch.randn(4, requires_grad=True)
    found = []
    for run in (Halves.apply, tr.checkpoint(Halves.apply)):
        outputs = run(weight.sin())
        found.append(torch.autograd.grad(sum(outputs[i].sum() for i in read), weight))
    assert_same(*found)
