"""Gradients of tensors with many readers are added in the order of plain autograd."""

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import torchremat as tr

DIM = 24


def same_bits(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> bool:
    return ours.keys() == plain.keys() and all(torch.equal(ours[n], plain[n]) for n in plain)


def gradients_of(model: nn.Module, *args: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model(*args).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


class CrossAttention(nn.Module):
    """It reads `memory` twice, and `x` four times."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.gate = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(memory).transpose(-1, -2)
        read = scores.softmax(-1) @ self.v(memory)
        return x + read * self.gate(x).sigmoid() + x.tanh()


class EncoderDecoder(nn.Module):
    """All blocks of its decoder read what the encoder made; heads read the states between."""

    def __init__(self, heads: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(CrossAttention() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3 * heads))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x).tanh()
        y = memory.cos()
        loss = y.new_zeros(())
        for i, block in enumerate(self.blocks):
            y = block(y, memory)
            if self.heads:
                loss = loss + self.heads[i](y).square().mean() + (memory * y).mean()
        return loss + y.square().mean()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("policy", ["full", "dots", "budget:95%"])
@pytest.mark.sampled(2)
def test_blocks_that_read_one_tensor_give_the_gradients_of_plain_autograd(
    policy: str, heads: bool
) -> None:
    model, x = EncoderDecoder(heads), torch.randn(3, 40, DIM)
    wrapped = tr.nn.wrap(copy.deepcopy(model), policy, select="blocks.*")
    plain = gradients_of(model, x)
    assert same_bits(gradients_of(wrapped, x), plain)
    whole = tr.checkpoint(wrapped, policy="full")  # checkpoints inside a checkpoint
    whole(x).backward()  # a second time: gradients accumulate
    model(x).backward()
    twice = {name: p.grad for name, p in wrapped.named_parameters()}
    assert same_bits(twice, {name: p.grad for name, p in model.named_parameters()})


def test_a_tensor_passed_three_times_gets_its_gradients_in_order_of_arrival() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.sin() @ k.cos().transpose(-1, -2)).softmax(-1) @ v.exp()

    def loss(attend: Callable[..., Tensor], x: Tensor) -> Tensor:
        y = x * 1.7
        return (attend(y, y, y) + y.tan()).sum() + (attend(y, y.sin(), y) * y).sum()

    x = torch.randn(5, 6, 8, requires_grad=True)
    (plain,) = torch.autograd.grad(loss(attend, x), x)
    (ours,) = torch.autograd.grad(loss(tr.checkpoint(attend), x), x)
    assert torch.equal(ours, plain)


def read_often(x: Tensor, w: Tensor) -> Tensor:
    return x.sin() * w + x.cos() + x.tanh() * w


def loss_of_two_calls(f: Callable[..., Tensor], x: Tensor, w: Tensor) -> Tensor:
    y = x * 1.1
    return (f(y, w * 3) + f(y, w) * y.exp()).square().sum()


@pytest.mark.parametrize("is_leaf", [False, True])
@pytest.mark.parametrize("closes_over", [False, True])
def test_readers_outside_come_before_and_after(closes_over: bool, is_leaf: bool) -> None:
    start = torch.linspace(0, 3, 1000, requires_grad=True)

    def read(x: Tensor) -> Tensor:
        return x.sin() * x.cos() * x

    def read_checkpointed(x: Tensor) -> Tensor:
        return tr.checkpoint(lambda: read(x))() if closes_over else tr.checkpoint(read)(x)

    def gradient(read: Callable[[Tensor], Tensor]) -> Tensor:
        x = start if is_leaf else start * 1.3
        loss = x.exp() + read(x) + x.tanh()
        return torch.autograd.grad(loss.sum(), start)[0]

    found, expected = gradient(read_checkpointed), gradient(read)
    torch.testing.assert_close(found, expected)
    if not is_leaf:  # it could be a weight that is read at many steps
        assert torch.equal(found, expected)


def test_derivatives_of_higher_order_and_partial_backward_passes_stay_right() -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, dtype=torch.float64, requires_grad=True)
    found, expected = (loss_of_two_calls(f, x, w) for f in (tr.checkpoint(read_often), read_often))
    assert torch.equal(
        torch.autograd.grad(found, w, retain_graph=True)[0],
        torch.autograd.grad(expected, w, retain_graph=True)[0],
    )
    (ours,) = torch.autograd.grad(found, x, create_graph=True)
    (plain,) = torch.autograd.grad(expected, x, create_graph=True)
    torch.testing.assert_close(ours, plain)
    again, plain_again = (torch.autograd.grad(g.sum(), (x, w)) for g in (ours, plain))
    torch.testing.assert_close(again, plain_again)
    torch.testing.assert_close(
        torch.func.grad(lambda x: loss_of_two_calls(tr.checkpoint(read_often), x, w))(x),
        torch.func.grad(lambda x: loss_of_two_calls(read_often, x, w))(x),
    )


def test_sizes_that_vary_keep_the_order() -> None:
    f = tr.checkpoint(read_often)
    for size in (5, 6, 7):
        x, w = torch.randn(size, requires_grad=True), torch.randn(size, requires_grad=True)
        ours = torch.autograd.grad(loss_of_two_calls(f, x, w), (x, w))
        plain = torch.autograd.grad(loss_of_two_calls(read_often, x, w), (x, w))
        assert all(map(torch.equal, ours, plain))


def test_outputs_without_cotangent_leave_readers_out() -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.sin() + x.cos(), x.tan() * x.exp(), x

    def loss(f: Callable[..., tuple[Tensor, ...]], x: Tensor, wanted: list[int]) -> Tensor:
        y = x * 1.3
        outputs = f(y)
        return sum(outputs[i].square().sum() for i in wanted) + (y * y.sin()).sum()

    x = torch.randn(9, requires_grad=True)
    for wanted in ([0], [1], [2], [0, 1], [1, 2], [0, 1, 2]):
        (ours,) = torch.autograd.grad(loss(tr.checkpoint(two), x, wanted), x)
        (plain,) = torch.autograd.grad(loss(two, x, wanted), x)
        assert torch.equal(ours, plain), wanted


def test_a_weight_that_is_read_at_many_steps_has_one_gradient_not_many() -> None:
    def unroll(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(50):
            x = (x @ w).tanh()
        return x

    w = torch.randn(64, 64, requires_grad=True)
    f = tr.checkpoint(unroll)
    out = f(torch.randn(1, 64), w * 0.1)
    with tr.measure.LiveBytes() as live:
        out.sum().backward()
    assert live.peak < 8 * w.nbytes
    assert all(a <= b for a, b in pairwise(f.last_program.gradient_slots))
