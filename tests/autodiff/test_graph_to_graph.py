import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchremat as tr
from tests.helpers import assert_same
from tests.programs import Program, inputs
from tests.typed_graph.checking import check_graph
from tests.typed_graph.test_make_graph import Scale, branching, ops_of, remated, scanned
from torchremat.core.avals import Aval
from torchremat.errors import GraphError, NotAvailableError, UnmatchedWarning

MASKS = [tuple(bool(n >> i & 1) for i in range(3)) for n in range(8)]


@tr.checkpoint
def tripled(x):
    return tr.checkpoint_name(x * 3, "y").sum(0)


def chosen(values, mask):
    return [value for value, is_chosen in zip(values, mask, strict=True) if is_chosen]


def seeded(fun, *args):
    torch.manual_seed(1)
    return fun(*args)


def statistics():
    return tr.make_graph(nn.BatchNorm1d(3))(torch.ones(2, 3))


# --- dce -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_dce_of_random_programs(seed):
    program, xs = Program(seed), inputs(seed)
    g = tr.make_graph(program)(*xs)
    before = str(g)
    whole = seeded(program, *xs)
    for mask in MASKS:
        reduced, used = tr.dce_graph(g, mask)
        check_graph(reduced)
        assert_same(
            list(seeded(tr.eval_graph, reduced, *chosen(xs, used))), chosen(whole, mask), str(mask)
        )
        again, all_used = tr.dce_graph(reduced, [True] * sum(mask))
        assert (str(again), all_used) == (str(reduced), [True] * sum(used))
    assert str(g) == before


def test_dce_inside_checkpoints():
    @tr.checkpoint
    def block(x, y):
        return x.sin(), y.cos()

    w = torch.ones(3)
    g = tr.make_graph(lambda x, y: block(x, y * w))(torch.ones(3), torch.ones(3))
    reduced, used = tr.dce_graph(g, [True, False])
    assert (ops_of(reduced), used, reduced.consts) == (["remat_p"], [True, False], [])
    assert "aten.cos" not in str(reduced)


def test_dce_keeps_writes():
    g = statistics()
    reduced, used = tr.dce_graph(g, [False])
    assert (used, len(reduced.writes)) == ([True], len(g.writes))
    check_graph(reduced)


def test_dce_keeps_what_draws_before_another():
    g = tr.make_graph(lambda x: (F.dropout(x), torch.rand(2), x.sin()))(torch.ones(2))
    masks = [False, True, False], [True, False, False], [False, False, True]
    draws = [ops_of(tr.dce_graph(g, mask)[0]) for mask in masks]
    assert draws[0][-2:] == ["aten.bernoulli.p", "aten.rand"]
    assert "aten.rand" not in draws[1]
    assert draws[2] == ["aten.sin"]


# --- partial evaluation --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", [None, "none", "dots", "names:named,inside", "ops:aten.sin"])
@pytest.mark.sampled(3)
def test_the_parts_make_the_whole(seed, policy):
    program, xs = Program(seed), inputs(seed)
    g = tr.make_graph(program)(*xs)
    before = str(g)
    whole = list(seeded(program, *xs))
    for mask in MASKS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnmatchedWarning)
            known, staged, out_unknowns, avals = tr.partial_eval_graph(g, mask, policy=policy)
        check_graph(known)
        check_graph(staged)
        torch.manual_seed(1)
        results = tr.eval_graph(known, *chosen(xs, [not m for m in mask]))
        num_known = out_unknowns.count(False)
        residuals = results[num_known:]
        assert [Aval.of(r) for r in residuals] == avals
        late = tr.eval_graph(staged, *residuals, *chosen(xs, mask))
        early, late = iter(results), iter(late)
        assert_same([next(late) if u else next(early) for u in out_unknowns], whole, str(mask))
    assert str(g) == before


@pytest.mark.parametrize(
    ("policy", "known", "staged"),
    [
        ("full", [], ["aten.sin", "aten.cos", "aten.mul.Tensor"]),
        ("ops:aten.sin", ["aten.sin"], ["aten.cos", "aten.mul.Tensor"]),
        ("none", ["aten.sin", "aten.cos"], ["aten.mul.Tensor"]),
    ],
)
def test_the_policy_decides_what_is_a_residual(policy, known, staged):
    g = tr.make_graph(lambda x, u: x.sin().cos() * u)(torch.ones(3), torch.ones(3))
    found = tr.partial_eval_graph(g, [False, True], policy=policy)
    assert (ops_of(found[0]), ops_of(found[1])) == (known, staged)
    assert found[2:] == ([True], [Aval((3,), torch.float32)])


def test_partial_evaluation_opens_checkpoints():
    block = tr.checkpoint(lambda x, u: x.sin().cos() * u.exp())
    g = tr.make_graph(block)(torch.ones(3), torch.ones(3))
    known, staged, _, _ = tr.partial_eval_graph(g, [False, True], policy="ops:aten.sin")
    assert (ops_of(known), ops_of(staged)) == (["aten.sin"], ["remat_p"])
    assert "aten.sin" not in str(staged)


def test_partial_evaluation_draws_nothing_twice():
    g = tr.make_graph(lambda x, u: F.dropout(x) * u)(torch.ones(9), torch.ones(9))
    known, staged, _, _ = tr.partial_eval_graph(g, [False, True], policy="full")
    assert "aten.bernoulli.p" in ops_of(known)
    assert "aten.bernoulli.p" not in ops_of(staged)


def test_a_policy_that_matches_nothing_warns():
    g = tr.make_graph(lambda x: x.sin())(torch.ones(3))
    with pytest.warns(UnmatchedWarning, match="nowhere"):
        tr.partial_eval_graph(g, [True], policy="names:nowhere")


# --- jvp -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.sampled(3)
def test_jvp_of_random_programs(seed):
    program, xs, dxs = Program(seed), inputs(seed), inputs(seed + 50)
    g = tr.make_graph(program)(*xs)
    before = str(g)
    pushed = tr.jvp_graph(g)
    check_graph(pushed)
    torch.manual_seed(1)
    expected = torch.func.jvp(program, tuple(xs), tuple(dxs))
    assert_same(seeded(tr.eval_graph, pushed, *xs, *dxs), expected, close=True)
    assert str(g) == before


def test_jvp_of_trees_integers_and_numbers():
    def f(d, n, *, k):
        return {"y": d["x"] * n + k, "i": n + 1, "c": 2.0}

    x, n, k = torch.ones(2), torch.arange(2), torch.ones(2)
    g = tr.make_graph(f)({"x": x}, n, k=k)
    pushed = tr.jvp_graph(g, [True, False, False])
    args = ({"x": x}, n, {"k": k}, {"x": x * 3}, None, {"k": None})
    result, tangents = tr.eval_graph(pushed, *args)
    assert_same(result, f({"x": x}, n, k=k))
    assert_same(tangents, {"y": x * 3 * n, "i": None, "c": None})


def test_jvp_of_a_cond_is_what_pytorch_lacks():
    with pytest.raises(NotAvailableError, match="torch.cond"):
        tr.jvp_graph(tr.make_graph(branching)(torch.ones(3)))


@pytest.mark.parametrize("f", [remated, tripled])
def test_jvp_of_checkpoints(f):
    x = torch.ones(3)
    pushed = tr.jvp_graph(tr.make_graph(f)(x))
    check_graph(pushed)
    assert_same(tr.eval_graph(pushed, x, x * 2), torch.func.jvp(f, (x,), (x * 2,)), close=True)


# --- transposition -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x @ x.new_ones(3, 3)).t() * 2.0,
        lambda x: x[:, 1:].sum(1),
        lambda x: torch.cat([x, x.flip(0)]).cumsum(1),
        tripled,
        lambda x: (x.reshape(-1), x.mean()),
        lambda x: torch.fft.fft(x).real,
    ],
)
def test_transpose_of_linear_functions(f):
    x = torch.randn(3, 3, dtype=torch.double)
    g = tr.make_graph(f)(x)
    before = str(g)
    transposed = tr.transpose_graph(g)
    check_graph(transposed)
    result, pull_back = torch.func.vjp(f, x)
    cotangents = torch.utils._pytree.tree_map(torch.randn_like, result)
    assert_same(tr.eval_graph(transposed, cotangents), pull_back(cotangents), close=True)
    assert str(g) == before


def test_transpose_in_one_of_two():
    x, w = torch.randn(2, 3), torch.randn(3, 4)
    transposed = tr.transpose_graph(tr.make_graph(torch.mm)(x, w), [False, True])
    ct = torch.randn(2, 4)
    assert_same(tr.eval_graph(transposed, x, ct), (x.t() @ ct,), close=True)


def test_the_transpose_conjugates_nothing():
    x = torch.randn(3, dtype=torch.complex128)
    transposed = tr.transpose_graph(tr.make_graph(lambda x: x * (2 + 3j))(x))
    assert_same(tr.eval_graph(transposed, x), (x * (2 + 3j),), close=True)


@pytest.mark.parametrize(
    "f",
    [torch.sin, lambda x: x * x, lambda x: x.relu(), lambda x: x.round(), remated],
    ids=["sin", "square", "relu", "round", "checkpoint"],
)
def test_transpose_of_what_is_not_linear(f):
    g = tr.make_graph(f)(torch.ones(3))
    with pytest.raises(GraphError, match=r"takes a graph that is linear in .* it is not"):
        tr.transpose_graph(g)


# --- batching ------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, 2), (None, -1, None), (1, None, 0)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(3)
def test_batching_of_random_programs(seed, axes):
    program, xs = Program(seed, without=("write",)), inputs(seed)
    g = tr.make_graph(program)(*xs)
    before = str(g)
    many = [x if a is None else torch.stack([x, x * 2], a) for x, a in zip(xs, axes, strict=True)]
    for randomness in ("different", "same"):
        batched, out_axes = tr.batch_graph(g, 2, axes, 0, randomness=randomness)
        check_graph(batched)
        mapped = torch.vmap(program, axes, randomness=randomness)
        assert_same(seeded(tr.eval_graph, batched, *many), seeded(mapped, *many), close=True)
        assert out_axes == [0, 0, 0]
    assert str(g) == before


def test_axes_of_outputs():
    x, y = torch.ones(4, 3), torch.ones(5)
    g = tr.make_graph(lambda x, y: (x * 2, y * 3, 1.0))(x[0], y)
    _, out_axes = tr.batch_graph(g, 4, (0, None))
    assert out_axes == [0, None, None]
    batched, out_axes = tr.batch_graph(g, 4, (0, None), (1, 0, 0))
    assert out_axes == [1, 0, 0]
    assert_same(tr.eval_graph(batched, x, y), ((x * 2).t(), (y * 3).expand(4, 5), torch.ones(4)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("f", [remated, scanned])
def test_batching_of_operators_with_bodies(f):
    x = torch.randn(3, 4, 2)
    batched, _ = tr.batch_graph(tr.make_graph(f)(x[0]), 3, 0, 0)
    assert_same(tr.eval_graph(batched, x), torch.stack([f(row) for row in x]), close=True)


def test_a_batched_function_of_the_user_without_a_rule():
    g = tr.make_graph(lambda x: Scale.apply(x, 2.0))(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"generate_vmap_rule|setup_context"):
        tr.batch_graph(g, 2, 0)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transform", "match"),
    [
        (lambda g: tr.dce_graph(g, [True]), "used_outputs must have one entry for each output"),
        (lambda g: tr.jvp_graph(g, [True]), "nonzero_tangents must have one entry for each input"),
        (lambda g: tr.jvp_graph(g, [True, True]), r"names the input \w+ \(number 1\).*i64\[2\]"),
        (lambda g: tr.transpose_graph(g, [True]), "linear must have one entry for each input"),
        (tr.transpose_graph, r"linear names the input \w+ \(number 1\)"),
        (lambda g: tr.partial_eval_graph(g, [True], policy=None), "unknown_ins must have one"),
        (lambda g: tr.batch_graph(g, 2, [0]), "in_axes must have one entry for each input"),
        (lambda g: tr.batch_graph(g, 2, 2), r"in_axes\[0\] is 2, but with the mapped axis"),
        (lambda g: tr.batch_graph(g, 0, 0), "axis_size must be at least 1, but it is 0"),
        (lambda g: tr.batch_graph(g, 2, 0, [0]), "out_axes must have one entry"),
        (lambda g: tr.batch_graph(g, 2, 0, randomness="some"), "randomness must be one of"),
    ],
)
def test_value_errors(transform, match):
    g = tr.make_graph(lambda x, i: (x * 2, i + 1))(torch.ones(2), torch.arange(2))
    with pytest.raises(ValueError, match=match):
        transform(g)


@pytest.mark.parametrize(
    ("transform", "match"),
    [
        (lambda g: tr.dce_graph(g, [1]), "used_outputs must be a sequence of bools, but it cont"),
        (lambda g: tr.jvp_graph(g, True), "nonzero_tangents must be a sequence of bools, one"),
        (lambda g: tr.transpose_graph(g, [None]), "contains None"),
        (lambda g: tr.partial_eval_graph(g, ["x"], policy=None), "contains 'x'"),
        (lambda g: tr.partial_eval_graph(g, [True], policy=3), "3"),
        (lambda g: tr.batch_graph(g, 2.0, 0), r"axis_size must be an int, but it is 2\.0"),
        (lambda g: tr.batch_graph(g, 2, "x"), "in_axes must be an int, None, or a sequence"),
        (lambda g: tr.batch_graph(g, 2, [True]), r"in_axes\[0\] must be an int or None"),
    ],
)
def test_type_errors(transform, match):
    g = tr.make_graph(lambda x: x * 2)(torch.ones(2))
    with pytest.raises(TypeError, match=match):
        transform(g)


@pytest.mark.parametrize(
    "transform",
    [
        tr.jvp_graph,
        tr.transpose_graph,
        lambda g: tr.partial_eval_graph(g, [True], policy=None),
        lambda g: tr.batch_graph(g, 2, 0),
    ],
    ids=["jvp", "transpose", "partial_eval", "batch"],
)
def test_graphs_that_write(transform):
    with pytest.raises(GraphError, match=r"but this one writes to num_batches_tracked, running_m"):
        transform(statistics())
