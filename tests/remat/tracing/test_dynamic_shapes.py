"""One graph for many sizes: how often a function is traced, and that it is right at each."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchremat as tr
from tests.helpers import assert_same, derivatives, skip_before_2_13
from torchremat.errors import RetraceWarning

LENGTHS = (5, 7, 9, 4, 11, 5, 30)


class Traced:
    """`fun` under a checkpoint, with a count of the times that its body ran."""

    def __init__(self, fun, **options):
        self._runs = itertools.count()  # a plain number would be put back where a trace is checked

        def body(*args, **kwargs):
            next(self._runs)
            return fun(*args, **kwargs)

        self.body = body  # a checkpoint does not keep its function alive
        self.fun = tr.checkpoint(body, **options)

    def __call__(self, *args, **kwargs):
        return self.fun(*args, **kwargs)

    @property
    def count(self):
        return int(repr(self._runs)[len("count(") : -1])


def sample(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.double).requires_grad_()


weight = sample(8, 8, seed=1)


def attention(x):
    batch, length, width = x.shape
    q = (x.reshape(batch * length, width) @ weight).view(batch, length, width)
    scores = torch.softmax(q @ x.transpose(1, 2) / length**0.5, -1)
    position = torch.arange(length, dtype=x.dtype)[None, :, None]
    return scores @ q + F.dropout(position.cos() * x.mean(), 0.3)


FUNCTIONS = {
    "attention": attention,
    "sdpa": lambda x: F.scaled_dot_product_attention(x, x * 2, x.sin()),
    "causal": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "norm": lambda x: F.layer_norm(x, (8,)) + F.rms_norm(x, (8,)),
    "cat": lambda x: torch.cat([x, x.flip(1)[:, : x.shape[1] // 2]], 1).cumsum(1),
    "split": lambda x: x[:, 1:] * x[:, :-1].sin() - x.narrow(1, 0, x.shape[1] - 1),
    "mask": lambda x: x.masked_fill(torch.ones(x.shape[1], 8).triu() > 0, 0.5).exp(),
    "pool": lambda x: F.avg_pool1d(x.mT, 2) @ weight[:1, :1].expand(x.shape[1] // 2, 3),
    "einsum": lambda x: torch.einsum("bld,de,bme->blm", x, weight, x).tanh(),
    "write": lambda x: _written(x),
    "pad": lambda x: F.pad(x, (0, 0, 2, 1)).unfold(1, 3, 1).prod(-1),
    "sort": lambda x: x.sort(1).values * torch.gather(x, 1, x.argsort(1)),
    "conv": lambda x: F.conv1d(x.transpose(1, 2), weight[:, :, None].expand(8, 8, 2), padding=1),
    "embedding": lambda x: F.embedding(x.detach().abs().long() % 8, weight).sum(2),
    "lists": lambda x: torch.stack([t.sin() for t in x.unbind(2)]).logsumexp(1),
    "reshape": lambda x: x.transpose(0, 1).reshape(-1, 16).sin().view(x.shape[1], -1),
}


HAVE_BATCHED_MATMUL = ("attention", "sdpa", "causal", "pool", "einsum")


def skip_where_matmul_reads_sizes():
    skip_before_2_13(
        "torch.matmul of batches reads sizes as numbers, so that each length is traced"
    )


def _written(x):
    y = x * 2
    y[:, 0] = x[:, -1].sin()
    y.add_(x)
    return y.t_() if y.dim() == 2 else y


@pytest.mark.parametrize("policy", ["full", "dots", "none"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sampled(3)
def test_a_length_that_varies(name, policy):
    fun = FUNCTIONS[name]
    ours = Traced(fun, policy=policy)
    for length in LENGTHS:
        x = sample(2, length, 8, seed=length)
        wrt = [x, weight]
        assert_same(
            derivatives(ours, [x], wrt, order=1), derivatives(fun, [x], wrt, order=1), f"{length}"
        )
    if name in HAVE_BATCHED_MATMUL:
        skip_where_matmul_reads_sizes()
    assert ours.count == 2


def test_batch_and_length_vary():
    ours = Traced(attention)
    for batch, length in ((2, 5), (2, 7), (3, 7), (4, 9), (9, 9), (6, 2), (2, 5), (3, 64)):
        x = sample(batch, length, 8, seed=length)
        wrt = [x, weight]
        assert_same(derivatives(ours, [x], wrt, order=1), derivatives(attention, [x], wrt, order=1))
    skip_where_matmul_reads_sizes()
    assert ours.count <= 4


def test_sizes_of_two_arguments_that_are_the_same():
    def fun(x, mask, scale):
        return torch.where(mask[:, :, None], x, -x) * scale

    ours = Traced(fun)
    for length in LENGTHS:
        x, scale = sample(2, length, 3), sample(1, length, 1, seed=2)
        mask = torch.arange(length)[None] % 2 == torch.tensor([[0], [1]])
        args = [x, mask, scale]
        assert_same(
            derivatives(ours, args, [x, scale]), derivatives(fun, args, [x, scale]), close=True
        )
    with pytest.raises(RuntimeError, match=r"Attempting to broadcast"):
        ours(sample(2, 6, 3), torch.ones(2, 7, dtype=torch.bool), sample(1, 6, 1))


@pytest.mark.parametrize("length", [0, 1])
def test_sizes_of_zero_and_one_stand_for_themselves(length):
    def fun(x, y):
        return (x.sin() * y).sum(1)  # a size of 1 broadcasts

    ours = Traced(fun)
    for n in (4, 6, length, 8, length):
        x, y = sample(2, n), sample(2, 1, seed=3)
        assert_same(derivatives(ours, [x, y], [x, y]), derivatives(fun, [x, y], [x, y]))


def test_a_branch_on_a_size_is_traced_on_both_sides():
    def fun(x):
        return x.sin() if x.shape[0] > 10 else x.cos()

    ours = Traced(fun)
    for length in (4, 6, 11, 8, 20, 3, 30):
        x = sample(length)
        assert_same(derivatives(ours, [x], [x], order=1), derivatives(fun, [x], [x], order=1))
    assert ours.count == 3


def test_second_derivatives_at_each_size():
    ours = Traced(attention, policy="dots")
    for length in LENGTHS:
        x = sample(2, length, 8)
        wrt = [x, weight]
        assert_same(
            derivatives(ours, [x], wrt), derivatives(attention, [x], wrt), f"{length}", close=True
        )


def test_torch_func_at_each_size():
    def fun(x):
        return (x.sin() @ weight).sum()

    ours = Traced(fun)
    for length in (3, 5, 7):
        x = sample(length, 8)
        ours(x).backward()
        assert_same(torch.func.grad(ours)(x), torch.func.grad(fun)(x))
        batch = sample(4, length, 8)
        expected = torch.func.vmap(torch.func.grad(fun))(batch)
        assert_same(torch.func.vmap(torch.func.grad(ours))(batch), expected, close=True)


def test_only_some_outputs_get_a_gradient():
    def fun(x):
        y = x @ weight
        return y.sin(), y.cos().cumsum(0), x.sum()

    ours = Traced(fun)
    for which in (0, 1, 2):
        for length in LENGTHS:
            x = sample(length, 8)
            found = torch.autograd.grad(ours(x)[which].sum(), [x, weight], allow_unused=True)
            expected = torch.autograd.grad(fun(x)[which].sum(), [x, weight], allow_unused=True)
            assert_same(found, expected)
    assert ours.count == 3  # the backward pass for one output is that for all, but for two


def test_layouts_are_told_apart():
    def fun(x):
        return x.sin().view(-1) if x.is_contiguous() else x.cos().reshape(-1)

    ours = Traced(fun)
    for length in (3, 5, 7, 9):
        for x in (sample(length, 4), sample(4, length).detach().t().requires_grad_()):
            assert_same(derivatives(ours, [x], [x]), derivatives(fun, [x], [x]))
    strided = sample(12, 4)[::2]
    assert_same(ours(strided), fun(strided))


def test_nested_checkpoints_are_traced_no_oftener():
    def block(x, w):
        return F.dropout((x @ w).sin(), 0.5) + x.shape[0]

    def fun(x, inner):
        return inner(inner(x, weight).cos(), weight) * x.shape[0] ** 0.5

    inner = Traced(block, policy="dots")
    outer = Traced(lambda x: fun(x, inner))
    for length in LENGTHS:
        x = sample(length, 8)
        wrt = [x, weight]
        found = derivatives(outer, [x], wrt, order=1)
        assert_same(found, derivatives(lambda x: fun(x, block), [x], wrt, order=1), f"{length}")
    assert outer.count == 2
    assert inner.count == 2 + 2  # one for a leaf, one for a result; and inside a graph of symbols


def test_one_length_in_many_modules_with_buffers():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Conv1d(4, 2, 1)
    ).double()
    plain = copy.deepcopy(net)
    tr.nn.wrap(net, policy="ops:aten.convolution")
    for step, (batch, length) in enumerate([(2, 8), (2, 9), (5, 9), (3, 16), (7, 5)]):
        x = sample(batch, 3, length, seed=step)
        results = []
        for module in (net, plain):
            module.zero_grad()
            torch.manual_seed(step)
            y = module(x)
            y.square().sum().backward()
            grads = [p.grad for p in module.parameters()]
            results.append((y, grads, dict(module.named_buffers()), torch.get_rng_state()))
        assert_same(*results)
        report = tr.nn.report(net)
        assert {row.shape[-1] for row in report.rows if row.op == "convolution"} == {length}


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: F.interpolate(x.transpose(1, 2), scale_factor=2.0, mode="linear"),
        lambda x: F.max_pool1d(x.transpose(1, 2), 2),
    ],
)
def test_operators_for_which_pytorch_has_no_rule_for_symbols(fun):
    ours = tr.checkpoint(fun)
    for length in range(6, 14):
        x = sample(2, length, 8)
        assert_same(derivatives(ours, [x], [x], order=1), derivatives(fun, [x], [x], order=1))
    with pytest.warns(RetraceWarning, match="different sizes"):
        ours(sample(2, 20, 8))


def test_needing_the_value_of_a_size_is_warned_of():
    def fun(x):
        for _ in range(x.shape[0]):
            x = x.sin()
        return x * math.sqrt(x.shape[0])

    ours = tr.checkpoint(fun)
    for length in range(2, 10):
        x = sample(length)
        assert_same(derivatives(ours, [x], [x]), derivatives(fun, [x], [x]))
    with pytest.warns(RetraceWarning, match=r"dimension 0 of tensor 0.*range\(x.shape\[0\]\)"):
        ours(sample(20))
    ours(sample(21))  # said once


def test_a_number_made_of_sizes_may_be_returned():
    def fun(x):
        return x.sin(), x.shape[0] * 2

    ours = tr.checkpoint(fun)
    for length in (3, 4, 5):
        value, number = ours(sample(length))
        assert (type(number), number, value.shape[0]) == (int, 2 * length, length)


def test_a_size_handed_to_a_checkpoint_inside():
    @tr.checkpoint
    def inner(x, n):
        return x.sin() * n

    def outer(x):
        return inner(x, x.shape[0]).cos()

    ours = tr.checkpoint(outer)
    for length in (3, 4, 5, 6):
        x = sample(length)
        assert_same(derivatives(ours, [x], [x]), derivatives(outer, [x], [x]))


def test_policies_see_numbers():
    def policy(op, *avals, **params):
        return avals[0].nbytes > 100 and all(type(n) is int for n in avals[0].shape)

    ours = tr.checkpoint(torch.sin, policy=policy)
    for length in (100, 120, 3):
        x = sample(length)
        assert_same(derivatives(ours, [x], [x]), derivatives(torch.sin, [x], [x]))


def test_verification_at_each_size(monkeypatch):
    monkeypatch.setattr(tr.config, "verify_recomputation", "bitwise")
    ours = Traced(attention)
    for length in LENGTHS:
        x = sample(2, length, 8)
        wrt = [x, weight]
        assert_same(derivatives(ours, [x], wrt, order=1), derivatives(attention, [x], wrt, order=1))


def test_the_layout_of_an_input_whose_sizes_do_not_vary():
    def fun(x, w):
        return x @ (w if w.is_contiguous() else w.t().sin())

    ours = tr.checkpoint(fun)
    square = sample(4, 4, seed=2).detach()
    for length in (3, 5, 7):
        for w in (square, square.t()):
            x = sample(length, 4)
            found = derivatives(ours, [x, w], [x], order=1)
            assert_same(found, derivatives(fun, [x, w], [x], order=1))


def test_kept_is_what_was_kept_at_the_size_of_the_trace():
    """At a small size numbers would take less than the state that they are drawn from."""

    def fun(x):
        return (F.dropout(x, 0.5) * x).sin()

    ours = tr.checkpoint(fun)
    for length in (64, 128, 2):
        x = sample(length, 200)
        assert_same(derivatives(ours, [x], [x]), derivatives(fun, [x], [x]), close=True)
