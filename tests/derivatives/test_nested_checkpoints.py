"""Checkpoints and compiled functions within transformations that trace, and within each other."""

import pytest
import torch

import torchremat as tr
from torchremat.measure import LiveBytes

X = torch.tensor(0.7, dtype=torch.double)
ONE = torch.ones_like(X)


def plain(x):
    return torch.sin(torch.sin(x)) * x


def sine(x):
    return torch.sin(torch.sin(x))


FUNCTIONS = {
    "checkpoint": lambda: tr.checkpoint(plain),
    "checkpoint of checkpoint": lambda: tr.checkpoint(lambda x: tr.checkpoint(sine)(x) * x),
    "checkpoint of jit": lambda: tr.checkpoint(tr.jit(plain, backend="eager")),
    "jit of checkpoint": lambda: tr.jit(tr.checkpoint(plain), backend="eager"),
}


def pulled(f):
    return lambda x: tr.vjp(f, x)[1](ONE)[0]


DERIVATIVES = {
    "linearize": (1, lambda f: tr.linearize(f, X)[1](ONE)),
    "linearize vjp": (2, lambda f: tr.linearize(pulled(f), X)[1](ONE)),
    "grad linearize": (2, lambda f: tr.grad(lambda x: tr.linearize(f, x)[1](ONE))(X)),
    "vjp linearize vjp": (3, lambda f: pulled(lambda x: tr.linearize(pulled(f), x)[1](ONE))(X)),
    "grad jvp vjp": (3, lambda f: tr.grad(lambda x: tr.jvp(pulled(f), (x,), (ONE,))[1])(X)),
    "linearize linearize": (
        2,
        lambda f: tr.linearize(lambda x: tr.linearize(f, x)[1](ONE), X)[1](ONE),
    ),
    "vmap linearize": (1, lambda f: tr.vmap(lambda x: tr.linearize(f, x)[1](ONE))(X[None])[0]),
    "checkpoint jacrev": (1, lambda f: tr.checkpoint(tr.jacrev(f))(X)),
    "checkpoint vmap grad": (1, lambda f: tr.checkpoint(tr.vmap(tr.grad(f)))(X[None])[0]),
    "graph of vjp": (2, lambda f: tr.grad(lambda x: _eval_graph_of(pulled(f), x))(X)),
}


def _eval_graph_of(f, x):
    return tr.eval_graph(tr.make_graph(f)(X), x)


@pytest.fixture(scope="module")
def orders():
    """The derivatives of `plain`, by order."""
    found, f = {}, plain
    for order in range(1, 4):
        f = torch.func.grad(f)
        found[order] = f(X)
    return found


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.sampled(3)
def test_derivatives_of_nested_functions(orders, function, name):
    order, derive = DERIVATIVES[name]
    torch.testing.assert_close(derive(FUNCTIONS[function]()), orders[order])


def test_tangents_that_pass_a_checkpoint_inside_grad_have_gradients():
    """Forward mode differentiates x alone, and the level inside of it y alone."""
    f = tr.checkpoint(lambda x, y: torch.sin(x) * y)

    def tangent(x):
        aux = lambda x: tr.grad(lambda y: (y, f(x, y)), has_aux=True)(X)[1]  # noqa: E731
        return tr.jvp(aux, (x,), (torch.cos(x),))[1]

    x = X.clone().requires_grad_()
    found = torch.autograd.grad(tangent(x), x)[0]
    torch.testing.assert_close(found, -2 * torch.cos(X) * torch.sin(X) * X)


def chain(x):
    for _ in range(20):
        x = torch.sin(x)
    return x


def chain_of_checkpoint(policy, inner):
    return tr.checkpoint(lambda x: tr.checkpoint(chain, policy=inner)(x), policy=policy)


HOLDS = {
    "plain": (lambda: chain, 20),
    "full": (lambda: tr.checkpoint(chain, policy="full"), 1),
    "none": (lambda: tr.checkpoint(chain, policy="none"), 20),
    "dots": (lambda: tr.checkpoint(chain, policy="dots"), 1),
    "budget": (lambda: tr.checkpoint(chain, policy="budget:1MiB"), 1),
    "the outermost decides": (lambda: chain_of_checkpoint("full", "none"), 1),
    "the outermost saves": (lambda: chain_of_checkpoint("none", "full"), 20),
    "jit leaves it": (lambda: tr.jit(tr.checkpoint(chain, policy="full"), backend="eager"), 1),
}


@pytest.mark.parametrize("name", HOLDS)
def test_linearize_holds_what_the_policy_lets_be_saved(name):
    make, count = HOLDS[name]
    x = torch.rand(3, dtype=torch.double)
    out, linear = tr.linearize(make(), x)
    expected = torch.func.jvp(chain, (x,), (torch.cos(x),))
    torch.testing.assert_close((out, linear(torch.cos(x))), expected)
    assert len(linear.graph.consts) == count


def live_bytes(f, x):
    f(x)
    with LiveBytes() as live:
        f(x)
    return live.peak


MODES = {
    "jacrev": tr.jacrev,
    "hessian": lambda f: tr.hessian(lambda x: f(x).sum()),
    "grad jvp": lambda f: tr.grad(lambda x: tr.jvp(f, (x,), (x,))[1].sum()),
}


@pytest.mark.parametrize("name", MODES)
def test_every_mode_saves_by_the_policy(name):
    derive = MODES[name]
    x = torch.rand(16, dtype=torch.double)
    saved, recomputed = (
        live_bytes(derive(tr.checkpoint(chain, policy=policy)), x) for policy in ("none", "full")
    )
    assert recomputed < saved <= live_bytes(derive(chain), x)
