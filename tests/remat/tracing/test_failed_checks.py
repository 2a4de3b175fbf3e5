"""`if not valid.all(): raise` and assertions on traced tensors: as plain PyTorch, or its error."""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributions as D
from torch import nn

import torchremat as tr
from tests.helpers import assert_same
from torchremat.errors import ConcretizationError
from torchremat.tracing.checks import checks


@pytest.fixture(autouse=True)
def validation():
    """Dynamo switches it off for the whole process when it first traces an optimizer."""
    D.Distribution.set_default_validate_args(True)


def spread(*shape):
    return torch.rand(shape) * 0.8 + 0.1


def positive_definite(n):
    root = torch.randn(n, n)
    return root @ root.mT + 3 * torch.eye(n)


# each with the shapes of its arguments; the negatives of them are no arguments
DISTRIBUTIONS = {
    "Bernoulli": (D.Bernoulli, [(3,)]),
    "Beta": (D.Beta, [(3,), (3,)]),
    "Binomial": (lambda p: D.Binomial(5, p), [(3,)]),
    "Cauchy": (D.Cauchy, [(3,), (3,)]),
    "Chi2": (D.Chi2, [(3,)]),
    "Dirichlet": (D.Dirichlet, [(2, 3)]),
    "Exponential": (D.Exponential, [(3,)]),
    "FisherSnedecor": (D.FisherSnedecor, [(3,), (3,)]),
    "Gamma": (D.Gamma, [(3,), (3,)]),
    "Geometric": (D.Geometric, [(3,)]),
    "Gumbel": (D.Gumbel, [(3,), (3,)]),
    "HalfCauchy": (D.HalfCauchy, [(3,)]),
    "HalfNormal": (D.HalfNormal, [(3,)]),
    "Independent": (lambda a, b: D.Independent(D.Normal(a, b), 1), [(2, 3), (2, 3)]),
    "InverseGamma": (D.InverseGamma, [(3,), (3,)]),
    "Kumaraswamy": (D.Kumaraswamy, [(3,), (3,)]),
    "LKJCholesky": (lambda a: D.LKJCholesky(3, a), [()]),
    "Laplace": (D.Laplace, [(3,), (3,)]),
    "LogNormal": (D.LogNormal, [(3,), (3,)]),
    "LogisticNormal": (D.LogisticNormal, [(3,), (3,)]),
    "Mixture": (
        lambda p, a, b: D.MixtureSameFamily(D.Categorical(p), D.Normal(a, b)),
        [(3,), (3,), (3,)],
    ),
    "NegativeBinomial": (lambda p: D.NegativeBinomial(5, p), [(3,)]),
    "Normal": (D.Normal, [(3,), (3,)]),
    "Pareto": (D.Pareto, [(3,), (3,)]),
    "Poisson": (D.Poisson, [(3,)]),
    "RelaxedBernoulli": (D.RelaxedBernoulli, [(), (3,)]),
    "StudentT": (D.StudentT, [(3,), (3,), (3,)]),
    "Weibull": (D.Weibull, [(3,), (3,)]),
}
ALWAYS_VALID = {
    "Categorical": (lambda p: D.Categorical(logits=p), [(4, 3)]),
    "ContinuousBernoulli": (lambda p: D.ContinuousBernoulli(logits=p), [(3,)]),
    "LowRank": (
        lambda a, b, c: D.LowRankMultivariateNormal(a, b, c.abs()),
        [(3,), (3, 2), (3,)],
    ),
    "Multinomial": (lambda p: D.Multinomial(4, p), [(3,)]),
    "OneHot": (D.OneHotCategorical, [(3,)]),
    "RelaxedOneHot": (D.RelaxedOneHotCategorical, [(), (3,)]),
    "Transformed": (
        lambda a, b: D.TransformedDistribution(D.Normal(a, b.abs()), [D.ExpTransform()]),
        [(3,), (3,)],
    ),
    "Uniform": (lambda a, b: D.Uniform(a, a + b.abs()), [(3,), (3,)]),
}


def draw_and_score(make):
    def run(*arguments):
        distribution = make(*arguments)
        draws = distribution.rsample() if distribution.has_rsample else distribution.sample()
        return draws, distribution.log_prob(draws.detach()).sum()

    return run


def outcome(function, arguments):
    """Results, gradients and the generator after a call; or the error."""
    torch.manual_seed(5)
    arguments = [t.clone().requires_grad_() for t in arguments]
    try:
        results = function(*arguments)
        total = sum(r.sum() for r in results if r.requires_grad)
        grads = torch.autograd.grad(total, arguments, allow_unused=True)
    except ValueError as error:
        return type(error), str(error)
    return results, grads, torch.get_rng_state()


WAYS = {
    "checkpoint": tr.checkpoint,
    "budget": lambda f: tr.checkpoint(f, policy="budget:1MiB"),
    "jit": lambda f: tr.jit(f, backend="eager"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*DISTRIBUTIONS, *ALWAYS_VALID])
@pytest.mark.sampled(3)
def test_distributions(name, way):
    make, shapes = (DISTRIBUTIONS | ALWAYS_VALID)[name]
    plain = draw_and_score(make)
    function = WAYS[way](plain)
    good = [spread(*shape) for shape in shapes]
    for arguments in (good, good, [-t for t in good], [-t for t in good], good):
        expected = outcome(plain, arguments)
        assert (expected[0] is ValueError) == (arguments is not good and name in DISTRIBUTIONS)
        assert_same(outcome(function, arguments), expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_normal_of_many_dimensions(way):
    def plain(loc, covariance):
        normal = D.MultivariateNormal(loc, covariance)
        other = D.MultivariateNormal(loc.detach() * 2, scale_tril=torch.eye(3))
        return normal.rsample(), normal.log_prob(loc * 2), D.kl_divergence(normal, other)

    function = WAYS[way](plain)
    good, loc = positive_definite(3), torch.randn(3)
    for covariance in (good, good, -good, good + torch.arange(3.0), good):
        assert_same(outcome(function, [loc, covariance]), outcome(plain, [loc, covariance]))


@pytest.mark.parametrize("way", WAYS)
def test_sizes_that_vary(way):
    plain = draw_and_score(D.Normal)
    function = WAYS[way](plain)
    for n, sign in ((4, 1), (6, 1), (6, -1), (7, -1), (7, 1), (4, -1)):
        arguments = [torch.randn(n), torch.full((n,), 0.5 * sign)]
        assert_same(outcome(function, arguments), outcome(plain, arguments))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, scale):
        return D.Normal(self.norm(self.linear(x)), scale).rsample()


def test_modules_whose_buffers_are_written():
    """A check that fails after the write: the buffers get it once."""
    torch.manual_seed(0)
    plain = Policy()
    wrapped = tr.nn.wrap(Policy(), "full")
    wrapped.load_state_dict(plain.state_dict())
    x = torch.randn(5, 4)
    for scale in (1.0, 1.0, -1.0, -1.0, 2.0):
        arguments = [x, torch.full((4,), scale)]
        expected = outcome(lambda x, s: [plain(x, s)], arguments)
        assert_same(outcome(lambda x, s: [wrapped(x, s)], arguments), expected)
        assert_same(dict(wrapped.named_buffers()), dict(plain.named_buffers()))


def score(x):
    return D.Normal(x, x.exp() - 0.5).log_prob(x * 2).sum()


MAPPED = {
    "vmap": lambda f: tr.vmap(f),
    "vmap of checkpoint": lambda f: tr.vmap(tr.checkpoint(f)),
    "checkpoint of vmap": lambda f: tr.checkpoint(tr.vmap(f)),
    "vmap of grad": lambda f: tr.vmap(tr.grad(f)),
    "vmap of grad of checkpoint": lambda f: tr.vmap(tr.grad(tr.checkpoint(f))),
    "jit of vmap": lambda f: tr.jit(tr.vmap(f), backend="eager"),
    "nested": lambda f: tr.checkpoint(lambda x: tr.vmap(tr.checkpoint(f))(x)),
}


@pytest.mark.parametrize("way", MAPPED)
def test_mapped(way):
    """Each example must hold."""
    function = MAPPED[way](score)
    each = torch.func.grad(score) if "grad" in way else score
    good = torch.rand(4, 3)
    bad = good.clone()
    bad[2, 1] = -2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            expected = torch.stack([each(row) for row in good])
            torch.testing.assert_close(function(good), expected)
            with pytest.raises(ValueError, match="Expected parameter scale"):
                function(bad)


def catch(x):
    try:
        if not (x > 0).all():
            raise ValueError
    except ValueError:
        return x.abs() * 10
    return x * 2


def return_condition(x):
    positive = x > 0
    if not positive.all():
        return positive
    return x < 1


def catch_outside(x):
    try:
        return tr.checkpoint(score)(x)
    except ValueError:
        return x.sum()


def catch_around_vmap(x):
    rows = torch.arange(1.0, 3.0)[:, None].expand(2, 3)
    try:
        return tr.vmap(lambda row: score(row * x))(rows)
    except ValueError:
        return x.sum().expand(2)


def test_mapped_by_torch():
    """`torch.vmap` refuses branches as always, also once `tr.vmap` has registered its rule."""
    tr.vmap(catch)
    x = torch.rand(4, 3) + 0.2
    torch.testing.assert_close(torch.vmap(tr.checkpoint(catch))(x), x * 2)
    for function, examples in ((catch, x), (catch, -x), (tr.checkpoint(catch), -x)):
        with pytest.raises(RuntimeError, match="data-dependent control flow"):
            torch.vmap(function)(examples)


@pytest.mark.parametrize("function", [catch, return_condition, catch_outside, catch_around_vmap])
def test_some_examples_fail_a_check_and_go_on(function):
    good = torch.rand(4, 3) + 0.2
    some = good * torch.tensor([1.0, -3.0, 1.0, 1.0])[:, None]
    ways = (tr.vmap, lambda f: tr.vmap(tr.checkpoint(f)), lambda f: tr.checkpoint(tr.vmap(f)))
    for mapped in [way(function) for way in ways]:
        for examples in (good, -good * 3, good):
            expected = torch.stack([function(row) for row in examples])
            torch.testing.assert_close(mapped(examples), expected)
        with pytest.raises(
            ConcretizationError, match=r"test_failed_checks\.py.* and not for others"
        ):
            mapped(some)


def test_mapped_over_no_examples():
    assert tr.vmap(catch)(torch.ones(0, 3)).shape == (0, 3)


DERIVATIVES = {
    "grad": lambda f: tr.grad(f),
    "grad of grad": lambda f: tr.grad(lambda x: tr.grad(f)(x).sum()),
    "jvp": lambda f: lambda x: tr.jvp(f, (x,), (torch.ones_like(x),)),
    "hessian": tr.hessian,
    "nested": lambda f: tr.grad(tr.checkpoint(lambda x: f(x) * 2)),
}


@pytest.mark.parametrize("way", DERIVATIVES)
def test_derivatives(way):
    x = torch.rand(3, dtype=torch.float64)
    expected = DERIVATIVES[way](score)(x)
    function = DERIVATIVES[way](tr.checkpoint(score))
    for _ in range(2):
        torch.testing.assert_close(function(x), expected)
        with pytest.raises(ValueError, match="Expected parameter scale"):
            function(-x * 3)


def test_an_error_that_the_function_catches():
    def plain(x):
        try:
            if not (x > 0).all():
                raise ValueError
        except ValueError:
            return torch.dropout(x.abs(), 0.5, train=True)
        return torch.dropout(x * 3, 0.5, train=True)

    function = tr.checkpoint(plain)
    for sign in (1, -1, 1, -1):
        x = [sign * spread(50)]
        call = [lambda *a, f=f: [f(*a)] for f in (function, plain)]
        assert_same(outcome(call[0], x), outcome(call[1], x))


def test_a_loop_that_only_an_error_ends(monkeypatch):
    monkeypatch.setattr(checks, "_MOST_CHECKS", 20)

    def count_up(x):
        while True:
            x = x + 1
            if (x > 5).all():
                raise StopIteration

    with pytest.raises(ConcretizationError, match="count_up"):
        tr.checkpoint(count_up)(torch.ones(3))


def test_verified_recomputation(monkeypatch):
    monkeypatch.setattr(tr.config, "verify_recomputation", "bitwise")
    good = [spread(3), spread(3)]
    plain = draw_and_score(D.Normal)
    function = tr.checkpoint(plain)
    for arguments in (good, [-t for t in good]):
        assert_same(outcome(function, arguments), outcome(plain, arguments))


def test_written_arguments():
    """The writes of a call whose check fails happen once, as far as the function comes."""

    def plain(x, cache):
        cache[0] += x
        assert (x > 0).all()
        cache[1] += x
        return cache.sum() * x.sin()

    function = tr.checkpoint(plain)
    caches = torch.zeros(2, 3), torch.zeros(2, 3)
    for sign in (1, -1, -1, 1):
        for f, cache in zip((plain, function), caches, strict=True):
            with nullcontext() if sign > 0 else pytest.raises(AssertionError):
                f(torch.full((3,), 2.0 * sign), cache)
        assert_same(*caches)


def refuse_unless(condition):
    if not condition:
        raise ValueError("refused")


def check_after_write(x, cache):
    cache.add_(x)
    refuse_unless((x > 0).all())


def check_what_was_written(x, cache):
    cache.add_(x)
    refuse_unless((cache > 0).all())


def check_what_is_drawn_after_a_draw_into(x, cache):
    cache.uniform_()
    refuse_unless((x + torch.rand(3) > 0).all())


def check_in_a_checkpoint(x, cache):
    cache.add_(x)
    refuse_unless(tr.checkpoint(lambda x: D.Normal(x, x).log_prob(x))(x).isfinite().all())


def write_between_checks(x, cache):
    refuse_unless(x.isfinite().all())
    torch.mul(x, 2.0, out=cache)
    refuse_unless((cache.sum() > 0).all())
    cache.cumsum_(0)
    refuse_unless((x.exp() > 1).all())


@pytest.mark.parametrize(
    "write",
    [
        check_after_write,
        check_what_was_written,
        check_what_is_drawn_after_a_draw_into,
        check_in_a_checkpoint,
        write_between_checks,
    ],
)
@pytest.mark.parametrize("policy", ["none", "full", "budget:100%"])
def test_checks_around_writes(write, policy):
    """Whether they run before the write or after it: where one fails nothing was written before."""

    def plain(x, cache):
        with torch.no_grad():
            write(x, cache)
        return [x.sin() * cache]

    function = tr.checkpoint(plain, policy=policy)
    caches = torch.zeros(3), torch.zeros(3)
    for sign in (1, -1, 1, 1, -1):
        x = sign * (torch.arange(3.0) + 1)
        expected = outcome(lambda x: plain(x, caches[0]), [x])
        assert_same(outcome(lambda x: function(x, caches[1]), [x]), expected)
        assert_same(*caches)


def test_what_a_failed_call_leaves_outside():
    seen = []

    def plain(x):
        seen.append(x.sum())
        assert (x > 0).all(), "negative"
        return x.sin()

    function = tr.checkpoint(plain)
    for _ in range(2):
        function(torch.ones(3))
        with pytest.raises(AssertionError, match="negative"):
            function(-torch.ones(3))
    assert [float(value.detach()) for value in seen] == [3.0, -3.0, 3.0, -3.0]


def test_a_graph_without_a_function_takes_no_checks():
    def f(x):
        assert (x > 0).all()
        return x.sin()

    with pytest.raises(ConcretizationError, match=r"test_failed_checks\.py"):
        tr.make_graph(f)(torch.ones(3))
    with pytest.raises(ConcretizationError, match=r"test_failed_checks\.py"):
        tr.jit(f, donate_argnums=0, backend="eager")(torch.ones(3))


def test_reports():
    x = torch.ones(3, requires_grad=True)
    assert tr.saved_residuals(lambda x: score(x) * 2, x)
    tr.checkpoint(score)(x).backward()
