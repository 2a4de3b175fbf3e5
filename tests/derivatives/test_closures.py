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


TABLE = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 1.0], [2.0, 0.25, 3.0]], dtype=torch.double)


def product_by_jvp(x):
    function = tr.custom_jvp(lambda x: TABLE @ x)
    function.defjvp(lambda p, t: (TABLE @ p[0], TABLE @ t[0]))
    return function(x)


def product_by_vjp(x):
    function = tr.custom_vjp(lambda x: TABLE @ x)
    function.defvjp(lambda x: (TABLE @ x, None), lambda _, ct: (TABLE.t() @ ct,))
    return function(x)


def product_by_vmap(x):
    function = tr.custom_vmap(lambda x: TABLE @ x)
    function.def_vmap(lambda size, batched, x: (x @ TABLE.t(), True))
    return function(x)


class Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return TABLE @ x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return TABLE.t() @ grad


def gradient_by_autograd(f):
    def run(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(f(x).sin().sum(), x, create_graph=True)[0]

    return run


OF_CONSTANTS = {
    "call": lambda f: f,
    "grad": lambda f: tr.grad(lambda x: f(x).sin().sum()),
    "autograd": gradient_by_autograd,
    "jvp": lambda f: lambda x: tr.jvp(f, (x,), (x.cos(),)),
    "vmap": lambda f: lambda x: tr.vmap(f)(torch.stack([x, 2 * x])),
    "vmap of grad": lambda f: (
        lambda x: tr.vmap(tr.grad(lambda x: f(x).sin().sum()))(torch.stack([x, 2 * x]))
    ),
    "jacrev": lambda f: tr.jacrev(lambda x: f(x).sin()),
}


@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize("transform", OF_CONSTANTS.values(), ids=list(OF_CONSTANTS))
@pytest.mark.parametrize(
    "product", [product_by_jvp, product_by_vjp, product_by_vmap, Product.apply],
    ids=["custom_jvp", "custom_vjp", "custom_vmap", "autograd.Function"],
)  # fmt: skip
def test_rules_that_close_over_constants_inside_a_checkpoint(product, transform, policy):
    if transform is OF_CONSTANTS["jvp"] and product in (product_by_vjp, Product.apply):
        pytest.skip("it has no rule for forward mode")
    x = torch.tensor([0.3, -1.0, 2.0], dtype=torch.double, requires_grad=True)
    expected = transform(lambda x: TABLE @ x)(x)
    checkpointed = tr.checkpoint(transform(product), policy=policy)
    for _ in range(2):
        found = checkpointed(x)
        torch.testing.assert_close(found, expected)
        pairs = (found, expected) if isinstance(found, tuple) else ((found,), (expected,))
        for a, b in zip(*pairs, strict=True):
            ours, theirs = (
                torch.autograd.grad(t.sin().sum(), x, retain_graph=True) for t in (a, b)
            )
            torch.testing.assert_close(ours, theirs)
