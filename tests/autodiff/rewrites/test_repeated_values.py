"""What repeats entries of a smaller tensor is a view of it, with the bits of PyTorch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchremat as tr
from torchremat.autodiff.rewrites import repeated_values
from torchremat.measure import LiveBytes
from torchremat.planning.step.traced_step import region_of

aten = torch.ops.aten
Function = Callable[[Tensor], Tensor]

TARGET = torch.linspace(-1, 1, 8 * 64 * 32).view(8, 64, 32)


def of_squares(x: Tensor) -> Tensor:
    return (x.sin() - TARGET).square().mean()


def of_distances(x: Tensor) -> Tensor:
    return (x.sin() - TARGET).abs().mean() / 3


def of_rows(x: Tensor) -> Tensor:
    return (-(x.sin() * TARGET).mean(1)).exp().sum()


def of_columns(x: Tensor) -> Tensor:
    return (x.exp() / 2).mean(-1, keepdim=True).square().sum()


def in_half_precision(x: Tensor) -> Tensor:
    return (x.bfloat16().sin().float() * 2).mean()


def of_some(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * x, x).mean()


def of_two(x: Tensor) -> Tensor:
    return (x.sin() + x.cos() * 3 - x).mean()


def to_layers(x: Tensor) -> Tensor:  # a sum and a product read the repeated gradient
    return F.linear(x, TARGET[0, :32, :], TARGET[0, 0]).mean()


def with_alpha(x: Tensor) -> Tensor:
    return torch.add(x.sin(), x.cos(), alpha=3).mean()


def turned(x: Tensor) -> Tensor:
    return x.transpose(0, 2).sin().mean() + x.flatten(1).cos().mean(1).sum()


REPEATED = [of_squares, of_distances, of_rows, of_columns, in_half_precision, of_some, of_two]
FUNCTIONS = [*REPEATED, to_layers, with_alpha, turned]


@pytest.fixture(autouse=True)
def small_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_values, "LEAST_NBYTES", 256)


def example(dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0, :3] = torch.tensor([float("nan"), float("inf"), 0.0])
    return x.requires_grad_()


def gradient(function: Function, x: Tensor) -> Tensor:
    return torch.autograd.grad(function(x), x, torch.tensor(1.7))[0]


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("policy", ["everything_saveable", "dots", "full", "budget:100%"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradients_have_the_bits_of_pytorch(function: Function, policy: str) -> None:
    x = example()
    found, wanted = gradient(tr.checkpoint(function, policy=policy), x), gradient(function, x)
    assert torch.equal(bits_of(found), bits_of(wanted))
    assert found.stride() == wanted.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    def function(x: Tensor) -> Tensor:
        return ((x * x / 3).mean(0) - x.exp().mean(0)).sum().float()

    x = example(dtype)
    found = gradient(tr.checkpoint(function, policy="full"), x)
    assert torch.equal(bits_of(found), bits_of(gradient(function, x)))


@pytest.mark.parametrize("function", REPEATED, ids=lambda f: f.__name__)
def test_nothing_repeated_is_written_out(function: Function) -> None:
    nodes = region_of(function, (example(),), {}).joint.module.graph.nodes
    expanded = [n for n in nodes if n.target is aten.expand.default and n.meta["val"].dim() > 1]
    assert expanded
    copying = {aten.div.Scalar, aten.neg.default, aten._to_copy.default}
    assert not [u.target for n in expanded for u in n.users if u.target in copying]
    powers = [n for n in nodes if n.target is aten.pow.Tensor_Scalar]
    assert not [n for n in powers if n.args[1] == 1 and n.meta["val"].dim() == 3]


def test_readers_that_round_otherwise_get_the_whole() -> None:
    nodes = region_of(to_layers, (example(),), {}).joint.module.graph.nodes
    (division,) = [n for n in nodes if n.target is aten.div.Scalar]
    assert division.meta["val"].numel() >= example().numel()


NUMBERS = (3, 0.1, 1 / 3, 4096, 1048577, 1e-3)
SHAPES = (((), (37,)), ((1, 1), (3, 45)), ((3, 1), (3, 45)), ((1, 5), (4, 5)), ((7, 1), (7, 33)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_operators_round_each_entry_by_itself(dtype: torch.dtype) -> None:
    by_number = [aten.div.Scalar, aten.mul.Scalar, aten.div.Tensor, aten.mul.Tensor]
    for small, large in SHAPES:
        x = torch.randn(small).to(dtype) * 10
        repeated, y = x.expand(large), torch.randn(large).to(dtype)
        choose = partial(torch.where, torch.rand(large) < 0.5)
        for op in by_number:
            for number in NUMBERS:
                assert torch.equal(op(repeated, number), op(x, number).expand(large))
        for other in (torch.bfloat16, torch.float16, torch.float32):
            assert torch.equal(repeated.to(other), x.to(other).expand(large))
        for read in (torch.mul, torch.div, torch.add, torch.sub, choose):
            assert torch.equal(read(repeated, y), read(repeated.clone(), y))
            assert torch.equal(read(y, repeated), read(y, repeated.clone()))


def test_a_gradient_that_is_returned_is_written_out() -> None:
    x = example()
    for function in (lambda x: x.mean(), lambda x: x.mean(1).sum()):
        found = gradient(tr.checkpoint(function, policy="full"), x)
        assert found.is_contiguous() and torch.equal(found, gradient(function, x))


def test_a_view_of_a_copy_that_is_returned_is_no_view_of_an_input() -> None:
    class Copying(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return x.pow(1.0).view(x.shape)

    x = example()
    before = x.detach().clone()
    found = gradient(tr.checkpoint(lambda x: Copying.apply(x).sum(), policy="full"), x)
    found.zero_()
    assert torch.equal(bits_of(x.detach()), bits_of(before))


def test_real_peaks_are_smaller() -> None:
    x = torch.randn(64, 128, 32, requires_grad=True)
    target = torch.randn(64, 128, 32)

    def function(x: Tensor) -> Tensor:
        return (x.sin() - target).abs().mean()

    def peak_of(f: Function) -> float:
        gradient(f, x)
        with LiveBytes() as memory:
            gradient(f, x)
        return memory.peak / x.nbytes

    plain, ours = peak_of(function), peak_of(tr.checkpoint(function, policy="everything_saveable"))
    assert ours < plain - 0.9


@pytest.mark.parametrize("policy", ["full", "everything_saveable", "budget:100%"])
def test_sizes_that_change(policy: str) -> None:
    def function(x: Tensor) -> Tensor:
        return (x.sin().square().mean(1) - x.mean((0, 1))).abs().mean()

    changing = tr.checkpoint(function, policy=policy)
    for shape in [(8, 64, 32), (3, 64, 32), (5, 20, 32), (1, 44, 32), (7, 1, 32)]:
        x = torch.randn(shape, requires_grad=True)
        assert torch.equal(gradient(changing, x), gradient(function, x)), shape


def test_second_derivatives_and_batches() -> None:
    x = example().detach().nan_to_num(0.5, 0.5).double().requires_grad_()

    def function(x: Tensor) -> Tensor:
        return (x.sin() * x).square().mean(-1).sum()

    ours = tr.checkpoint(function, policy="everything_saveable")
    for f in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))):
        torch.testing.assert_close(f(ours)(x), f(function)(x))
    found = []
    for f in (ours, function):
        (slope,) = torch.autograd.grad(f(x), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), x)[0])
    torch.testing.assert_close(*found)
