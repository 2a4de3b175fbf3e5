"""`custom_vmap`: the user's rule is called under `vmap`, its derivative under derivatives."""

import pytest
import torch

import torchremat as tr
from torchremat.errors import MissingRuleError, RuleError

X = torch.linspace(0, 1, 6, dtype=torch.float64).reshape(3, 2)


def sine(seen):
    """sin, which its rule computes as it should be, noting each call."""

    @tr.custom_vmap
    def fun(x, y):
        return x.sin() * y

    @fun.def_vmap
    def rule(axis_size, in_batched, xs, ys):
        seen.append((axis_size, in_batched))
        return xs.sin() * ys, True

    return fun


def test_outside_vmap_the_function_runs():
    seen = []
    assert torch.equal(sine(seen)(X, X), X.sin() * X)
    assert not seen


@pytest.mark.parametrize(("in_axes", "flags"), [((0, 0), [True, True]), ((0, None), [True, False])])
def test_the_rule_is_called_with_the_axis_in_front(in_axes, flags):
    seen = []
    y = X if in_axes[1] == 0 else X[0]
    assert torch.equal(tr.vmap(sine(seen), in_axes)(X, y), X.sin() * y)
    assert seen == [(3, flags)]


@pytest.mark.parametrize("argnums", [0, 1])
@pytest.mark.parametrize("make", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd])
def test_the_derivative_of_the_rule_is_used_under_vmap_of_a_derivative(make, argnums):
    seen = []

    def value(fun):
        return lambda x, y: fun(x, y).sum()

    found = tr.vmap(make(value(sine(seen)), argnums), (0, None))(X, X[0])
    expected = torch.func.vmap(make(value(lambda x, y: x.sin() * y), argnums), (0, None))(X, X[0])
    torch.testing.assert_close(found, expected)
    assert seen


@pytest.mark.parametrize(
    "make",
    [
        lambda f: torch.func.grad(lambda x: tr.vmap(f)(x, x).sum()),
        lambda f: tr.vmap(tr.checkpoint(lambda x: f(x, x))),
        lambda f: tr.checkpoint(tr.vmap(lambda x: f(x, x))),
        lambda f: tr.vmap(torch.func.hessian(lambda x: f(x, x).sum())),
        lambda f: tr.vmap(tr.vmap(lambda x: f(x, x))),
        lambda f: lambda x: tr.eval_graph(tr.make_graph(tr.vmap(lambda x: f(x, x)))(x), x),
    ],
)
def test_it_nests(make):
    seen = []
    found = make(sine(seen))(X)
    expected = make(lambda x, y: x.sin() * y)(X)
    torch.testing.assert_close(found, expected)
    assert seen


def test_gradients_flow_through_the_rule():
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(tr.vmap(sine([]))(x, x).sum(), x)
    torch.testing.assert_close(grad, X.cos() * X + X.sin())


def test_trees_and_keywords():
    @tr.custom_vmap
    def fun(tree, scale=2.0):
        return {"y": tree["x"] * scale}

    @fun.def_vmap
    def rule(axis_size, in_batched, tree, scale):
        assert in_batched == [{"x": True}, False]
        return {"y": tree["x"] * scale + 1}, {"y": True}

    assert torch.equal(tr.vmap(lambda x: fun({"x": x}, scale=3.0)["y"])(X), 3 * X + 1)


def test_sequential_vmap_calls_once_for_each_example():
    calls = []

    @tr.sequential_vmap
    def fun(x, y):
        calls.append(x.shape)
        return x + y, y.sum()

    a, b = tr.vmap(fun, (0, None))(X, X[0])
    assert torch.equal(a, X + X[0])
    assert torch.equal(b, X[0].sum().expand(3))
    assert calls == [(2,)] * 3


def test_sequential_vmap_has_derivatives():
    fun = tr.sequential_vmap(lambda x: x.sin().sum())
    torch.testing.assert_close(tr.vmap(torch.func.grad(fun))(X), X.cos())


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (lambda n, b, x: x, "must return a pair"),
        (lambda n, b, x: (x.sum(0), True), "no axis of size 3 in front"),
        (lambda n, b, x: ((x, x), (True,)), "out_batched specification must be a tree prefix"),
    ],
)
def test_a_rule_that_gives_no_result(rule, text):
    fun = tr.custom_vmap(lambda x: x)
    fun.def_vmap(rule)
    with pytest.raises(ValueError, match=text):
        tr.vmap(fun)(X)


def test_a_function_without_a_rule():
    with pytest.raises(
        MissingRuleError, match=r"No batching rule defined for custom_vmap function <lambda> using"
    ):
        tr.vmap(tr.custom_vmap(lambda x: x))(X)


def test_flags_of_another_structure_than_the_outputs_are_refused():
    @tr.custom_vmap
    def pair(x):
        return x, x

    @pair.def_vmap
    def rule(axis_size, in_batched, x):
        return (x, x), (True, True, True)

    with pytest.raises(RuleError, match=r"output batching specification .* rule \(rule\) do not"):
        tr.vmap(pair)(X)


@pytest.mark.parametrize(
    "rule",
    [
        lambda n, b, x: ((x, x), True),
        lambda n, b, x: ({"a": x}, True),
        lambda n, b, x: ([x, {"a": x, "b": x}], True),
        lambda n, b, x: ((x, {"b": x, "a": x, "c": x}), True),
    ],
)
@pytest.mark.parametrize("around", [lambda f: f, lambda f: tr.grad(lambda x: f(x)[0].sum())])
def test_a_rule_of_another_structure_than_the_function_is_refused(rule, around):
    """The words are those of jax.custom_batching."""
    fun = tr.custom_vmap(lambda x: (x, {"a": x.sin(), "b": 1.5}))
    fun.def_vmap(rule)
    for _ in range(2):
        with pytest.raises(RuleError, match="does not match that of original custom-vmapped func"):
            tr.vmap(around(fun))(X)


def test_a_function_that_cannot_be_traced_may_have_any_rule():
    fun = tr.custom_vmap(lambda x: torch.from_numpy(x.numpy() * 2))
    fun.def_vmap(lambda n, b, x: ((x, x), True))
    assert torch.equal(tr.vmap(fun)(X)[1], X)


def test_the_function_leaves_nothing_where_its_structure_is_asked_for():
    left = []
    fun = tr.custom_vmap(lambda x: (left.append(x), x)[1])
    fun.def_vmap(lambda n, b, x: (2 * x, True))
    assert torch.equal(tr.vmap(fun)(X), 2 * X)
    assert torch.equal(tr.vmap(fun)(X), 2 * X)
    assert not left
