"""`torch.func`, second derivatives and mapped axes on the device."""

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap

import torchremat as tr
from tests.helpers import assert_same

pytestmark = pytest.mark.parametrize("late", ["copies last"], indirect=True)
"""No copy runs beside the operators here."""


def _function(x, w):
    return torch.tanh(x @ w).square().sum() + torch.sin(x).prod(-1).sum()


@pytest.fixture
def arguments(late):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(*shape, generator=generator) for shape in ((3, 4), (4, 5))]
    return [t.to("late") for t in made]


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_functional_transforms(arguments, policy):
    f = tr.checkpoint(_function, policy=policy)
    x, w = arguments
    xs = torch.stack([x, 2 * x, -x])
    assert_same(grad(f, (0, 1))(x, w), grad(_function, (0, 1))(x, w))
    assert_same(
        jvp(f, (x, w), (w.T[:3], x.T @ x[:, :1] * w)),
        jvp(_function, (x, w), (w.T[:3], x.T @ x[:, :1] * w)),
    )
    assert_same(vmap(grad(f), (0, None))(xs, w), vmap(grad(_function), (0, None))(xs, w))
    assert_same(hessian(f)(x, w), hessian(_function)(x, w), close=True)


def test_second_derivatives_with_dropout(arguments):
    def f(x, w):
        return torch.nn.functional.dropout(torch.tanh(x @ w), 0.4).pow(3).sum()

    def penalty(f):
        x, w = (t.detach().clone().requires_grad_() for t in arguments)
        torch.manual_seed(5)
        (slope,) = torch.autograd.grad(f(x, w), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [x, w])

    assert_same(penalty(tr.checkpoint(f)), penalty(f))


def test_mapped_axes(arguments):
    x, _ = arguments
    mapped = tr.vmap(lambda x: x / tr.psum(x, "rows"), axis_name="rows")
    assert_same(mapped(x), x / x.sum(0))


def test_chunks_draw_the_same_numbers(arguments):
    x, _ = arguments

    def f(x):
        return x + torch.rand_like(x)

    torch.manual_seed(5)
    in_chunks = tr.vmap(f, randomness="same", chunk_size=1)(x)
    torch.manual_seed(5)
    at_once = tr.vmap(f, randomness="same")(x)
    assert_same(in_chunks, at_once)
