"""Operators on segments under every transformation, and as nodes of graphs."""

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import torchremat as tr
from torchremat.kernels.segments import segment_ops
from torchremat.kernels.segments.segments import (
    segment_expand,
    segment_max,
    segment_min,
    segment_sum,
)

OFFSETS = torch.tensor([0, 2, 2, 5])
CALLS = {
    "sum": lambda x, offsets=OFFSETS: segment_sum(x, offsets),
    "max": lambda x, offsets=OFFSETS: segment_max(x, offsets)[::2],  # an empty segment's is -inf
    "min": lambda x, offsets=OFFSETS: segment_min(x, offsets)[::2],
    "expand": lambda x, offsets=OFFSETS: segment_expand(x, offsets[[0, 1, 1, 2, 2, 3]], 6),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def doubles(*shape, **options):
    return torch.randn(shape, dtype=torch.float64, **options)


@each_call
def test_derivatives_equal_finite_differences(call):
    x = doubles(5, 2, requires_grad=True)
    assert gradcheck(
        call, x, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert gradgradcheck(lambda x: call(x).sin(), x, check_fwd_over_rev=True)


@each_call
@pytest.mark.parametrize("name", ["hessian", "fwd over fwd", "rev over rev", "rev over fwd"])
def test_second_derivatives_by_every_route(call, name):
    func = torch.func
    routes = {
        "hessian": func.hessian,
        "fwd over fwd": lambda f: func.jacfwd(func.jacfwd(f)),
        "rev over rev": lambda f: func.jacrev(func.jacrev(f)),
        "rev over fwd": lambda f: func.jacrev(func.jacfwd(f)),
    }

    def f(x):
        return call(x).sin().sum()

    x = doubles(5)
    expected = torch.autograd.functional.hessian(f, x)
    torch.testing.assert_close(routes[name](f)(x), expected)
    assert expected.abs().sum() > 0


@each_call
def test_tangents_carry_gradients(call):
    """Reverse over forward with dual numbers, on a tensor that autograd records."""
    x, t = doubles(5, requires_grad=True), doubles(5)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(x, t)).sin()).tangent
        (actual,) = torch.autograd.grad(tangent.sum(), x)
    expected = torch.autograd.functional.hessian(lambda x: call(x).sin().sum(), x.detach()) @ t
    torch.testing.assert_close(actual, expected)


@each_call
@pytest.mark.parametrize("in_dims", [(0, None), (1, None), (2, None), (None, 0), (1, 1), (0, 0)])
def test_vmap_equals_a_loop(call, in_dims):
    cuts = torch.stack([OFFSETS, torch.tensor([1, 1, 3, 4]), torch.tensor([0, 0, 0, 2])])
    data_dim, cuts_dim = in_dims
    data = [doubles(5, 2) for _ in range(3)] if data_dim is not None else [doubles(5, 2)] * 3
    rows = [cuts[i] if cuts_dim is not None else OFFSETS for i in range(3)]
    expected = torch.stack([call(x, c) for x, c in zip(data, rows, strict=True)])
    x = data[0] if data_dim is None else torch.stack(data, data_dim)
    c = OFFSETS if cuts_dim is None else torch.stack(rows, cuts_dim)
    torch.testing.assert_close(torch.vmap(call, in_dims)(x, c), expected)


def test_rows_that_tie_share_the_gradient():
    x = torch.tensor([3.0, 3.0, 1.0, 2.0], requires_grad=True)
    segment_max(x, torch.tensor([0, 3, 4])).sum().backward()
    assert x.grad.tolist() == [0.5, 0.5, 0.0, 1.0]


def test_rows_outside_of_all_segments_have_no_gradient():
    x = torch.zeros(4, requires_grad=True)
    y = segment_sum(x, torch.tensor([1, 2, 3])).sum() + segment_max(x, torch.tensor([1, 3]))
    y.backward()
    assert x.grad.tolist() == [0, 1.5, 1.5, 0]


@pytest.mark.parametrize("name", ["segment_sum", "segment_max", "segment_min", "segment_expand"])
# the checks read .grad of what they are given, and hide this warning unless it is an error
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_operators_pass_the_checks_of_pytorch(name):
    x = doubles(3, 2, requires_grad=True)
    args = (x, torch.tensor([0, 1, 1, 3])) + ((3,) if name == "segment_expand" else ())
    results = torch.library.opcheck(segment_ops.OPS[name], args)
    assert set(results.values()) == {"SUCCESS"}


def test_complex_gradients():
    x = torch.randn(5, dtype=torch.complex128, requires_grad=True)
    assert gradcheck(lambda x: segment_sum(x, OFFSETS), x)


def test_is_one_node_and_so_is_its_derivative():
    x = torch.randn(5)
    graph = tr.make_graph(lambda x: segment_sum(x, OFFSETS))(x)
    assert [eqn.op for eqn in graph.eqns] == [torch.ops.torchremat.segment_sum.default]
    grad = tr.make_graph(torch.func.grad(lambda x: segment_sum(x, OFFSETS).sum()))(x)
    assert torch.ops.torchremat.segment_expand.default in [eqn.op for eqn in grad.eqns]
    pushed = [eqn.op for eqn in tr.jvp_graph(graph).eqns]
    assert pushed == [torch.ops.torchremat.segment_sum.default] * 2


@pytest.mark.parametrize("policy", ["none", "full", "ops:torchremat.segment_sum"])
@each_call
@pytest.mark.sampled(3)
def test_in_a_checkpoint(call, policy):
    def f(x):
        return call(x.exp()).sin().sum()

    block = tr.checkpoint(f, policy=policy) if call is CALLS["sum"] else tr.checkpoint(f)
    x = doubles(5)
    torch.testing.assert_close(torch.func.grad(block)(x), torch.func.grad(f)(x))
    torch.testing.assert_close(torch.func.hessian(block)(x), torch.func.hessian(f)(x))


def test_many_lengths_make_two_traces():
    block = tr.checkpoint(lambda x, offsets: segment_sum(x.exp(), offsets).sin())
    for total in (4, 6, 9, 30):
        x = doubles(total, requires_grad=True)
        offsets = torch.tensor([0, 1, total])
        (grad,) = torch.autograd.grad(block(x, offsets).sum(), x)
        (expected,) = torch.autograd.grad(segment_sum(x.exp(), offsets).sin().sum(), x)
        assert torch.equal(grad, expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_under_torch_compile(backend):
    def f(x, offsets):
        return segment_max(segment_sum(x.sin(), offsets), torch.tensor([0, 3])).sum()

    x = doubles(5, 2, requires_grad=True)
    (expected,) = torch.autograd.grad(f(x, OFFSETS), x)
    torch._dynamo.reset()
    (actual,) = torch.autograd.grad(
        torch.compile(f, backend=backend, fullgraph=True)(x, OFFSETS), x
    )
    torch.testing.assert_close(actual, expected)
