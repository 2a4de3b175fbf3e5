"""Transformations within transformations, where an outer one still differentiates."""

import pytest
import torch

import torchremat as tr
from torchremat.api_util import WrapHashably
from torchremat.errors import EffectError, NotAvailableError

X = torch.tensor(2.0, dtype=torch.double)
XS = torch.tensor([0.3, -0.5, 1.2], dtype=torch.double)


def sin_with_rules():
    sin = tr.custom_vjp(lambda x: torch.sin(x))
    sin.defvjp(lambda x: (torch.sin(x), torch.cos(x)), lambda cos, ct: (cos * ct,))
    return sin


def by_autograd(f, x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(f(leaf), leaf)[0]


SQUARES = {
    "grad grad": lambda f: tr.grad(tr.grad(f))(X),
    "torch.func": lambda f: torch.func.grad(torch.func.grad(f))(X),
    "jacrev jacrev": lambda f: tr.jacrev(tr.jacrev(f))(X),
    "vmap grad grad": lambda f: tr.vmap(tr.grad(tr.grad(f)))(X.expand(2))[1],
    "autograd of grad": lambda f: by_autograd(tr.grad(f), X),
    "grad of value_and_grad": lambda f: tr.grad(lambda x: tr.value_and_grad(f)(x)[1])(X),
    "grad of aux": lambda f: tr.grad(
        lambda x: tr.grad(lambda x: (x, tr.grad(f)(x)), has_aux=True)(x)[1]
    )(X),
    "grad of vjp": lambda f: tr.grad(lambda x: tr.vjp(f, x)[1](torch.ones_like(x))[0])(X),
}


@pytest.mark.parametrize("name", SQUARES)
def test_an_outer_level_differentiates_a_function_with_rules(name):
    sin = sin_with_rules()
    torch.testing.assert_close(SQUARES[name](lambda x: sin(x) ** 2), 2 * torch.cos(2 * X))


VALUES = {
    "value_and_grad": lambda f, x: tr.value_and_grad(f)(x)[0],
    "vjp": lambda f, x: tr.vjp(f, x)[0],
    "aux": lambda f, x: tr.grad(lambda x: (x * x, f(x)), has_aux=True)(x)[1],
    "torch.func": lambda f, x: torch.func.grad_and_value(f)(x)[1],
}


@pytest.mark.parametrize("name", VALUES)
def test_an_outer_level_differentiates_the_value(name):
    sin = sin_with_rules()
    value = lambda x: VALUES[name](sin, x)  # noqa: E731
    torch.testing.assert_close(tr.grad(value)(X), torch.cos(X))
    torch.testing.assert_close(by_autograd(value, X), torch.cos(X))


def halves_and_whole(x):
    return x[:2], x[1:], x


def halves_with_backward_rule():
    halves = tr.custom_vjp(halves_and_whole)
    pad = torch.nn.functional.pad
    halves.defvjp(
        lambda x: (halves_and_whole(x), None),
        lambda _, cts: (pad(cts[0], (0, 1)) + pad(cts[1], (1, 0)) + cts[2],),
    )
    return halves


def halves_with_forward_rule():
    halves = tr.custom_jvp(halves_and_whole)
    halves.defjvp(lambda primals, tangents: (halves(*primals), halves(*tangents)))
    return halves


@pytest.mark.parametrize("make", [halves_with_backward_rule, halves_with_forward_rule])
def test_views_that_a_function_with_rules_returns_share_memory_and_have_gradients(make):
    halves = make()

    def loss(x):
        first, second, whole = halves(x)
        return (first.sin() * second).sum() + (whole**2).sum()

    plain = lambda x: (x[:2].sin() * x[1:]).sum() + (x**2).sum()  # noqa: E731
    found = tr.jacrev(tr.grad(loss))(XS)
    torch.testing.assert_close(found, torch.func.hessian(plain)(XS))
    assert [t.data_ptr() for t in halves(XS)] == [XS.data_ptr(), XS[1:].data_ptr(), XS.data_ptr()]


JACOBIANS = {
    "constant": (tr.jacfwd, lambda x: torch.ones(2, 3, dtype=torch.double)),
    "sine and constant": (tr.jacfwd, lambda x: (x.sin(), torch.ones(2, dtype=torch.double))),
    "sum": (tr.hessian, lambda x: x.sum()),
    "constant sum": (tr.hessian, lambda x: torch.ones((), dtype=torch.double)),
    "linear": (tr.jacfwd, lambda x: x.outer(x)),
}


@pytest.mark.parametrize("name", JACOBIANS)
def test_columns_of_outputs_without_a_tangent_are_zero(name):
    derive, f = JACOBIANS[name]
    oracle = {tr.jacfwd: torch.func.jacfwd, tr.hessian: torch.func.hessian}[derive](f)
    torch.testing.assert_close(derive(f)(XS), oracle(XS))
    rows = torch.stack([XS, 2 * XS])
    for vmap in (tr.vmap, torch.func.vmap):
        torch.testing.assert_close(vmap(derive(f))(rows), torch.func.vmap(oracle)(rows))


def test_auxiliary_data_of_mapped_columns():
    rows = torch.stack([XS, 2 * XS])
    f = lambda x: (x.sin(), (x.argmax(), x * 2))  # noqa: E731
    found = tr.vmap(tr.jacfwd(f, has_aux=True))(rows)
    torch.testing.assert_close(found, torch.func.vmap(torch.func.jacfwd(f, has_aux=True))(rows))


@pytest.fixture
def total():
    """A linear function whose rule applies it to its own tangents."""
    total = tr.custom_jvp(lambda x: torch.cumsum(x, 0))
    total.defjvp(lambda primals, tangents: (total(*primals), 3 * total(*tangents)))
    return total


LINEAR = {
    "grad": lambda f: tr.grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: tr.jvp(lambda x: f(x).sum(), (x,), (x,))[1],
    "autograd": lambda f: lambda x: by_autograd(lambda x: f(x).sum(), x),
    "jacrev": tr.jacrev,
    "hessian": lambda f: tr.hessian(lambda x: (f(x) ** 2).sum()),
    "vmap grad": lambda f: lambda x: tr.vmap(tr.grad(lambda x: f(x).sum()))(torch.stack([x, x])),
    "grad vmap": lambda f: tr.grad(lambda x: tr.vmap(f)(torch.stack([x, x])).sum()),
    "grad grad": lambda f: tr.grad(lambda x: tr.grad(lambda x: (f(x) ** 3).sum())(x).sum()),
    "autograd twice": lambda f: (
        lambda x: by_autograd(
            lambda x: torch.autograd.grad((f(x) ** 3).sum(), x, create_graph=True)[0].sum(), x
        )
    ),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_rule_applies_its_function_to_its_own_tangents(total, name, checkpoints):
    plain = tr.custom_jvp(lambda x: torch.cumsum(x, 0))
    plain.defjvp(lambda p, t: (plain(*p), 3 * torch.cumsum(t[0], 0)))
    derive = LINEAR[name]
    found = derive(tr.checkpoint(total) if checkpoints else total)(XS)
    torch.testing.assert_close(found, derive(plain)(XS))


def test_a_second_derivative_of_cond_in_a_checkpoint_is_refused():
    f = tr.checkpoint(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).sum())
    x = XS.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    torch.testing.assert_close(first, torch.cos(x))
    with pytest.raises(NotAvailableError, match="second derivative of a checkpoint needs that of"):
        torch.autograd.grad(first.sum(), x)
    with pytest.raises(NotAvailableError, match=r"test_nesting\.py"):
        tr.grad(lambda x: tr.grad(f)(x).sum())(XS)


def test_forward_mode_over_reverse_mode_of_a_checkpoint_that_draws_is_refused():
    f = tr.checkpoint(lambda x, y: torch.nn.functional.dropout(x, 0.5).sum() * y)
    aux = lambda x: tr.grad(lambda y: (y, f(x, y)), has_aux=True)(X)[1]  # noqa: E731
    with pytest.raises(EffectError, match=r"would draw again what aten\.bernoulli"):
        tr.jvp(aux, (XS,), (XS,))


def with_writes_to_a_part(x):
    copy = x * 1.0
    copy[1:].add_(x[:-1])
    return copy.sin()


@pytest.mark.parametrize("f", [lambda x: x[0].sin().expand(3), with_writes_to_a_part])
def test_derivatives_of_checkpoints_that_expand_or_write_to_a_part(f):
    found = tr.hessian(lambda x: (tr.checkpoint(f)(x) ** 2).sum())(XS)
    torch.testing.assert_close(found, torch.func.hessian(lambda x: (f(x) ** 2).sum())(XS))
    found = tr.vmap(tr.jacrev(tr.checkpoint(f)))(torch.stack([XS, 2 * XS]))
    torch.testing.assert_close(found[0], torch.func.jacrev(f)(XS))


def test_a_function_with_a_rule_for_vmap_may_return_integers():
    f = lambda x: (x.sin(), x.argmax())  # noqa: E731
    mapped = tr.custom_vmap(f)
    mapped.def_vmap(lambda size, _, xs: ((xs.sin(), xs.argmax(1)), True))
    found = tr.vjp(mapped, XS)
    assert found[0][1] == 2
    torch.testing.assert_close(found[1]((XS, None))[0], torch.cos(XS) * XS)
    found = tr.vmap(lambda x: tr.jvp(mapped, (x,), (x,)))(torch.stack([XS, XS]))
    torch.testing.assert_close(found[1][0][1], torch.cos(XS) * XS)


@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd"])
def test_a_function_writes_to_an_argument_that_is_not_differentiated(name):
    def f(x, buffer, scale):
        buffer.copy_(x)
        scale.mul_(2)
        return (x * buffer).sum()

    buffer, scale = torch.zeros(3, dtype=torch.double), torch.ones(1)
    found = getattr(tr, name)(f)(XS, buffer, scale=scale)
    expected = getattr(torch.func, name)(f)(XS, torch.zeros_like(XS), torch.ones(1))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(buffer, XS)
    assert scale.item() == 2 and not buffer.requires_grad


def test_names_that_jax_has():
    lowered = tr.jit(torch.sin, backend="eager").lower(XS)
    assert str(lowered) == lowered.as_text() and "sin" in str(lowered)
    assert WrapHashably([1]).val == [1]


AROUND = {
    "checkpoint": tr.checkpoint,
    "saves everything": lambda f: tr.checkpoint(f, policy="none"),
    "jit": lambda f: tr.jit(f, backend="eager"),
    "nested": lambda f: tr.checkpoint(tr.jit(f, backend="eager")),
}


@pytest.mark.parametrize(
    "f", [lambda x: x, lambda x: x[1], lambda x: (x.unsqueeze(1), x.sin(), x[1:])]
)
@pytest.mark.parametrize("name", AROUND)
def test_autograd_differentiates_views_that_linearize_returns(f, name):
    def by_linearize(x):
        out, linear = tr.linearize(AROUND[name](f), x)
        return out, linear(torch.sin(x))

    def gradients(of):
        x = XS.clone().requires_grad_()
        leaves = torch.utils._pytree.tree_leaves(of(x))
        return [torch.autograd.grad(t.sum(), x, retain_graph=True) for t in leaves]

    expected = gradients(lambda x: torch.func.jvp(f, (x,), (torch.sin(x),)))
    torch.testing.assert_close(gradients(by_linearize), expected)


@pytest.mark.parametrize("name", AROUND)
def test_an_output_that_is_saved_for_the_backward_pass_is_differentiable(name):
    f = AROUND[name](torch.sigmoid)
    aux = lambda x: tr.grad(lambda x: (f(x).sum(), f(x)), has_aux=True)(x)[1].sum()  # noqa: E731
    value = lambda x: tr.vjp(f, x)[0].sum()  # noqa: E731
    slope = torch.sigmoid(XS) * (1 - torch.sigmoid(XS))
    for of in (aux, value):
        torch.testing.assert_close(by_autograd(of, XS), slope)
        torch.testing.assert_close(torch.func.grad(of)(XS), slope)


@pytest.mark.parametrize("vmap", [tr.vmap, torch.func.vmap])
@pytest.mark.parametrize("index", [0, -1])
def test_a_mapped_write_to_a_row_has_its_gradient_once(vmap, index):
    def f(x):
        rows = torch.stack([x, x.sin()])
        rows[index] = x * 2
        return rows.sum(0)

    weights = torch.stack([XS, XS + 1])
    for mapped in (vmap(lambda x: tr.linearize(f, x)[0]), vmap(tr.checkpoint(f))):
        found = by_autograd(lambda x: (mapped(x) * weights).sum(), weights)
        plain = by_autograd(lambda x: (torch.stack([f(r) for r in x]) * weights).sum(), weights)
        torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("name", AROUND)
def test_a_view_without_grad_of_a_leaf_has_no_derivative(name):
    x = XS.clone().requires_grad_()
    with torch.no_grad():
        column = AROUND[name](lambda x: x.unsqueeze(1))(x)
    assert column.grad_fn is None
    torch.testing.assert_close(column, XS.unsqueeze(1))
    # the function itself runs without, inside an `autograd.Function`
    mapped = tr.custom_vmap(AROUND[name](lambda x: x.unsqueeze(1)))
    mapped.def_vmap(lambda size, _, xs: (xs.unsqueeze(2), True))
    torch.testing.assert_close(by_autograd(lambda x: (mapped(x) ** 2).sum(), x), 2 * XS)


def test_columns_of_a_function_with_a_rule_for_vmap_that_returns_its_argument():
    same = tr.custom_vmap(lambda x: x)
    same.def_vmap(lambda size, _, xs: (xs, True))
    for derive in (tr.jacfwd, tr.jacrev, tr.hessian):
        oracle = getattr(torch.func, derive.__name__)
        found = derive(lambda x: (same(x) ** 2).sum())(XS)
        torch.testing.assert_close(found, oracle(lambda x: (x**2).sum())(XS))
    torch.testing.assert_close(tr.jacfwd(same)(XS), torch.eye(3, dtype=torch.double))


def test_autograd_differentiates_a_mapped_backward_rule_of_a_jit_twice():
    f = tr.jit(lambda x: x.mean() * x, backend="eager")
    rule = tr.custom_vjp(f)
    rule.defvjp(lambda x: (f(x), x), lambda x, ct: tr.vjp(f, x)[1](ct))
    rows = torch.stack([XS, 2 * XS]).requires_grad_()

    def gradients(out):
        (first,) = torch.autograd.grad((out**2).sum(), rows, create_graph=True)
        return first, *torch.autograd.grad((first**2).sum(), rows)

    expected = gradients(torch.func.vmap(lambda x: x.mean() * x)(rows))
    torch.testing.assert_close(gradients(tr.vmap(rule)(rows)), expected)


def make_sine_with_rule():
    sine = tr.custom_jvp(torch.sin)
    sine.defjvp(lambda primals, tangents: (sine(*primals), tangents[0] * primals[0].cos()))
    return sine


WAYS_THROUGH_BRANCHES = {
    "jvp": lambda f, x: tr.jvp(f, (x,), (x,)),
    "linearize": tr.linearize,
    "jit of grad": lambda f, x: tr.jit(tr.grad(f), backend="eager")(x),
}


@pytest.mark.parametrize("way", WAYS_THROUGH_BRANCHES)
@pytest.mark.parametrize("sine", [torch.sin, make_sine_with_rule()], ids=["plain", "custom_jvp"])
def test_branches_that_pytorch_cannot_differentiate_are_refused(sine, way):
    def fun(x):
        return torch.cond(x.sum() > 0, lambda x: sine(x), lambda x: x.cos(), (x,)).sum()

    checkpointed, x = tr.checkpoint(fun), torch.tensor([0.3, 0.5])
    run = WAYS_THROUGH_BRANCHES[way]
    if way == "jit of grad" and sine is torch.sin:
        assert torch.equal(run(checkpointed, x), x.cos())
        return
    place = r"" if sine is torch.sin and way == "linearize" else r", at test_nesting.py:\d+ \(fun\)"
    with pytest.raises(NotAvailableError, match=f"torch.cond, or an operator like it{place}: "):
        run(checkpointed, x)
