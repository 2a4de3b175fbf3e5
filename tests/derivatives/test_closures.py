"""Functions with rules of their own that close over tensors of levels around them."""

import pytest
import torch

import torchremat as tr
from torchremat.errors import ClosureError

XS = torch.arange(3.0)
Z = torch.tensor(1.5)


def scale(kind, x, c):
    """`y -> x * y + c`, with a rule."""
    if kind == "jvp":
        function = tr.custom_jvp(lambda y: x * y + c)
        function.defjvp(lambda primals, tangents: (x * primals[0] + c, x * tangents[0]))
    else:
        function = tr.custom_vjp(lambda y: x * y + c)
        function.defvjp(lambda y: (x * y + c, None), lambda _, ct: (x * ct,))
    return function


def mapped_sum(kind, find_c):
    return lambda z: tr.vmap(lambda x: scale(kind, x, find_c(z))(z))(XS).sum()


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
@pytest.mark.parametrize("derive", [tr.grad, tr.jacfwd, tr.hessian, lambda f: tr.vmap(tr.grad(f))])
def test_a_mapped_tensor_and_one_made_at_a_removed_level(kind, derive):
    if kind == "vjp" and derive is tr.jacfwd:
        pytest.skip("custom_vjp has no forward mode")
    z = Z if derive in (tr.grad, tr.jacfwd, tr.hessian) else Z.repeat(2)
    found = derive(mapped_sum(kind, lambda _: torch.tensor(7.0)))(z)
    torch.testing.assert_close(found, derive(lambda z: (XS * z + 7).sum())(z))


@pytest.mark.parametrize("derive", [tr.grad, tr.jacfwd, tr.hessian])
def test_a_tensor_that_the_removed_level_differentiates(derive):
    with pytest.raises(ClosureError, match="with respect to a closed-over value"):
        derive(mapped_sum("jvp", lambda z: 2 * z))(Z)


def test_a_mapped_tensor_is_the_result():
    def f(z):
        def one(x):
            constant = tr.custom_jvp(lambda _: x)
            constant.defjvp(lambda _, tangents: (x, x * tangents[0]))
            return constant(z)

        return tr.vmap(one)(XS)

    value, tangent = tr.jvp(f, (Z,), (torch.tensor(2.0),))
    torch.testing.assert_close((value, tangent), (XS, 2 * XS))


@pytest.mark.parametrize("how", [lambda f: f, tr.checkpoint, tr.jit, tr.nn.wrap])
@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_closed_over_result_stays_as_it_is(kind, how):
    """PyTorch makes a result of an autograd function, closed over or not, require a gradient."""
    held = torch.tensor(5.0)
    if kind == "jvp":
        function = tr.custom_jvp(lambda _: held)
        function.defjvp(lambda _, tangents: (held, 3 * tangents[0]))
    else:
        function = tr.custom_vjp(lambda _: held)
        function.defvjp(lambda _: (held, None), lambda _, ct: (3 * ct,))
    called = how(Calls(function)) if how is tr.nn.wrap else how(function)
    x = Z.clone().requires_grad_()
    result = called(x)
    result.backward()
    assert (result.item(), x.grad.item()) == (5, 3)
    assert not held.requires_grad
    assert held.grad_fn is None


class Calls(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("with_argument", [True, False])
@pytest.mark.parametrize("transform", [tr.checkpoint, lambda f: tr.jit(f, backend="eager")])
def test_a_closed_over_result_inside_a_mapped_trace(transform, with_argument):
    def outer(x):
        def inner(w):
            constant = tr.custom_jvp(lambda *_: x)
            constant.defjvp(lambda primals, tangents: (x, sum(tangents)))
            return w + (constant(w) if with_argument else constant())

        return transform(inner)(2 * x)

    torch.testing.assert_close(tr.vmap(outer)(XS), 3 * XS)
