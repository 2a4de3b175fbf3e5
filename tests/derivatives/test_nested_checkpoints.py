"""Checkpoints and compiled functions within transformations that trace, and within each other."""

import pytest
import torch

import torchremat as tr

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
def test_derivatives_of_nested_functions(orders, function, name):
    order, derive = DERIVATIVES[name]
    torch.testing.assert_close(derive(FUNCTIONS[function]()), orders[order])
