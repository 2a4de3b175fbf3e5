"""Collectives against plain reductions over the batch, alone and under every transformation."""

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, jvp, vjp

import torchremat as tr
from tests.helpers import assert_same, nothing_left_behind
from torchremat.batching.collectives import collective_ops

N = 4
RING = [(k, (k + 1) % N) for k in range(N)]
GROUPS = [[0, 3], [2, 1]]


def batch(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def over_i(fun, **kwargs):
    return tr.vmap(fun, axis_name="i", **kwargs)


def everywhere(value):
    return torch.stack([value] * N)


def exchanged(x, split, concat):
    """What `jax.lax.all_to_all` documents, by a loop."""
    return torch.stack(
        [torch.stack([y.select(split, k) for y in x], concat) for k in range(len(x))]
    )


def exchanged_tiles(x, split, concat):
    n = len(x)
    return torch.stack([torch.cat([y.chunk(n, split)[k] for y in x], concat) for k in range(n)])


def in_groups(plain):
    """What `plain` does to each group by itself."""

    def apply(x):
        rows = dict(pair for group in GROUPS for pair in zip(group, plain(x[group]), strict=True))
        return torch.stack([rows[k] for k in range(N)])

    return apply


# what an example does, and what comes of all of them, of shape [4, 4, 8]
CASES = {
    "psum": (lambda x: tr.psum(x, "i"), lambda x: everywhere(x.sum(0))),
    "pmean": (lambda x: tr.pmean(x, "i"), lambda x: everywhere(x.mean(0))),
    "pmax": (lambda x: tr.pmax(x, "i"), lambda x: everywhere(x.amax(0))),
    "pmin": (lambda x: tr.pmin(x, "i"), lambda x: everywhere(x.amin(0))),
    "ppermute": (lambda x: tr.ppermute(x, "i", RING), lambda x: x.roll(1, 0)),
    "pshuffle": (lambda x: tr.pshuffle(x, "i", [2, 0, 3, 1]), lambda x: x[[2, 0, 3, 1]]),
    "all_gather": (lambda x: tr.all_gather(x, "i"), everywhere),
    "all_gather 1": (
        lambda x: tr.all_gather(x, "i", axis=1), lambda x: everywhere(x.movedim(0, 1))
    ),
    "all_gather -1": (
        lambda x: tr.all_gather(x, "i", axis=-1), lambda x: everywhere(x.movedim(0, 2))
    ),
    "all_gather tiled": (
        lambda x: tr.all_gather(x, "i", axis=1, tiled=True),
        lambda x: everywhere(torch.cat(list(x), 1)),
    ),
    "psum_scatter": (lambda x: tr.psum_scatter(x, "i"), lambda x: x.sum(0)),
    "psum_scatter tiled": (
        lambda x: tr.psum_scatter(x, "i", scatter_dimension=1, tiled=True),
        lambda x: torch.stack(x.sum(0).chunk(N, 1)),
    ),
    "all_to_all 0 0": (lambda x: tr.all_to_all(x, "i", 0, 0), lambda x: exchanged(x, 0, 0)),
    "all_to_all 0 1": (lambda x: tr.all_to_all(x, "i", 0, 1), lambda x: exchanged(x, 0, 1)),
    "all_to_all 1 0": (
        lambda x: tr.all_to_all(x.mT[:, :4], "i", 1, 0),
        lambda x: exchanged(x.mT[:, :, :4], 1, 0),
    ),
    "all_to_all tiled 1 0": (
        lambda x: tr.all_to_all(x, "i", 1, 0, tiled=True), lambda x: exchanged_tiles(x, 1, 0)
    ),
    "all_to_all tiled 0 1": (
        lambda x: tr.all_to_all(x, "i", 0, 1, tiled=True), lambda x: exchanged_tiles(x, 0, 1)
    ),
    "all_to_all tiled 1 1": (
        lambda x: tr.all_to_all(x, "i", -1, -1, tiled=True), lambda x: exchanged_tiles(x, 1, 1)
    ),
    "axis_index": (
        lambda x: x * tr.axis_index("i"), lambda x: x * torch.arange(N).reshape(N, 1, 1)
    ),
    "psum in groups": (
        lambda x: tr.psum(x, "i", axis_index_groups=GROUPS),
        in_groups(lambda x: torch.stack([x.sum(0)] * 2)),
    ),
    "pmax in groups": (
        lambda x: tr.pmax(x, "i", axis_index_groups=GROUPS),
        in_groups(lambda x: torch.stack([x.amax(0)] * 2)),
    ),
    "all_gather in groups": (
        lambda x: tr.all_gather(x, "i", axis_index_groups=GROUPS, axis=1),
        in_groups(lambda x: torch.stack([x.movedim(0, 1)] * 2)),
    ),
    "psum_scatter in groups": (
        lambda x: tr.psum_scatter(
            x, "i", axis_index_groups=GROUPS, scatter_dimension=1, tiled=True
        ),
        in_groups(lambda x: torch.stack(x.sum(0).chunk(2, 1))),
    ),
    "all_to_all in groups": (
        lambda x: tr.all_to_all(x[:2], "i", 0, 1, axis_index_groups=GROUPS),
        in_groups(lambda x: exchanged(x[:, :2], 0, 1)),
    ),
}  # fmt: skip
case = pytest.mark.parametrize("name", CASES)


def loss_of(name):
    """A loss of one example that is not linear in it, and the sum of all, computed plainly."""
    collective, plain = CASES[name]

    def loss(x):
        y = collective(torch.sin(x))
        return (torch.cos(y) * y.cumsum(0)).sum() * x.sum()

    def total(x):
        y = plain(torch.sin(x))
        return ((torch.cos(y) * y.cumsum(1)).flatten(1).sum(1) * x.sum((1, 2))).sum()

    return loss, total


# --- values --------------------------------------------------------------------------------------


@case
def test_it_is_the_reduction_of_the_batch(name):
    collective, plain = CASES[name]
    mapped = over_i(collective)
    x = batch(N, 4, 8)
    for _ in range(3):  # called, traced, found
        assert_same(mapped(x), plain(x), close=True)


@case
@pytest.mark.parametrize("dim", [1, 2])
def test_the_axis_may_be_any_dimension(name, dim):
    collective, plain = CASES[name]
    x = batch(N, 4, 8)
    y = over_i(collective, in_axes=dim, out_axes=-1)(x.movedim(0, dim))
    assert_same(y.movedim(-1, 0), plain(x), close=True)


@case
def test_values_that_do_not_vary_are_those_that_are_all_alike(name):
    collective, plain = CASES[name]
    x, w = torch.zeros(N), batch(4, 8)
    mapped = over_i(lambda x, w: collective(w) + x, in_axes=(0, None))
    assert_same(mapped(x, w), plain(everywhere(w)), close=True)
    w.requires_grad_()
    (ours,) = torch.autograd.grad(mapped(x, w).sin().sum(), w)
    (theirs,) = torch.autograd.grad(plain(everywhere(w)).sin().sum(), w)
    assert_same(ours, theirs, close=True)


@case
@pytest.mark.parametrize("outside", [True, False])
def test_another_vmap_inside_or_around_is_passed_by(name, outside):
    collective, plain = CASES[name]
    x = batch(3, N, 4, 8)
    expected = torch.stack([plain(part) for part in x])
    if outside:
        assert_same(torch.vmap(over_i(collective))(x), expected, close=True)
        assert_same(tr.vmap(over_i(collective), axis_name="j")(x), expected, close=True)
    else:
        inner = x.movedim(0, 1)  # [N, 3, 4, 8]
        swapped = expected.movedim(0, 1)
        assert_same(over_i(torch.vmap(collective))(inner), swapped, close=True)
        last = over_i(torch.vmap(collective, in_dims=2, out_dims=-1))(inner.movedim(1, 3))
        assert_same(last.movedim(-1, 1), swapped, close=True)


@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "pmin", "all_gather", "all_gather 1"])
def test_results_of_reductions_do_not_vary(name):
    collective, plain = CASES[name]
    x = batch(N, 4, 8)
    assert_same(over_i(collective, out_axes=None)(x), plain(x)[0], close=True)


def test_a_sum_of_a_python_number_is_a_python_number():
    def inside(x):
        seen.append(
            (
                tr.psum(1, "i"), tr.psum(2.5, "i"), tr.psum(True, "i"), tr.pmean(3, "i"),
                tr.pmax(7, "i"), tr.ppermute(7, "i", RING), tr.axis_size("i"),
            )
        )  # fmt: skip
        return x

    seen = []
    over_i(inside)(torch.ones(N))
    assert repr(seen[0]) == "(4, 10.0, 4, 3.0, 7, 7, 4)"


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float16, torch.bfloat16])
def test_dtypes_stay(dtype):
    x = torch.arange(N).to(dtype)
    for reduce in (tr.psum, tr.pmax, tr.pmin):
        assert over_i(lambda x, reduce=reduce: reduce(x, "i"))(x).dtype == dtype


def test_bools_are_counted_and_means_of_integers_are_fractions():
    x = torch.tensor([True, False, True, True])
    assert_same(over_i(lambda x: tr.psum(x, "i"), out_axes=None)(x), torch.tensor(3))
    assert_same(over_i(lambda x: tr.pmax(x, "i"), out_axes=None)(x), torch.tensor(True))
    assert_same(over_i(lambda x: tr.pmean(x, "i"), out_axes=None)(x), torch.tensor(0.75))


def test_trees():
    def inside(x):
        tree = {"a": (x, 2), "b": None}
        return tr.psum(tree, "i")["a"], tr.all_gather((x, 1), "i"), tr.pmean([x], "i")

    (total, size), (rows, ones), (mean,) = over_i(inside, out_axes=None)(torch.arange(N))
    assert_same((total, mean), (torch.tensor(6), torch.tensor(1.5)))
    assert int(size) == 2 * N
    assert_same((rows, ones), (torch.arange(N), torch.ones(N, dtype=torch.int64)))


def test_an_index_is_a_number_for_each_example():
    index = over_i(lambda x: tr.axis_index("i"))(torch.ones(N))
    assert_same(index, torch.arange(N))
    on_meta = over_i(lambda x: tr.axis_index("i", device="meta"))(torch.ones(N))
    assert on_meta.device.type == "meta"


# --- several names -------------------------------------------------------------------------------


def over_i_and_j(fun, **kwargs):
    return tr.vmap(tr.vmap(fun, axis_name="j", **kwargs), axis_name="i", **kwargs)


NAMES = [("i", "j"), ("j", "i"), ["i", "j"]]


def rows_of(x, names):
    """The examples of the batch [2, 3, ...] in the order in which `names` number them."""
    return (x if names[0] == "i" else x.transpose(0, 1)).flatten(0, 1)


def placed(rows, names):
    return rows.unflatten(0, (2, 3)) if names[0] == "i" else rows.unflatten(0, (3, 2)).mT


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_reductions_over_several_names(names):
    x = batch(2, 3, 5)
    sums = over_i_and_j(lambda x: tr.psum(x, names), out_axes=None)(x)
    assert_same(sums, x.sum((0, 1)), close=True)
    means = over_i_and_j(lambda x: tr.pmean(x, names), out_axes=None)(x)
    assert_same(means, x.mean((0, 1)), close=True)
    best = over_i_and_j(lambda x: tr.pmax(x, names), out_axes=None)(x)
    assert_same(best, x.amax((0, 1)))
    sizes = over_i_and_j(lambda x: x * tr.psum(1, names) - x * tr.axis_size(names))(x)
    assert not sizes.any()


def test_one_of_two_names():
    x = batch(2, 3, 5)
    j_sums = over_i_and_j(lambda x: tr.psum(x, "j"))(x)
    assert_same(j_sums, x.sum(1, keepdim=True).expand(2, 3, 5), close=True)
    i_sums = over_i_and_j(lambda x: tr.psum(x, "i"))(x)
    assert_same(i_sums, x.sum(0, keepdim=True).expand(2, 3, 5), close=True)


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_several_names_number_the_examples_in_row_major_order(names):
    index = over_i_and_j(lambda x: tr.axis_index(names))(torch.ones(2, 3))
    assert_same(rows_of(index, names), torch.arange(6))


@pytest.mark.parametrize("names", NAMES, ids=str)
@pytest.mark.parametrize(
    ("collective", "plain"),
    [
        (lambda x, n: tr.all_gather(x, n, axis=1), lambda x: torch.stack([x.movedim(0, 1)] * 6)),
        (
            lambda x, n: tr.all_gather(x, n, axis=1, tiled=True),
            lambda x: torch.stack([torch.cat(list(x), 1)] * 6),
        ),
        (lambda x, n: tr.psum_scatter(x, n), lambda x: x.sum(0)),
        (
            lambda x, n: tr.psum_scatter(x, n, scatter_dimension=1, tiled=True),
            lambda x: torch.stack(x.sum(0).chunk(6, 1)),
        ),
        (lambda x, n: tr.all_to_all(x, n, 0, 1), lambda x: exchanged(x, 0, 1)),
        (lambda x, n: tr.all_to_all(x, n, 1, 0, tiled=True), lambda x: exchanged_tiles(x, 1, 0)),
        (lambda x, n: tr.all_to_all(x, n, 0, 1, tiled=True), lambda x: exchanged_tiles(x, 0, 1)),
        (lambda x, n: tr.pshuffle(x, n, [3, 1, 5, 0, 2, 4]), lambda x: x[[3, 1, 5, 0, 2, 4]]),
    ],
)
def test_exchanges_over_several_names(names, collective, plain):
    x = batch(2, 3, 6, 12)
    y = over_i_and_j(lambda x: collective(x, names))(x)
    assert_same(rows_of(y, names), plain(rows_of(x, names)), close=True)


def test_an_inner_axis_hides_an_outer_one_of_the_same_name():
    x = batch(2, 3, 5)
    ours = over_i(over_i(lambda x: x * tr.psum(1, "i") + tr.psum(x, "i")))(x)
    assert_same(ours, x * 3 + x.sum(1, keepdim=True), close=True)


def test_names_are_any_hashable_values():
    key = object()
    x = batch(3)
    assert_same(tr.vmap(lambda x: tr.psum(x, key), axis_name=key, out_axes=None)(x), x.sum())
    assert_same(tr.vmap(lambda x: tr.psum(x, ()), axis_name=key)(x), x)


# --- derivatives ---------------------------------------------------------------------------------

NESTINGS = {
    "vmap(grad)": lambda loss: over_i(grad(loss)),
    "grad(vmap)": lambda loss: grad(lambda x: over_i(loss)(x).sum()),
    "vmap(grad(checkpoint))": lambda loss: over_i(grad(tr.checkpoint(loss))),
    "vmap(grad(checkpoint none))": lambda loss: over_i(grad(tr.checkpoint(loss, policy="none"))),
    "vmap(checkpoint(grad))": lambda loss: over_i(tr.checkpoint(grad(loss))),
    "grad(checkpoint(vmap))": lambda loss: grad(lambda x: tr.checkpoint(over_i(loss))(x).sum()),
    "grad(vmap(checkpoint))": lambda loss: grad(lambda x: over_i(tr.checkpoint(loss))(x).sum()),
    "vmap(jacrev)": lambda loss: over_i(jacrev(loss)),
    "backward": lambda loss: lambda x: _backward(over_i(loss), x),
    "backward of checkpoint": lambda loss: lambda x: _backward(over_i(tr.checkpoint(loss)), x),
    "backward of checkpoint(vmap)": lambda loss: (
        lambda x: _backward(tr.checkpoint(over_i(loss)), x)
    ),
}


def _backward(fun, x):
    x = x.detach().requires_grad_()
    fun(x).sum().backward()
    return x.grad


# each collective under the first ones, each nesting with these
FEW = ["psum", "pmax", "ppermute", "all_gather 1", "psum_scatter tiled", "all_to_all 0 1"]
FIRST = [*NESTINGS][:3]


@pytest.mark.parametrize(
    ("name", "nesting"),
    [
        pytest.param(
            name, nesting, marks=[] if name in FEW or nesting in FIRST else [pytest.mark.slow]
        )
        for name in CASES
        for nesting in NESTINGS
    ],
)
@pytest.mark.sampled(3)
def test_gradients(name, nesting):
    """The gradient of an example's loss is that of the sum of all losses: as JAX defines it."""
    loss, total = loss_of(name)
    x = batch(N, 4, 8)
    with nothing_left_behind():
        ours = NESTINGS[nesting](loss)(x)
    assert_same(ours, grad(total)(x), close=True)


def test_the_gradient_of_a_sum_is_a_sum():
    """The example of JAX's documentation."""
    gradient = over_i(grad(lambda x: -tr.psum(x, "i")), out_axes=None)(torch.ones(5))
    assert_same(gradient, torch.tensor(-5.0))


SECOND = {
    "vmap(grad grad)": lambda loss, v: over_i(
        lambda x, v: grad(lambda x: (grad(loss)(x) * v).sum())(x)
    ),
    "vmap(grad grad checkpoint)": lambda loss, v: over_i(
        lambda x, v: grad(lambda x: (grad(tr.checkpoint(loss))(x) * v).sum())(x)
    ),
    "vmap(jvp grad)": lambda loss, v: over_i(lambda x, v: jvp(grad(loss), (x,), (v,))[1]),
    "vmap(grad jvp checkpoint)": lambda loss, v: over_i(
        lambda x, v: grad(lambda x: jvp(tr.checkpoint(loss), (x,), (v,))[1])(x)
    ),
    "grad(vmap grad)": lambda loss, v: (
        lambda x, v: grad(lambda x: (over_i(grad(loss))(x) * v).sum())(x)
    ),
    "grad(vmap grad checkpoint)": lambda loss, v: (
        lambda x, v: grad(lambda x: (over_i(grad(tr.checkpoint(loss)))(x) * v).sum())(x)
    ),
    "backward twice": lambda loss, v: lambda x, v: _backward_twice(over_i(loss), x, v),
    "backward twice of checkpoint": lambda loss, v: (
        lambda x, v: _backward_twice(over_i(tr.checkpoint(loss)), x, v)
    ),
}


def _backward_twice(fun, x, v):
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(fun(x).sum(), x, create_graph=True)
    return torch.autograd.grad((first * v).sum(), x)[0]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FEW[:2] else [pytest.mark.slow]) for n in FEW]
)
@pytest.mark.parametrize("nesting", SECOND)
@pytest.mark.sampled(3)
def test_second_derivatives(name, nesting):
    loss, total = loss_of(name)
    x, v = batch(N, 4, 8), batch(N, 4, 8).cos()
    expected = grad(lambda x: (grad(total)(x) * v).sum())(x)
    assert_same(SECOND[nesting](loss, v)(x, v), expected, close=True)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FEW else [pytest.mark.slow]) for n in CASES]
)
def test_tangents(name):
    collective, plain = CASES[name]
    x, v = batch(N, 4, 8), batch(N, 4, 8).cos()
    expected = jvp(lambda x: plain(torch.sin(x)), (x,), (v,))[1]

    def inside(x):
        return collective(torch.sin(x))

    for fun in (inside, tr.checkpoint(inside)):
        assert_same(over_i(lambda x, v: jvp(fun, (x,), (v,))[1])(x, v), expected, close=True)
        assert_same(jvp(over_i(fun), (x,), (v,))[1], expected, close=True)
        with torch.autograd.forward_ad.dual_level():
            dual = over_i(fun)(torch.autograd.forward_ad.make_dual(x, v))
            assert_same(torch.autograd.forward_ad.unpack_dual(dual).tangent, expected, close=True)


def test_jacobians_forward_and_backward_of_an_example():
    """By one example's view: its own input moves along with all others'."""
    x = batch(3, 2)

    def inside(x):
        return tr.psum(torch.sin(x), "i") * x

    backward = over_i(jacrev(inside))(x)
    plain = jacrev(lambda x: torch.sin(x).sum(0) * x)(x)  # [3, 2, 3, 2]
    assert_same(backward, plain.sum(0).movedim(1, 0), close=True)
    forward = over_i(jacfwd(inside))(x)
    assert_same(forward, plain.sum(2), close=True)


def test_examples_that_share_an_extremum_share_the_gradient():
    x = torch.tensor([1.0, 3.0, 3.0, 2.0])
    ours = grad(lambda x: over_i(lambda x: tr.pmax(x, "i"), out_axes=None)(x))(x)
    assert_same(ours, grad(lambda x: x.amax(0))(x))
    nested = over_i(grad(lambda x: tr.pmax(x, "i") / N))(x)
    assert_same(nested, torch.tensor([0.0, 0.5, 0.5, 0.0]))


def test_complex_numbers():
    x = torch.complex(batch(N, 3), batch(N, 3).cos())
    ours = grad(lambda x: over_i(lambda x: tr.psum(x * x, "i"), out_axes=None)(x).abs().sum())(x)
    assert_same(ours, grad(lambda x: (x * x).sum(0).abs().sum())(x), close=True)


def test_a_pull_back_runs_after_its_vmap_has_ended():
    x, v = batch(N, 4), batch(N, 4).cos()
    fun = tr.checkpoint(lambda x: torch.sin(tr.psum(torch.exp(x), "i")) * x)
    _, pull_back = vjp(over_i(fun), x)
    _, expected = vjp(lambda x: torch.sin(torch.exp(x).sum(0)) * x, x)
    assert_same(pull_back(v), expected(v), close=True)


# --- inside checkpoints, graphs and functions ----------------------------------------------------

POLICIES = [
    "full", "none", "dots", "ops:psum", "recompute_ops:psum", "names:total",
    tr.checkpoint_policies.save_ops(collective_ops.psum_p),
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.filterwarnings("ignore:.*match:torchremat.UnmatchedWarning")
@pytest.mark.sampled(2)
def test_every_policy_gives_the_same_gradients(policy):
    def loss(x, w):
        total = tr.checkpoint_name(tr.psum(torch.sin(x @ w), "i"), "total")
        return (torch.cos(total) * tr.axis_index("i")).sum()

    def plain(x, w):
        total = torch.sin(x @ w).sum(0)
        return (torch.cos(total).sum() * torch.arange(N)).sum()

    x, w = batch(N, 3), batch(3, 5)
    saving = tr.checkpoint(loss, policy=policy)
    expected = grad(plain, (0, 1))(x, w)
    inside = over_i(grad(saving, (0, 1)), in_axes=(0, None))(x, w)
    assert_same((inside[0], inside[1].sum(0)), expected, close=True)
    mapped = over_i(saving, in_axes=(0, None))
    assert_same(grad(lambda x, w: mapped(x, w).sum(), (0, 1))(x, w), expected, close=True)


@pytest.mark.parametrize("spelling", ["ops:psum", "ops:torchremat.psum", collective_ops.psum_p])
def test_a_policy_may_save_what_a_collective_computes(spelling):
    policy = spelling if isinstance(spelling, str) else tr.checkpoint_policies.save_ops(spelling)

    def inside(x):
        fun = tr.checkpoint(lambda x: torch.sin(tr.psum(x * x, "i")), policy=policy)
        seen.append([str(residual).partition(" from test_")[0] for residual in
                     tr.saved_residuals(fun, x)])  # fmt: skip
        return x

    seen = []
    over_i(inside)(torch.ones(N))
    assert seen[0] == ["f32[] from the argument x", "f32[] output of psum"]


def test_a_graph_prints_collectives():
    def inside(x):
        def fun(x):
            y = tr.ppermute(tr.psum(x, "i"), "i", [(0, 1), (1, 0)])
            return tr.all_gather(y, "i") * tr.axis_index("i")

        graphs.append(tr.make_graph(fun)(x))
        return x

    graphs = []
    tr.vmap(inside, axis_name="i")(torch.ones(2))
    expected = """\
{ lambda ; a:f32[]. let
    b:f32[] = psum[axis_name='i'] a
    c:f32[] = ppermute[axis_name='i' perm=((0, 1), (1, 0))] b
    d:f32[2] = all_gather[axis_name='i' axis=0 tiled=False axis_size=2] c
    e:i64[] = axis_index[axis_name='i']
    f:f32[2] = aten.mul.Tensor d e
  in (f,) }"""
    assert str(graphs[0]) == expected


def graph_of(fun, *examples):
    """The graph of what one example does."""
    graphs = []

    def inside(*args):
        graphs.append(tr.make_graph(fun)(*args))
        return args

    over_i(inside)(*examples)
    return graphs[0]


@case
def test_a_graph_runs_under_the_axis_that_it_was_traced_in(name):
    collective, plain = CASES[name]
    x = batch(N, 4, 8)
    g = graph_of(collective, x)
    assert g.out_avals[0].shape == plain(x).shape[1:]
    assert_same(over_i(lambda x: tr.eval_graph(g, x))(x), plain(x), close=True)
    loss, total = loss_of(name)
    g = graph_of(loss, x)
    ours = over_i(grad(lambda x: tr.eval_graph(g, x)))(x)
    assert_same(ours, grad(total)(x), close=True)


def test_a_graph_is_mapped_over_an_axis_by_its_name():
    x = batch(3, 2)
    graphs = []

    def inside(x):
        graphs.append(tr.make_graph(lambda x: tr.psum(x, "i") * x)(x))
        return x

    over_i(inside)(x)
    kept, _ = tr.batch_graph(graphs[0], 3, [0])
    worked_out, _ = tr.batch_graph(graphs[0], 3, [0], axis_name="i")
    assert "psum[axis_name='i']" in str(kept)
    assert "psum" not in str(worked_out)
    assert_same(tr.eval_graph(worked_out, x), x.sum(0) * x, close=True)


@pytest.mark.parametrize("name", ["psum", "pmax", "all_gather 1", "ppermute"])
def test_graphs_of_derivatives(name):
    collective, plain = CASES[name]
    x, v = batch(N, 4, 8), batch(N, 4, 8).cos()
    g = graph_of(lambda x: collective(torch.sin(x)), x)
    pushed = tr.jvp_graph(g)
    _, tangent = over_i(lambda x, v: tr.eval_graph(pushed, x, v))(x, v)
    assert_same(tangent, jvp(lambda x: plain(torch.sin(x)), (x,), (v,))[1], close=True)


def test_the_transpose_of_the_graph_of_a_sum():
    x = batch(N, 3)
    g = graph_of(lambda x: tr.psum(x * 2, "i"), x)
    transposed = tr.transpose_graph(g, [True])
    assert "psum[axis_name='i']" in str(transposed)
    ours = over_i(lambda ct: tr.eval_graph(transposed, ct))(x)
    assert_same(torch.as_tensor(ours[0] if isinstance(ours, tuple) else ours),
                everywhere(2 * x.sum(0)), close=True)  # fmt: skip


def test_checkpoints_in_checkpoints():
    inner = tr.checkpoint(lambda x: tr.psum(torch.sin(x), "i"))
    outer = tr.checkpoint(lambda x: torch.cos(inner(x)).sum() * tr.pmax(x, "i").sum())
    x = batch(N, 3)

    def total(x):
        return (torch.cos(torch.sin(x).sum(0)).sum() * x.amax(0).sum()) * N

    assert_same(over_i(grad(outer))(x), grad(total)(x), close=True)
    assert_same(grad(lambda x: over_i(outer)(x).sum())(x), grad(total)(x), close=True)


def test_a_cached_trace_is_of_one_size_and_one_set_of_axes():
    @tr.checkpoint
    def fun(x):
        return tr.psum(x, "i") * tr.axis_size("i")

    for size in (2, 3, 2):
        x = batch(size, 4)
        for _ in range(2):
            assert_same(over_i(fun)(x), (x.sum(0) * size).expand(size, 4), close=True)
    x = batch(2, 3, 4)
    i_outside = over_i(tr.vmap(fun, axis_name="j"))(x)
    assert_same(i_outside, (x.sum(0, keepdim=True) * 2).expand(2, 3, 4), close=True)
    i_inside = tr.vmap(over_i(fun), axis_name="j")(x)
    assert_same(i_inside, (x.sum(1, keepdim=True) * 3).expand(2, 3, 4), close=True)


def test_jit():
    fun = tr.jit(lambda x: torch.sin(tr.psum(x, "i")) * x, backend="eager")
    for size in (2, 3):
        x = batch(size, 4)
        assert_same(over_i(fun)(x), torch.sin(x.sum(0)) * x, close=True)
    x = batch(3, 4)
    ours = grad(lambda x: over_i(fun)(x).sum())(x)
    assert_same(ours, grad(lambda x: (torch.sin(x.sum(0)) * x).sum())(x), close=True)


@pytest.mark.parametrize("inner", [None, 3])
def test_a_checkpoint_of_what_does_not_vary_keeps_to_its_axis(inner):
    """PyTorch leaves out a function none of whose arguments varies."""
    fun = tr.checkpoint(lambda w: tr.psum(w, "i") * tr.axis_index("i"))
    x, w = batch(N), batch(2)
    if inner is None:
        ours = over_i(lambda x: fun(w))(x)
        assert_same(ours, N * w * torch.arange(N).unsqueeze(1), close=True)
        return
    ours = over_i(lambda x: over_i(lambda y: fun(x))(torch.ones(inner)))(x)
    assert_same(ours, inner * x.unsqueeze(1) * torch.arange(inner), close=True)


class Cube(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return tr.psum(x**3, "i")

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return tr.psum(cotangent, "i") * 3 * x**2


@pytest.mark.parametrize("wrap", [lambda f: f, tr.checkpoint])
def test_in_a_users_function(wrap):
    x = batch(N, 3)
    fun = wrap(lambda x: Cube.apply(x).sum())
    assert_same(over_i(grad(fun))(x), N * 3 * x**2, close=True)
    assert_same(grad(lambda x: over_i(fun)(x).sum())(x), N * 3 * x**2, close=True)


# --- errors --------------------------------------------------------------------------------------


def under_i(fun, *shape, **kwargs):
    return lambda: over_i(fun, **kwargs)(batch(N, *shape))


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (NameError, "unbound axis name: zzz.*axes in scope are 'i'",
         under_i(lambda x: tr.psum(x, "zzz"))),
        (NameError, "unbound axis name: zzz", under_i(lambda x: x * tr.axis_index("zzz"))),
        (NameError, "unbound axis name: zzz", under_i(lambda x: x * tr.axis_size(("i", "zzz")))),
        (NameError, "unbound axis name: i.*no axis has a name", lambda: tr.psum(1, "i")),
        (NameError, "unbound axis name: i", lambda: tr.checkpoint(
            lambda x: tr.psum(x, "i"))(torch.ones(2))),
        (AssertionError, "Permutation doesn't match the axis size!.*size 4.*1 pairs.*test_coll",
         under_i(lambda x: tr.ppermute(x, "i", [(0, 1)]))),
        (ValueError, "sources and destinations must be unique, got",
         under_i(lambda x: tr.ppermute(x, "i", [(0, 1), (1, 1), (2, 2), (3, 3)]))),
        (ValueError, "index 4 in .* the axis 'i' has the indices 0, ..., 3",
         under_i(lambda x: tr.ppermute(x, "i", [(0, 1), (1, 4), (2, 2), (3, 3)]))),
        (ValueError, "`perm` does not represent a permutation: \\[0, 0, 1\\]",
         under_i(lambda x: tr.pshuffle(x, "i", [0, 0, 1]))),
        (AssertionError, "Permutation doesn't match the axis size!",
         under_i(lambda x: tr.pshuffle(x, "i", [1, 0]))),
        (ValueError, "equal x.shape\\[split_axis\\], but they are 4 and 3 respectively",
         under_i(lambda x: tr.all_to_all(x, "i", 0, 0), 3)),
        (ValueError, "split_axis \\(6\\) has to be divisible by .* axis i \\(4\\)",
         under_i(lambda x: tr.all_to_all(x, "i", 0, 0, tiled=True), 6)),
        (ValueError, "scatter dimension size 3 must match shard count 4",
         under_i(lambda x: tr.psum_scatter(x, "i"), 3)),
        (ValueError, "scatter dimension size 6 must be divisible by shard_count 4",
         under_i(lambda x: tr.psum_scatter(x, "i", tiled=True), 6)),
        (ValueError, "axis 1 is out of bounds for array of dimension 1",
         under_i(lambda x: tr.psum_scatter(x, "i", scatter_dimension=1), 4)),
        (ValueError, "axis 2 is out of bounds for array of dimension 2",
         under_i(lambda x: tr.all_gather(x, "i", axis=2), 4)),
        (ValueError, "must cover all indices exactly once",
         under_i(lambda x: tr.psum(x, "i", axis_index_groups=[[0, 1], [2]]))),
        (ValueError, "must all be the same size",
         under_i(lambda x: tr.all_gather(x, "i", axis_index_groups=[[0, 1, 2], [3]]))),
        (ValueError, "groups are of the examples along one axis",
         under_i(lambda x: tr.psum(x, ("i", "i"), axis_index_groups=[[0, 1, 2, 3]]))),
        (TypeError, "a leaf is 'x' \\(str\\)", under_i(lambda x: tr.psum("x", "i"))),
        (TypeError, "a tree of tensors, but .* is 1 \\(int\\)",
         under_i(lambda x: tr.psum_scatter(1, "i"))),
    ],
)  # fmt: skip
def test_errors(error, match, call):
    with pytest.raises(error, match=match) as caught, nothing_left_behind():
        call()
    assert isinstance(caught.value, tr.errors.TorchrematError)


def test_a_graph_does_not_run_without_its_axis():
    g = graph_of(lambda x: tr.psum(x, "i"), torch.ones(N))
    with pytest.raises(NameError, match="unbound axis name: i"):
        tr.eval_graph(g, torch.ones(()))


@pytest.mark.parametrize("name", ["ppermute", "all_gather", "psum_scatter", "psum in groups"])
def test_a_graph_is_of_one_size_of_its_axis(name):
    g = graph_of(CASES[name][0], batch(N, 4, 8))
    with pytest.raises(ValueError, match="size 4, and is applied over one of size 3"):
        over_i(lambda x: tr.eval_graph(g, x))(batch(3, 4, 8))


def test_in_a_rule_for_vmap_the_axis_is_one_of_tensors():
    class Rule(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def vmap(info, in_dims, x):
            return tr.psum(x, "i"), None

    with pytest.raises(NameError, match="unbound axis name: i"):
        over_i(Rule.apply)(batch(N))
