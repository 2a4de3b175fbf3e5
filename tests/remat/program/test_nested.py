"""Checkpoints within checkpoints: the outer policy decides what the forward pass keeps."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torchremat as tr
from tests.helpers import OpCounter, assert_freed, assert_same, bits, derivatives, grad_counts

cp = tr.checkpoint_policies
D = torch.double
GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(4, 4, dtype=D, generator=GENERATOR)
W = torch.randn(4, 4, dtype=D, generator=GENERATOR)


def layer(x, w):
    hidden = tr.checkpoint_name(torch.tanh(x @ w), "hidden")
    return torch.sin(hidden @ w)


def nested(inner, outer):
    block = tr.checkpoint(layer, policy=inner)
    return tr.checkpoint(lambda x, w: block(block(x.cos(), w), w).exp(), policy=outer)


def plain(x, w):
    return layer(layer(x.cos(), w), w).exp()


def leaves():
    return [X.clone().requires_grad_(), W.clone().requires_grad_()]


POLICIES = ["full", "dots", "none", cp.save_only_these_names("hidden")]


@pytest.mark.parametrize("outer", POLICIES, ids=str)
@pytest.mark.parametrize("inner", POLICIES, ids=str)
@pytest.mark.sampled(3)
def test_equal_to_plain(inner, outer):
    """To the bit, but for sums of more than two gradients, which have another order."""
    fun = nested(inner, outer)
    for _ in range(2):
        args = leaves()
        found = derivatives(fun, args, args)
        args = leaves()
        expected = derivatives(plain, args, args)
        assert_same(expected["value"], found["value"])
        assert_same(expected["derivative 1"][0], found["derivative 1"][0])
        assert_same(expected, found, close=True)


@pytest.mark.parametrize(
    ("inner", "outer", "mm", "tanh"),
    [
        # forward products are 4, those of the derivative 8; below: backward, all told
        ("none", "none", 8, 0),
        ("full", "none", 8, 0),
        ("full", "dots", 8, 2),
        ("none", "full", 8 + 3, 1),
        ("full", "full", 8 + 3, 1),
    ],
)
def test_the_outer_policy_decides(inner, outer, mm, tanh):
    fun = nested(inner, outer)
    args = leaves()
    torch.autograd.grad(fun(*args).sum(), args)
    forward, backward = grad_counts(lambda: fun(*args), args, "mm", "tanh")
    assert forward == {"mm": 4, "tanh": 2}
    assert backward["mm"] >= mm
    assert backward["tanh"] >= tanh
    if outer != "full":
        assert backward == {"mm": mm, "tanh": tanh}


def kept(fun, args):
    """The bits of what autograd keeps that is not an argument."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        fun(*args)
    given = {t.untyped_storage().data_ptr() for t in args}
    return {bits(t) for t in found if t.untyped_storage().data_ptr() not in given}


def test_what_is_kept_is_the_outer_policy_s_choice():
    args = leaves()
    first = args[0].cos()
    hidden = torch.tanh(first @ args[1])
    second = torch.sin(hidden @ args[1])
    hiddens = {bits(hidden), bits(torch.tanh(second @ args[1]))}
    for inner in POLICIES:
        assert kept(nested(inner, "full"), args) == set()
        assert kept(nested(inner, cp.save_only_these_names("hidden")), args) == hiddens


def test_an_inner_checkpoint_alone_keeps_its_inputs_for_a_plain_function():
    block = tr.checkpoint(layer)
    args = leaves()
    first = args[0].cos()
    second = layer(first, args[1])
    out = layer(second, args[1])
    found = kept(lambda x, w: block(block(x.cos(), w), w).exp(), args)
    assert found == {bits(first), bits(second), bits(out.exp())}


def test_three_levels():
    def wrap(policies):
        fun = layer
        for policy in policies:
            inner = fun
            fun = tr.checkpoint(lambda x, w, inner=inner: inner(inner(x, w), w), policy=policy)
        return fun

    args = leaves()
    expected = derivatives(lambda x, w: _times(8, x, w), args, args)
    for policies in (["full"] * 3, ["dots", "full", "none"], ["none", "dots", "names:hidden"]):
        found = derivatives(wrap(policies), args, args)
        assert_same(expected["value"], found["value"])
        assert_same(expected, found, close=True)


def _times(count, x, w):
    for _ in range(count):
        x = layer(x, w)
    return x


def test_a_checkpointed_module_within_a_checkpointed_module():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4).double()

        def forward(self, x):
            return torch.tanh(self.fc(x))

    net = nn.Sequential(Block(), Block(), Block())
    wrapped = nn.Sequential(*net)
    for i, block in enumerate(wrapped):
        block.requires_grad_(i != 1)
    x = X.clone().requires_grad_()
    wrt = [x, *(p for p in net.parameters() if p.requires_grad)]
    expected = torch.autograd.grad(net(x).sin().sum(), wrt)
    inner = [tr.checkpoint(block) for block in net]
    for outer in ("full", "dots", "none"):
        fun = tr.checkpoint(lambda x: inner[2](inner[1](inner[0](x))), policy=outer)
        assert_same(expected, torch.autograd.grad(fun(x).sin().sum(), wrt), str(outer))


def test_an_inner_checkpoint_with_unused_outputs():
    inner = tr.checkpoint(lambda x: (x.sin(), x.exp().tanh()))
    fun = tr.checkpoint(lambda x: inner(x)[0].cos())
    x = X.clone().requires_grad_()
    torch.autograd.grad(fun(x).sum(), x)
    y = fun(x).sum()
    with OpCounter() as counter:
        (found,) = torch.autograd.grad(y, x)
    assert counter.only("exp", "tanh") == {"exp": 0, "tanh": 0}
    assert_same(found, torch.autograd.grad(x.sin().cos().sum(), x)[0])


def test_random_numbers_inside():
    inner = tr.checkpoint(lambda x: torch.nn.functional.dropout(x.sin(), 0.5).exp())
    fun = tr.checkpoint(lambda x: inner(inner(x)).cos())
    x = X.clone().requires_grad_()

    def run(f):
        torch.manual_seed(3)
        y = f(x)
        return y.detach(), torch.autograd.grad(y.sum(), x), torch.get_rng_state()

    def without(x):
        for _ in range(2):
            x = torch.nn.functional.dropout(x.sin(), 0.5).exp()
        return x.cos()

    for _ in range(2):
        assert_same(run(without), run(fun))


def test_random_numbers_inside_that_only_the_output_depends_on():
    inner = tr.checkpoint(lambda x: x + torch.rand_like(x))
    outer = tr.checkpoint(lambda x: inner(x).sin().sin())
    three = tr.checkpoint(lambda x: outer(outer(x)).sin())
    x = X.clone().requires_grad_()

    def run(f):
        torch.manual_seed(3)
        y = f(x)
        return y.detach(), torch.autograd.grad(y.sum(), x), torch.get_rng_state()

    def plain(x):
        return (x + torch.rand_like(x)).sin().sin()

    for _ in range(2):
        assert_same(run(plain), run(outer))
        assert_same(run(lambda x: plain(plain(x)).sin()), run(three))


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("outer", ["full", "dots", "none"])
def test_writes_beside_nested_checkpoints(outer, drop):
    """Running statistics are written though nothing inside reads them."""

    def build():
        torch.manual_seed(2)
        return nn.Sequential(
            nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(drop)), nn.BatchNorm1d(4)
        ).double()

    plain, net = build(), build()
    for block in (net[1], net[2]):
        tr.nn.wrap(block)
    tr.nn.wrap(net, outer)
    for _ in range(2):
        for model in (plain, net):
            torch.manual_seed(3)
            model(X).sin().sum().backward()
    assert_same(dict(plain.named_buffers()), dict(net.named_buffers()))
    assert_same([p.grad for p in plain.parameters()], [p.grad for p in net.parameters()])


def test_random_numbers_in_a_checkpoint_that_is_not_differentiated():
    plain = nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(4)).double()
    net = tr.nn.wrap(nn.Sequential(tr.nn.wrap(nn.Dropout(0.3)), nn.BatchNorm1d(4)).double())
    for model in (plain, net):
        torch.manual_seed(3)
        model(X).sin().sum().backward()
    assert_same([p.grad for p in plain.parameters()], [p.grad for p in net.parameters()])


@pytest.mark.filterwarnings("ignore::torchremat.errors.OverrideWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_pytorch_s_checkpoint_around_and_inside(reentrant):
    fun = tr.checkpoint(layer)
    args = leaves()
    expected = torch.autograd.grad(layer(*args).sum(), args)
    out = torch_checkpoint(fun, *args, use_reentrant=reentrant)
    if reentrant:
        out.sum().backward()
        assert_same(expected, tuple(a.grad for a in args))
    else:
        assert_same(expected, torch.autograd.grad(out.sum(), args))
    inside = tr.checkpoint(lambda x, w: torch_checkpoint(layer, x, w, use_reentrant=False))
    assert_same(expected, torch.autograd.grad(inside(*args).sum(), args))


@pytest.mark.filterwarnings("ignore::torchremat.errors.OverrideWarning")
def test_pytorch_s_checkpoint_inside_of_a_function_that_closes_over_parameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4).double()

        def forward(self, x):
            return torch_checkpoint(lambda x: self.fc(x).sin().sin(), x, use_reentrant=False)

    net = Net()
    x = X.clone().requires_grad_()
    wrt = [x, *net.parameters()]
    expected = torch.autograd.grad(net.fc(x).sin().sin().sum(), wrt)
    for policy in POLICIES[:3]:
        assert_same(expected, torch.autograd.grad(tr.checkpoint(net, policy=policy)(x).sum(), wrt))


def test_three_levels_keep_what_the_outermost_policy_names():
    inner = tr.checkpoint(layer)
    middle = tr.checkpoint(lambda x, w: inner(x, w).cos())
    fun = tr.checkpoint(lambda x, w: middle(x, w).exp(), policy="names:hidden")
    args = leaves()
    fun(*args)
    assert kept(fun, args) == {bits(torch.tanh(args[0] @ args[1]))}
    _, backward = grad_counts(lambda: fun(*args), args, "mm", "tanh")
    assert backward == {"mm": 3 + 4, "tanh": 0}, "each level replays what is in it"


def test_the_inner_function_is_freed_with_the_outer_one():
    import weakref

    inner = tr.checkpoint(lambda x: x.sin().exp())
    reference = weakref.ref(inner.fun)
    fun = tr.checkpoint(lambda x: inner(x).cos())  # noqa: F821  (deleted below)
    x = X.clone().requires_grad_()
    torch.autograd.grad(fun(x).sum(), x)
    del inner, fun
    assert_freed(reference)


def test_torch_func_on_a_checkpoint_within_a_checkpoint():
    inner = tr.checkpoint(lambda y: y * 2)
    outer = tr.checkpoint(lambda x: inner(x.sin()).cos())
    x = torch.randn(3, dtype=torch.double)
    found = torch.func.grad(lambda x: outer(x).sum())(x)
    assert_same(found, torch.func.grad(lambda x: (x.sin() * 2).cos().sum())(x))


def test_a_second_derivative_past_an_operand_that_nobody_reads():
    b = torch.randn(3, dtype=torch.double, requires_grad=True)
    inner = tr.checkpoint(lambda y: y.sin() + b)
    outer = tr.checkpoint(lambda x: inner(x.sin()))
    x = torch.randn(3, dtype=torch.double, requires_grad=True)
    plain = derivatives(lambda x: x.sin().sin() + b, [x], [x, b])
    assert_same(derivatives(outer, [x], [x, b]), plain, close=True)


def test_constants_are_told_apart_by_what_they_hold():
    """Dead operators have constants too: their order is not that of another trace."""

    def fun(x):
        x.new_tensor([5.0, 6.0, 7.0])
        y = tr.checkpoint(lambda v: v[[2, 0, 1]].sin())(x) * torch.tensor([1.0, -1.0, 0.5])
        return y[torch.tensor([1, 0, 2])].exp() * x.topk(3).values

    x = torch.randn(3, requires_grad=True)
    for policy in ("full", "none"):
        ours = tr.checkpoint(fun, policy=policy)
        assert_same(derivatives(ours, [x], [x]), derivatives(fun, [x], [x]), close=True)
