"""Derivatives in functions that `torch.compile` captures: one graph, and the values of eager."""

import pytest
import torch

import torchremat as tr
from torchremat.errors import CompilerWarning


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss(params, x):
    return ((params["w"] * x - params["b"]) ** 2).sum()


def loss_and_waves(params, x):
    return loss(params, x), {"waves": x.sin()}


def cube(x):
    return x.pow(3).sum()


def turn(z):
    return z * (1 + 2j)


PARAMS = {"w": torch.tensor([1.0, -2.0, 0.5]), "b": torch.tensor(0.3)}
X = torch.tensor([0.2, 0.7, -1.1])
Z = torch.tensor([1 + 1j, 2j, -3.0])
of_loss = tr.grad(loss)

CALLS = {
    "grad": (lambda p, x: tr.grad(loss)(p, x), PARAMS, X),
    "grad made outside": (lambda p, x: of_loss(p, x), PARAMS, X),
    "grad itself": (of_loss, PARAMS, X),
    "keyword": (lambda p, x: tr.grad(loss)(p, x=x), PARAMS, X),
    "auxiliary": (lambda p, x: tr.grad(loss_and_waves, has_aux=True)(p, x), PARAMS, X),
    "value_and_grad": (lambda p, x: tr.value_and_grad(loss, argnums=(0, 1))(p, x), PARAMS, X),
    "value and auxiliary": (
        lambda p, x: tr.value_and_grad(loss_and_waves, has_aux=True)(p, x),
        PARAMS,
        X,
    ),
    "vjp": (lambda p, x: tr.vjp(loss, p, x)[1](torch.ones(())), PARAMS, X),
    "vjp with auxiliary": (
        lambda p, x: tr.vjp(loss_and_waves, p, x, has_aux=True)[2],
        PARAMS,
        X,
    ),
    "complex vjp": (lambda z: tr.vjp(turn, z)[1](z), Z),
    "complex grad": (lambda z: tr.grad(lambda z: turn(z).abs().sum())(z), Z),
    "jvp": (lambda p, x: tr.jvp(loss, (p, x), (p, x)), PARAMS, X),
    "jacfwd": (lambda p, x: tr.jacfwd(loss, argnums=(0, 1))(p, x), PARAMS, X),
    "jacrev": (lambda p, x: tr.jacrev(loss, argnums=(0, 1))(p, x), PARAMS, X),
    "jacrev with auxiliary": (lambda p, x: tr.jacrev(loss_and_waves, 0, True)(p, x), PARAMS, X),
    "hessian": (lambda x: tr.hessian(cube)(x), X),
    "hessian itself": (tr.hessian(cube), X),
    "grad of grad": (tr.grad(lambda x: tr.grad(cube)(x).sum()), X),
    "vmap of grad": (tr.vmap(tr.grad(cube)), X.expand(2, 3)),
    "a number": (lambda x: tr.grad(lambda a: (a * x).sum())(3.0), X),
    "jit": (lambda x: tr.jit(cube, backend="eager")(x) + 1, X),
    "jit with a policy": (lambda x: tr.jit(cube, policy="full", backend="eager")(x) + 1, X),
}


@pytest.mark.parametrize("name", CALLS)
def test_is_one_graph(name):
    fun, *args = CALLS[name]
    expected = fun(*args)
    compiled = torch.compile(fun, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*args), expected)


def test_of_a_module_that_autograd_differentiates():
    model = torch.nn.Linear(3, 1)

    def penalty(x):
        return tr.grad(lambda x: model(x).sin().sum())(x).pow(2).sum()

    expected = torch.autograd.grad(penalty(X), model.weight)
    compiled = torch.compile(penalty, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(X), model.weight), expected)


OUTSIDE = {
    "linearize": (lambda x: tr.linearize(cube, x)[1](x), X),
    "linear_transpose": (lambda x: tr.linear_transpose(lambda x: 2.0 * x, x)(x), X),
    "holomorphic": (lambda z: tr.grad(lambda z: turn(z).sum(), holomorphic=True)(z), Z),
    "integers": (lambda x: tr.grad(lambda x, n: (x * n).sum(), (0, 1), allow_int=True)(x, 2), X),
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.sampled(2)
def test_runs_outside_of_the_graph(name):
    fun, *args = OUTSIDE[name]
    expected = fun(*args)
    torch.testing.assert_close(torch.compile(fun, backend="eager")(*args), expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="torch.func has nothing like this"):
        torch.compile(fun, backend="eager", fullgraph=True)(*args)


@pytest.mark.parametrize("name", ["grad", "vjp", "jacrev", "vmap of grad"])
def test_a_checkpoint_inside_is_ignored_with_a_warning(name):
    body = tr.checkpoint(cube)
    fun = {
        "grad": tr.grad(body),
        "vjp": lambda x: tr.vjp(body, x)[1](torch.ones(())),
        "jacrev": tr.jacrev(body),
        "vmap of grad": tr.vmap(tr.grad(body)),
    }[name]
    x = X.expand(2, 3) if name.startswith("vmap") else X
    expected = fun(x)
    with pytest.warns(CompilerWarning, match="ignore the checkpoints inside"):
        found = torch.compile(fun, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["jvp", "vmap"])
def test_a_checkpoint_inside_is_kept(name):
    body = tr.checkpoint(lambda x: x.sin().cos())
    fun = {"jvp": lambda x: tr.jvp(body, (x,), (x,)), "vmap": tr.vmap(body)}[name]
    expected = fun(X)
    compiled = torch.compile(fun, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), expected)
