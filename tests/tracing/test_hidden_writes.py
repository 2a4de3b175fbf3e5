"""Operators that write to arguments, or nest their results, in ways that schemas do not say.

Those of cuDNN run on a GPU only. Here PyTorch's CPU kernels run under their names.
"""

import copy

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same

aten = torch.ops.aten


def run_batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    results = aten.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
    return (*results, x.new_empty((0,), dtype=torch.uint8))


def differentiate_batch_norm(x, cotangent, weight, *rest):
    *statistics, eps, _ = rest  # the last is what cuDNN keeps
    return aten.native_batch_norm_backward(
        cotangent, x, weight, *statistics, True, eps, [True, True, True]
    )


@pytest.fixture
def cudnn_on_cpu():
    library = torch.library.Library("aten", "IMPL")
    library.impl("cudnn_batch_norm", run_batch_norm, "CPU")
    library.impl("cudnn_batch_norm_backward", differentiate_batch_norm, "CPU")
    yield
    library._destroy()


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        norm = self.norm
        y = torch.cudnn_batch_norm(
            self.conv(x), norm.weight, norm.bias, norm.running_mean, norm.running_var,
            self.training, 0.1, 1e-5,
        )  # fmt: skip
        return y[0].sigmoid().square().sum()


@pytest.mark.parametrize("policy", ["full", "none", "dots", "budget:90%"])
def test_statistics_are_updated_once(cudnn_on_cpu, policy):
    torch.manual_seed(0)
    plain = Normalised()
    ours = copy.deepcopy(plain)
    step = tr.checkpoint(ours, policy=policy)
    for seed in range(3):
        x = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(seed))
        plain(x).backward()
        step(x).backward()
    assert_same(dict(ours.named_buffers()), dict(plain.named_buffers()))
    gradients = [[p.grad for p in model.parameters()] for model in (ours, plain)]
    assert_same(*gradients)


def test_the_graph_says_what_is_written(cudnn_on_cpu):
    model = Normalised()
    plan = tr.plan(model, torch.randn(4, 3, 9, 9), budget="100%")
    names = [str(node.target) for node in plan.forward_graph.graph.nodes]
    assert "torchremat.functional_cudnn_batch_norm.default" in names
    assert names.count("aten.copy.default") == 2


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_second_derivatives(cudnn_on_cpu, policy):
    torch.manual_seed(0)
    plain = Normalised()
    ours = copy.deepcopy(plain)
    x = torch.randn(4, 3, 9, 9, requires_grad=True)

    def penalty(run, model):
        (slope,) = torch.autograd.grad(run(x), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), list(model.parameters()))

    expected = penalty(plain, plain)
    assert_same(penalty(tr.checkpoint(ours, policy=policy), ours), expected)
    assert_same(dict(ours.named_buffers()), dict(plain.named_buffers()))


def test_a_call_in_evaluation_writes_nothing(cudnn_on_cpu):
    model = Normalised().eval()
    before = copy.deepcopy(dict(model.named_buffers()))
    x = torch.randn(4, 3, 9, 9)
    expected = model(x)
    with torch.no_grad():
        assert_same(tr.checkpoint(model)(x), expected.detach())
    assert_same(dict(model.named_buffers()), before)


@torch.library.custom_op("torchremat_tests::scale_all", mutates_args=())
def scale_all(x: torch.Tensor, rest: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return x * 2, [3 * t for t in rest]


@scale_all.register_fake
def _(x, rest):
    return torch.empty_like(x), [torch.empty_like(t) for t in rest]


def _differentiate(ctx, cotangent, of_rest):
    return scale_all(cotangent, of_rest)


scale_all.register_autograd(_differentiate)


@pytest.mark.parametrize("policy", ["full", "none", "budget:95%"])
def test_results_may_be_lists_of_tensors(policy):
    """As the derivatives of recurrent layers on a GPU give the gradients of all weights."""

    def f(x, y, z):
        a, (b, c) = scale_all(x.sin(), [y.cos(), z.exp()])
        return (a * b * c).sum()

    inputs = [torch.randn(16, 16, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(f(*inputs), inputs)
    assert_same(torch.autograd.grad(tr.checkpoint(f, policy=policy)(*inputs), inputs), expected)


def test_lists_are_planned():
    def f(x, y, z):
        a, (b, c) = scale_all(x.sin(), [y.cos(), z.exp()])
        return (a * b * c).sum()

    inputs = [torch.randn(16, 16, requires_grad=True) for _ in range(3)]
    plan = tr.plan(f, *inputs, budget="100%")
    flat = torch.ops.torchremat.flat_torchremat_tests_scale_all.default
    for graph in (plan.forward_graph, plan.backward_graph):
        assert len(graph.graph.find_nodes(op="call_function", target=flat)) == 1


def test_flat_operators_are_differentiated_as_those_that_they_are_made_of():
    """A graph that has one may be traced again, for a derivative of it."""
    tr.plan(lambda x, y: scale_all(x.sin(), [y])[0].sum(), *torch.ones(2, 3), budget="100%")
    x, y = torch.ones(2, 3, requires_grad=True)
    flat = torch.ops.torchremat.flat_torchremat_tests_scale_all
    first, second = flat(x, [y])
    found = torch.autograd.grad((first.square() + second.square()).sum(), (x, y))
    assert_same(found, (8 * x.detach(), 18 * y.detach()))


def test_batch_norm_with_statistics_is_differentiated_as_without(cudnn_on_cpu):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 3, 5, 5), torch.randn(3), torch.randn(3)
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    mean, var = torch.zeros(3), torch.ones(3)
    functional = torch.ops.torchremat.functional_cudnn_batch_norm
    results = functional(*inputs, mean, var, True, 0.1, 1e-5)
    assert_same([mean, var], [torch.zeros(3), torch.ones(3)])
    expected = torch.cudnn_batch_norm(*inputs, mean, var, True, 0.1, 1e-5)[0]
    assert_same([results[0], *results[-2:]], [expected, mean, var])
    gradients = [torch.autograd.grad(y.square().sum(), inputs) for y in (results[0], expected)]
    assert_same(*gradients)
