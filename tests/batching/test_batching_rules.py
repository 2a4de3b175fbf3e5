"""Batching rules of a user hold wherever the operator is mapped, and no longer than they stand."""

import pytest
import torch

import torchremat as tr
from torchremat.batching import (
    axis_primitive_batchers,
    defbroadcasting,
    defreducer,
    defvectorized,
    primitive_batchers,
    spmd_axis_primitive_batchers,
)
from torchremat.errors import RegistrationError, RegistrationTypeError, RuleError

aten = torch.ops.aten
REGISTRIES = (primitive_batchers, axis_primitive_batchers, spmd_axis_primitive_batchers)


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    for registry in REGISTRIES:
        registry.clear()


@pytest.fixture
def seen():
    """Calls of a rule for sin that adds 1 to what it should give."""
    found = []

    def rule(vals, dims, **params):
        found.append((vals[0].shape, dims, params))
        return aten.sin.default(vals[0]) + 1, dims[0]

    primitive_batchers[aten.sin.default] = rule
    return found


X = torch.linspace(0, 1, 6, dtype=torch.float64).reshape(3, 2)


def test_a_rule_is_called_with_all_examples(seen):
    assert torch.equal(tr.vmap(torch.sin, 1, 1)(X), X.sin() + 1)
    assert seen == [((3, 2), [1], {})]


def test_a_rule_is_not_called_for_what_is_not_mapped(seen):
    y = torch.ones(2, dtype=X.dtype)
    assert torch.equal(tr.vmap(lambda x: x * y.sin())(X), X * y.sin())
    assert not seen


@pytest.mark.parametrize(
    "make",
    [
        lambda: tr.vmap(tr.checkpoint(torch.sin)),
        lambda: tr.checkpoint(tr.vmap(torch.sin)),
        lambda: torch.func.vmap(torch.sin),
        lambda: lambda x: tr.eval_graph(tr.batch_graph(tr.make_graph(torch.sin)(x[0]), 3, 0)[0], x),
        lambda: tr.jit(tr.vmap(torch.sin), backend="eager"),
    ],
)
def test_a_rule_holds_in_other_transformations(seen, make):
    assert torch.equal(make()(X), X.sin() + 1)


def test_a_rule_is_called_at_each_level(seen):
    torch.testing.assert_close(tr.vmap(tr.vmap(torch.sin))(X), X.sin() + 2)


def test_the_derivative_of_what_a_rule_gives(seen):
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(tr.vmap(torch.sin)(x).sum(), x)
    torch.testing.assert_close(grad, X.cos())


def test_a_rule_that_is_taken_back_holds_no_more(seen):
    del primitive_batchers[aten.sin.default]
    assert torch.equal(tr.vmap(torch.sin)(X), X.sin())
    assert torch.equal(torch.func.vmap(torch.sin)(X), X.sin())
    assert not seen


def test_a_rule_may_know_the_axis():
    def rule(axis_size, axis_name, trace_type, vals, dims, **params):
        found.append((axis_size, axis_name, trace_type))
        return aten.sin.default(*vals), dims[0]

    found = []
    axis_primitive_batchers[aten.sin.default] = rule
    tr.vmap(torch.sin, axis_name="i")(X)
    tr.vmap(torch.sin)(X)
    assert found == [(3, "i", None), (3, None, None)]


def test_a_rule_for_a_mesh_axis_holds_where_there_is_one():
    def rule(spmd_axis_name, axis_size, axis_name, trace_type, vals, dims, **params):
        found.append((spmd_axis_name, axis_size, axis_name))
        return aten.sin.default(*vals), dims[0]

    found = []
    spmd_axis_primitive_batchers[aten.sin.default] = rule
    assert torch.equal(tr.vmap(torch.sin)(X), X.sin())
    assert torch.equal(tr.vmap(torch.sin, spmd_axis_name="data")(X), X.sin())
    assert found == [("data", 3, None)]


def test_lists_of_tensors_come_one_by_one():
    def rule(vals, dims, **params):
        found.append((len(vals), dims, params))
        vals = [v if d is None else v.movedim(d, 0) for v, d in zip(vals, dims, strict=True)]
        vals = [v.expand(3, *v.shape) if d is None else v for v, d in zip(vals, dims, strict=True)]
        return aten.cat.default(vals, params["dim"] + 1), 0

    found = []
    primitive_batchers[aten.cat.default] = rule
    y = torch.ones(1, dtype=X.dtype)
    got = tr.vmap(lambda x: torch.cat([x, y]))(X)
    assert torch.equal(got, torch.cat([X, y.expand(3, 1)], 1))
    assert found == [(2, [0, None], {"dim": 0})]


@pytest.mark.parametrize("in_axes", [(0, 0), (1, 1), (0, None), (None, 1), (1, 0)])
def test_defbroadcasting(in_axes):
    x, y = torch.randn(3, 3, 3), torch.randn(3, 3)
    expected = torch.func.vmap(torch.add, in_axes)(x, y)
    defbroadcasting(aten.add.Tensor)
    assert torch.equal(tr.vmap(torch.add, in_axes)(x, y), expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dim", [0, 1, -1, (0, 1), ()])
@pytest.mark.parametrize("keepdim", [False, True])
def test_defreducer(axis, dim, keepdim):
    def fun(x):
        return x.amax(dim, keepdim)

    x = torch.randn(2, 3, 4)
    expected = torch.func.vmap(fun, axis)(x)
    defreducer(aten.amax.default)
    assert torch.equal(tr.vmap(fun, axis)(x), expected)


def test_defvectorized_wants_one_place():
    defvectorized(aten.mul.Tensor)
    assert torch.equal(tr.vmap(torch.mul, 1, 1)(X, X), X * X)
    with pytest.raises(RuleError, match="use defbroadcasting"):
        tr.vmap(torch.mul, (0, 1))(X, X.T)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (lambda vals, dims: (vals[0], "0"), "must give an int or None as axis"),
        (lambda vals, dims: ([vals[0]], [0, 1]), "gave 1 outputs and 2 axes"),
        (lambda vals, dims: (3, 0), "must give a tensor and its axis"),
        (lambda vals, dims: (vals[0], 5), "out of bounds"),
        (lambda vals, dims: None, "must give a pair"),
        (lambda vals, dims: vals[0], "must give a pair"),
        (lambda vals, dims: (torch.zeros(7, 2), 0), r"has \d+ examples, .* shape \(7, 2\)"),
    ],
)
def test_a_rule_that_gives_no_result(rule, text):
    primitive_batchers[aten.sin.default] = rule
    with pytest.raises(ValueError, match=text):
        tr.vmap(torch.sin)(X)


@pytest.mark.parametrize(
    ("op", "fun"),
    [
        (aten.sum.default, lambda x: x.sum()),
        (aten.mean.default, lambda x: x.mean()),
        (aten.prod.default, lambda x: x.prod()),
    ],
)
def test_reductions_over_all_are_mapped_by_their_overload_with_dims(op, fun):
    x = torch.linspace(0.5, 2, 24).reshape(2, 3, 4)
    expected = torch.stack([fun(x[:, i]) for i in range(3)])
    defreducer(op)
    torch.testing.assert_close(tr.vmap(fun, 1)(x), expected)


def test_rules_are_registered_for_overloads():
    with pytest.raises(RegistrationTypeError, match="OpOverload"):
        primitive_batchers[torch.sin] = lambda vals, dims: (vals[0], dims[0])
    with pytest.raises(RegistrationError, match="no argument 'dim'"):
        defreducer(aten.sin.default)
