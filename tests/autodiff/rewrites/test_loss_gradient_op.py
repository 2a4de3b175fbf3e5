"""The operator of the gradient of cross-entropy gives the bits of the operators it stands for."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from torchremat.autodiff.rewrites.loss_gradient_op import loss_gradient

aten = torch.ops.aten

SHAPES = [(1, 1), (3, 5), (7, 1003), (33, 64), (5, 9, 4), (2, 257, 3), (2, 3, 5, 7), (64, 2050)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def make_arguments(
    shape: tuple[int, ...], dtype: torch.dtype, reduction: int, *, is_weighted: bool, adds: bool
) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(hash((shape, reduction)) % 1000)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    log_probs = torch.log_softmax(draw(*shape) * 3, 1)
    rows = (shape[0], *shape[2:])
    target = torch.randint(0, shape[1], rows, generator=generator)
    target.view(-1)[::4] = -100
    scores = log_probs
    if len(shape) == 3:
        scores, target = log_probs.unsqueeze(2), target.unsqueeze(1)
    weight = draw(shape[1]).abs() if is_weighted else None
    grad = draw(*target.shape) if reduction == 0 else draw()
    total = torch.tensor(float(target.ne(-100).sum()), dtype=dtype)
    addend = draw(*shape) if adds else None
    return grad, scores, target, weight, reduction, -100, total, addend, log_probs, 1


def compute_plainly(arguments: tuple[Any, ...]) -> Tensor:
    *loss, addend, log_probs, dim = arguments
    is_image = loss[1].dim() == 4
    op = aten.nll_loss2d_backward if is_image else aten.nll_loss_backward
    slope = op.default(*loss).view(log_probs.shape)
    slope = slope if addend is None else addend + slope
    return aten._log_softmax_backward_data.default(slope, log_probs, dim, log_probs.dtype)


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_the_operators(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for reduction, is_weighted, adds in product((0, 1, 2), (False, True), (False, True)):
        arguments = make_arguments(shape, dtype, reduction, is_weighted=is_weighted, adds=adds)
        result, plain = loss_gradient(*arguments), compute_plainly(arguments)
        assert result.stride() == plain.stride()
        assert torch.equal(bits_of(result), bits_of(plain))


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-45])
@pytest.mark.parametrize("is_read", ["grad", "log_probs", "addend"])
def test_special_values_keep_their_bits(special: float, is_read: str) -> None:
    arguments = make_arguments((6, 1003), torch.float32, 0, is_weighted=True, adds=True)
    where = {"grad": 0, "addend": 7, "log_probs": 8}[is_read]
    arguments[where].view(-1)[::3] = special
    assert torch.equal(bits_of(loss_gradient(*arguments)), bits_of(compute_plainly(arguments)))


def test_arguments_are_left_as_they_were() -> None:
    arguments = make_arguments((33, 64), torch.float32, 1, is_weighted=True, adds=True)
    before = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    loss_gradient(*arguments)
    for old, new in zip(before, arguments, strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new


def test_it_has_the_derivatives_of_the_operators() -> None:
    arguments = make_arguments((4, 6), torch.float64, 0, is_weighted=True, adds=True)

    def run(op: Any, grad: Tensor, log_probs: Tensor) -> Tensor:
        rest = arguments[1:8]
        return op((grad, *rest, log_probs, 1))

    def merged(args: tuple[Any, ...]) -> Tensor:
        return loss_gradient(*args)

    grad, log_probs = arguments[0], arguments[8]
    tangents = (torch.ones_like(grad), torch.ones_like(log_probs))
    for transform in (
        lambda op: torch.func.jacrev(lambda *a: run(op, *a), (0, 1))(grad, log_probs),
        lambda op: torch.func.jvp(lambda *a: run(op, *a), (grad, log_probs), tangents),
        lambda op: torch.vmap(lambda g: run(op, g, log_probs))(torch.stack([grad, 2 * grad])),
        lambda op: torch.func.hessian(lambda lp: run(op, grad, lp).sum())(log_probs),
    ):
        expected, found = transform(compute_plainly), transform(merged)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_autograd_records_it() -> None:
    arguments = make_arguments((4, 6), torch.float64, 1, is_weighted=False, adds=False)
    grad = arguments[0].requires_grad_()
    result = loss_gradient(grad, *arguments[1:])
    (slope,) = torch.autograd.grad(result.square().sum(), grad)
    (plain,) = torch.autograd.grad(compute_plainly((grad, *arguments[1:])).square().sum(), grad)
    assert torch.equal(slope, plain)
