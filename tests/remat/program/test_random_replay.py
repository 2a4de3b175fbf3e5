"""Random numbers: the backward pass has those of the forward, and streams go on as in plain."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchremat as tr
from tests.helpers import assert_same, derivatives
from torchremat.remat.program.random_replay import find_replayed

D = torch.double
ours = torch.Generator()
SHAPE = (60, 64)
weight = torch.randn(64, 64, dtype=D).requires_grad_()

DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of a transpose": lambda x: F.dropout(x.t(), 0.3).t(),
    "dropout in one operator": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "its mask alone": lambda x: x * torch.native_dropout(x, 0.3, True)[1],
    "dropout1d": lambda x: F.dropout1d(x[None], 0.3)[0],
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "rand": lambda x: x * torch.rand(SHAPE, dtype=D),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x * torch.randn(SHAPE, dtype=D),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint": lambda x: x * torch.randint(1, 5, SHAPE),
    "randperm": lambda x: x[torch.randperm(60)],
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(1, 2),
    "normal_": lambda x: x * torch.empty_like(x).normal_(1, 2),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(),
    "bernoulli of a tensor": lambda x: x * torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: x[:, torch.multinomial(x[0].softmax(0), 64)],
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "a generator": lambda x: x * torch.rand(SHAPE, dtype=D, generator=ours),
    "a generator in place": lambda x: x * torch.empty_like(x).bernoulli_(0.5, generator=ours),
    "several": lambda x: F.dropout(F.dropout(x, 0.1).sin() * torch.rand_like(x), 0.5),
}


def in_use(draw):
    return lambda x: draw((x @ weight).sin()).cos() @ weight


def light(draw):
    """A block that reads the weight once, so that gradients are added up in the plain order."""
    return lambda x: draw((x @ weight).sin()).cos()


def streams():
    return torch.get_rng_state(), ours.get_state(), torch.rand(3)


@pytest.mark.parametrize("policy", ["full", "dots", "none"])
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.sampled(3)
def test_draws(name, policy):
    plain = in_use(DRAWS[name])
    fun = tr.checkpoint(plain, policy=policy)
    for seed in range(3):
        x = torch.randn(SHAPE, dtype=D, generator=torch.Generator().manual_seed(seed))
        x.requires_grad_()
        results = []
        for f in (plain, fun):
            ours.manual_seed(seed)
            results.append([derivatives(f, [x], [x, weight], order=1), streams()])
        assert_same(*results)
    ours.manual_seed(0)
    expected = derivatives(plain, [x], [x, weight])
    ours.manual_seed(0)
    assert_same(derivatives(fun, [x], [x, weight]), expected, close=True)


def held(fun, x):
    """The tensors that autograd keeps, apart from inputs."""
    found = []

    def pack(t):
        if t is not x and t is not weight:
            found.append((tuple(t.shape), t.dtype))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = fun(x)
    return found, out


def test_kept_is_the_state_where_that_takes_less():
    fun = tr.checkpoint(in_use(DRAWS["dropout"]))
    x = torch.randn(SHAPE, dtype=D, requires_grad=True)
    assert held(fun, x)[0] == [((5056,), torch.uint8)]
    report = tr.explain(fun, x)
    assert report.total == 5056
    (row,) = [row for row in report if row.decision == "saved"]
    assert "drawn again" in row.reason
    small = torch.randn(3, 64, dtype=D, requires_grad=True)
    assert held(fun, small)[0] == [((3, 64), D)]
    assert tr.explain(fun, small).total == 3 * 64 * 8


def test_an_operator_without_a_generator_runs_again():
    def f(x, w):
        y, mask = torch.native_dropout(x @ w, 0.3, True)
        return (y @ w) * mask

    x, w = (torch.randn(96, 96).requires_grad_() for _ in range(2))
    report = tr.explain(f, x, w, policy="full")
    assert [row.shape for row in report if row.decision == "saved"] == [(5056,)] * 2
    assert_same(
        derivatives(tr.checkpoint(f, policy="full"), (x, w), [x, w]), derivatives(f, (x, w), [x, w])
    )


def test_an_operator_with_a_state_of_its_own_does_not_run_again():
    """A recurrent layer of cuDNN draws from the state of that library."""
    assert find_replayed(torch.ops.aten._cudnn_rnn.default) is None
    assert (
        find_replayed(torch.ops.aten.native_dropout.default)
        is torch.ops.aten.native_dropout.default
    )


def test_a_policy_may_keep_the_numbers():
    for policy in ("none", "ops:aten.bernoulli", "full|ops:aten.bernoulli"):
        fun = tr.checkpoint(in_use(DRAWS["dropout"]), policy=policy)
        x = torch.randn(SHAPE, dtype=D, requires_grad=True)
        assert ((5056,), torch.uint8) not in held(fun, x)[0]
        assert (SHAPE, D) in held(fun, x)[0]


def test_drawing_again_disturbs_nobody():
    fun = tr.checkpoint(in_use(DRAWS["several"]))
    x = torch.randn(SHAPE, dtype=D, requires_grad=True)
    out = fun(x)
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    out.sum().backward()
    assert_same(torch.rand(4), expected)


def test_a_backward_pass_that_is_run_twice():
    fun = tr.checkpoint(in_use(DRAWS["several"]))
    x = torch.randn(SHAPE, dtype=D, requires_grad=True)
    out = fun(x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)
    torch.rand(7)
    assert_same(first, torch.autograd.grad(out, x))


def test_a_region_that_runs_twice_draws_twice():
    block = light(DRAWS["dropout"])
    fun = tr.checkpoint(block)
    x = torch.randn(SHAPE, dtype=D, requires_grad=True)
    assert_same(
        derivatives(lambda x: fun(fun(x)), [x], [x, weight], order=1),
        derivatives(lambda x: block(block(x)), [x], [x, weight], order=1),
    )


@pytest.mark.parametrize("policies", [("full", "full"), ("full", "none"), ("dots", "full")])
def test_regions_within_regions(policies):
    block = light(DRAWS["several"])
    inner = tr.checkpoint(block, policy=policies[0])
    outer = tr.checkpoint(lambda x: F.dropout(inner(inner(x)), 0.2), policy=policies[1])
    x = torch.randn(SHAPE, dtype=D, requires_grad=True)
    assert_same(
        derivatives(outer, [x], [x, weight], order=1),
        derivatives(lambda x: F.dropout(block(block(x)), 0.2), [x], [x, weight], order=1),
    )


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap(randomness):
    def block(x):
        return F.dropout(x.sin() @ weight.detach(), 0.4).cos() * torch.rand(64, dtype=D)

    xs = torch.randn(5, 64, dtype=D)
    results = []
    for fun in (block, tr.checkpoint(block)):
        for mapped in (
            torch.func.vmap(fun, randomness=randomness),
            torch.func.vmap(torch.func.grad(lambda x, f=fun: f(x).sum()), randomness=randomness),
        ):
            torch.manual_seed(3)
            results.append([mapped(xs), torch.get_rng_state()])
    assert_same(results[:2], results[2:], close=True)
    assert_same([r[1] for r in results[:2]], [r[1] for r in results[2:]])


def test_a_generator_of_a_module_that_is_replaced():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.source = torch.Generator().manual_seed(0)

        def forward(self, x):
            return x * torch.rand(x.shape, generator=self.source)

    net, plain = tr.nn.wrap(Noisy()), Noisy()
    for seed in (1, 2):
        net.source = torch.Generator().manual_seed(seed)
        plain.source = torch.Generator().manual_seed(seed)
        assert_same(net(torch.ones(3)), plain(torch.ones(3)))


def test_a_generator_that_is_replaced():
    source = [torch.Generator().manual_seed(1)]

    @tr.checkpoint
    def fun(x):
        return x * torch.rand(3, generator=source[0])

    for seed in (1, 2, 3):
        source[0] = torch.Generator().manual_seed(seed)
        expected = torch.rand(3, generator=torch.Generator().manual_seed(seed))
        assert_same(fun(torch.ones(3)), expected)


def test_a_generator_as_an_argument():
    @tr.checkpoint
    def fun(x, source):
        return x * torch.rand(3, generator=source)

    for seed in (1, 2, 1):
        expected = torch.rand(3, generator=torch.Generator().manual_seed(seed))
        assert_same(fun(torch.ones(3), torch.Generator().manual_seed(seed)), expected)


@pytest.mark.filterwarnings("ignore::torchremat.errors.OverrideWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", ["full", "none"])
def test_a_checkpoint_of_pytorchs_inside_has_the_masks_of_the_forward(policy, reentrant):
    dropout = torch.nn.Dropout(0.5)

    def f(x):
        run = torch.utils.checkpoint.checkpoint
        return run(lambda x: dropout(x) * x, x, use_reentrant=reentrant)

    x = torch.ones(64, requires_grad=True)
    y = tr.checkpoint(f, policy=policy)(x)
    y.sum().backward()
    assert torch.equal(y != 0, x.grad != 0)
