"""`vmap` is PyTorch's own, with JAX's axes and errors, and traced where a call repeats."""

import gc
import re
import weakref

import pytest
import torch
from torch import nn

import torchremat as tr
from torchremat.errors import (
    AxisError,
    AxisTypeError,
    ConcretizationError,
    LoopWarning,
    NotAvailableError,
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def thrice(mapped, *args, **kwargs):
    """The first call runs as it is, the second is traced, the third repeats the trace."""
    return [mapped(*args, **kwargs) for _ in range(3)]


def mlp(w, x):
    return torch.tanh(w["a"] @ x) * w["b"]


CASES = {
    "elementwise": (lambda x: x.sin() * 2, 0, 0, lambda: (torch.randn(4, 3),)),
    "last axis": (lambda x: x.cumsum(0), -1, -1, lambda: (torch.randn(4, 3),)),
    "shared": (torch.mv, (None, 1), 1, lambda: (torch.randn(2, 3), torch.randn(3, 5))),
    "tree": (mlp, ({"a": 0, "b": None}, 0), 0, lambda: (
        {"a": torch.randn(5, 2, 3), "b": torch.randn(2)}, torch.randn(5, 3))),
    "prefix": (mlp, (None, 1), 0, lambda: (
        {"a": torch.randn(2, 3), "b": torch.randn(2)}, torch.randn(3, 5))),
    "outputs": (lambda x: (x, {"s": x.sum()}), 0, (1, {"s": 0}), lambda: (torch.randn(4, 3),)),
    "unmapped output": (lambda x, y: (x, y * 2), (0, None), 0, lambda: (
        torch.randn(4), torch.randn(2))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_equals_torch_func_vmap(name):
    fun, in_axes, out_axes, make = CASES[name]
    args = make()
    expected = torch.func.vmap(fun, in_axes, out_axes)(*args)
    for found in thrice(tr.vmap(fun, in_axes, out_axes), *args):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_torch_func_vmap(name):
    fun, in_axes, out_axes, make = CASES[name]
    leaves, spec = torch.utils._pytree.tree_flatten(make())
    leaves = [leaf.requires_grad_() for leaf in leaves]
    args = torch.utils._pytree.tree_unflatten(leaves, spec)

    def gradient(out):
        parts = torch.utils._pytree.tree_leaves(out)
        return torch.autograd.grad(sum((p * p).sum() for p in parts), leaves, allow_unused=True)

    expected = gradient(torch.func.vmap(fun, in_axes, out_axes)(*args))
    for found in thrice(tr.vmap(fun, in_axes, out_axes), *args):
        torch.testing.assert_close(gradient(found), expected, rtol=0, atol=0)


def test_keyword_arguments_are_mapped_along_their_first_axis():
    x, y = torch.randn(3, 2), torch.randn(3)
    for found in thrice(tr.vmap(lambda x, *, y: x * y, in_axes=1), x.T.contiguous(), y=y):
        assert torch.equal(found, x * y[:, None])


def test_a_number_that_is_returned_is_repeated():
    assert tr.vmap(lambda x: 1.5)(torch.ones(3)).tolist() == [1.5] * 3
    assert tr.vmap(lambda x: (x, None), out_axes=(0, None))(torch.ones(3))[1] is None


def test_sum_match_sums_what_varies():
    assert tr.vmap(lambda x: 2 * x, out_axes=None, sum_match=True)(torch.arange(3.0)) == 6


def test_axis_size_stands_where_no_argument_is_mapped():
    assert tr.vmap(lambda x: x, None, 0, axis_size=3)(torch.ones(2)).shape == (3, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_chunks_are_joined(size):
    x, w = torch.randn(7, 3), torch.randn(3)
    whole = tr.vmap(lambda x, w: (x * w, x.sum(), w), (0, None), (1, 0, None))(x, w)
    parts = tr.vmap(lambda x, w: (x * w, x.sum(), w), (0, None), (1, 0, None), chunk_size=size)
    torch.testing.assert_close(parts(x, w), whole, rtol=0, atol=0)


def test_chunks_of_a_sum_are_summed():
    x = torch.arange(7.0)
    assert tr.vmap(lambda x: x, 0, None, sum_match=True, chunk_size=3)(x) == x.sum()


@pytest.mark.parametrize("mapped", [True, False])
def test_chunks_are_of_the_axis_size_that_is_given(mapped):
    x = torch.arange(7.0)
    found = tr.vmap(lambda x: 2 * x, 0 if mapped else None, axis_size=7, chunk_size=3)(x)
    torch.testing.assert_close(found, 2 * x if mapped else (2 * x).expand(7, 7))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_random_numbers_are_those_of_torch_func_vmap(randomness):
    def fun(x):
        return torch.nn.functional.dropout(x, 0.5) + torch.randn(3)

    mapped = tr.vmap(fun, randomness=randomness)
    reference = torch.func.vmap(fun, randomness=randomness)
    x = torch.randn(4, 3)
    for _ in range(3):
        state = torch.get_rng_state()
        expected = reference(x)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        assert torch.equal(mapped(x), expected)
        assert torch.equal(torch.get_rng_state(), after)


def test_randomness_is_an_error_unless_asked_for():
    for _ in range(3):
        with pytest.raises(RuntimeError, match="randomness"):
            tr.vmap(lambda x: x * torch.rand(2))(torch.ones(3))


def test_a_module_is_mapped_with_its_parameters_shared():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    expected = torch.autograd.grad(torch.func.vmap(model)(x).sum(), list(model.parameters()))
    for found in thrice(tr.vmap(model), x):
        grads = torch.autograd.grad(found.sum(), list(model.parameters()))
        torch.testing.assert_close(grads, expected, rtol=0, atol=0)


def test_per_sample_gradients_of_a_functional_call():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params, x):
        return torch.func.functional_call(model, params, (x,)).square().sum()

    x = torch.randn(5, 3)
    expected = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    for found in thrice(tr.vmap(torch.func.grad(loss), (None, 0)), params, x):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


# --- with other transformations ------------------------------------------------------------------


def f(x):
    return (x.sin() * x).sum()


NESTS = {
    "vmap of grad": (
        lambda: tr.vmap(torch.func.grad(f)), lambda: torch.func.vmap(torch.func.grad(f))),
    "grad of vmap": (
        lambda: torch.func.grad(lambda x: tr.vmap(f)(x).prod()),
        lambda: torch.func.grad(lambda x: torch.func.vmap(f)(x).prod())),
    "vmap of vmap": (
        lambda: tr.vmap(tr.vmap(torch.sin, 0, 0), 1, 1),
        lambda: torch.func.vmap(torch.func.vmap(torch.sin), 1, 1)),
    "torch.func.vmap around": (
        lambda: torch.func.vmap(tr.vmap(torch.exp)),
        lambda: torch.func.vmap(torch.func.vmap(torch.exp))),
    "of a checkpoint": (
        lambda: tr.vmap(tr.checkpoint(f)), lambda: torch.func.vmap(f)),
    "in a checkpoint": (
        lambda: tr.checkpoint(tr.vmap(f)), lambda: torch.func.vmap(f)),
    "of grad of a checkpoint": (
        lambda: tr.vmap(torch.func.grad(tr.checkpoint(f))),
        lambda: torch.func.vmap(torch.func.grad(f))),
    "hessian": (
        lambda: tr.vmap(torch.func.hessian(f)), lambda: torch.func.vmap(torch.func.hessian(f))),
    "jvp of vmap": (
        lambda: lambda x: torch.func.jvp(tr.vmap(f), (x,), (x,)),
        lambda: lambda x: torch.func.jvp(torch.func.vmap(f), (x,), (x,))),
    "in a graph": (
        lambda: lambda x: tr.eval_graph(tr.make_graph(tr.vmap(f))(x), x),
        lambda: torch.func.vmap(f)),
    "in jit": (
        lambda: tr.jit(tr.vmap(f), backend="eager"), lambda: torch.func.vmap(f)),
}  # fmt: skip


@pytest.mark.parametrize("name", NESTS)
def test_it_nests(name):
    ours, reference = (make() for make in NESTS[name])
    x = torch.randn(4, 3, dtype=torch.float64)
    for found in thrice(ours, x):
        torch.testing.assert_close(found, reference(x))


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_torch_compile_captures_it(chunk_size):
    x = torch.randn(4, 3)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x):
        return tr.vmap(f, chunk_size=chunk_size)(x) + 1

    torch.testing.assert_close(compiled(x), torch.func.vmap(f)(x) + 1)


def test_torch_compile_refuses_what_torch_func_has_not():
    compiled = torch.compile(lambda x: tr.vmap(f, axis_size=4)(x), backend="eager")
    with pytest.raises(NotAvailableError, match="cannot capture"):
        compiled(torch.randn(4, 3))


# --- traced once ---------------------------------------------------------------------------------


def test_a_call_that_repeats_runs_no_python():
    calls = []

    def fun(x):
        calls.append(None)
        return x * 2

    mapped = tr.vmap(fun)
    thrice(mapped, torch.ones(3))
    made = len(calls)
    assert mapped(torch.ones(3)).tolist() == [2.0] * 3
    assert len(calls) == made
    mapped(torch.ones(3).double())
    assert len(calls) == made + 1


def test_a_trace_is_found_again_by_the_function():
    calls = []

    def fun(x):
        calls.append(None)
        return x * 2

    for _ in range(3):
        tr.vmap(fun)(torch.ones(3))
    made = len(calls)
    tr.vmap(fun)(torch.ones(3))
    assert len(calls) == made
    assert tr.vmap(fun, out_axes=1)(torch.ones(3, 2)).shape == (2, 3)


def test_one_trace_serves_many_sizes():
    calls = []

    def fun(x):
        calls.append(None)
        return x * 2

    mapped = tr.vmap(fun)
    for n in (3, 4, 5, 6):
        mapped(torch.ones(n))
    made = len(calls)
    for n in (7, 8, 9):
        assert mapped(torch.ones(n)).tolist() == [2.0] * n
    assert len(calls) == made


def test_what_cannot_be_traced_runs_as_it_is():
    flag = torch.tensor(True)

    def fun(x):
        return x * 2 if flag.item() else x

    for found in thrice(tr.vmap(fun), torch.ones(3)):
        assert found.tolist() == [2.0] * 3
    flag.fill_(False)
    assert tr.vmap(fun)(torch.ones(3)).tolist() == [1.0] * 3


def test_what_a_function_closes_over_may_change():
    scale = [2.0]
    mapped = tr.vmap(lambda x: x * scale[0])
    thrice(mapped, torch.ones(2))
    scale[0] = 3.0
    assert mapped(torch.ones(2)).tolist() == [3.0, 3.0]


def test_dropping_the_function_frees_its_traces():
    def make():
        held = torch.ones(3)
        return lambda x: x * held, weakref.ref(held)

    fun, reference = make()
    thrice(tr.vmap(fun), torch.ones(2, 3))
    del fun
    gc.collect()
    assert reference() is None


def test_a_loop_is_said_with_the_operator_and_the_line():
    with pytest.warns(LoopWarning, match=r"aten::histc, at .*test_vmap.py:\d+"):
        found = tr.vmap(lambda x: torch.histc(x, 4, 0.0, 1.0))(torch.rand(3, 5))
    assert found.sum(1).tolist() == [5.0] * 3


# --- errors --------------------------------------------------------------------------------------

X = torch.ones(5, 3)
BAD = {
    "sizes": (
        lambda: tr.vmap(lambda x, y, z: x)(X, X, torch.ones(4)),
        AxisError,
        "vmap got inconsistent sizes for array axes to be mapped:\n"
        "  * most axes (2 of them) had size 5, e.g. axis 0 of argument x of type f32[5,3];\n"
        "  * one axis had size 4: axis 0 of argument z of type f32[4]"),
    "sizes in a tree": (
        lambda: tr.vmap(lambda x: x)({"a": X, "b": [X[:2]]}),
        AxisError, "axis 0 of argument x['b'][0] of type f32[2,3]"),
    "sizes of star arguments": (
        lambda: tr.vmap(lambda *a: a[0])(X, X[:2]),
        AxisError, "axis 0 of args[1] of type f32[2,3]"),
    "keywords": (
        lambda: tr.vmap(lambda x, y: x)(X, y=X[:2]),
        AxisError, "axis 0 of kwargs['y'] of type f32[2,3]"),
    "axis_size": (
        lambda: tr.vmap(lambda x: x, axis_size=4)(X), AxisError,
        "vmap got inconsistent sizes for array axes to be mapped:\n"
        "  * the `axis_size` argument was 4;\n"
        "  * one axis had size 5: axis 0 of argument x of type f32[5,3]"),
    "rank": (
        lambda: tr.vmap(lambda x: x, 2)(X), AxisError,
        "vmap was requested to map its argument along axis 2, which implies that its rank should "
        "be at least 3, but is only 2 (its shape is (5, 3))"),
    "negative rank": (lambda: tr.vmap(lambda x: x, -3)(X), AxisError, "at least 3"),
    "number": (lambda: tr.vmap(lambda x: x)(1.0), AxisError, "at least 1, but is only 0"),
    "string": (lambda: tr.vmap(lambda x, y: x)(X, "s"), AxisTypeError, "argument y of type str"),
    "nothing mapped": (
        lambda: tr.vmap(lambda x: x, None)(X), AxisError,
        "vmap must have at least one non-None value in in_axes or axis_size must be specified"),
    "no argument": (
        lambda: tr.vmap(lambda: 1)(), AxisError,
        "vmap wrapped function must be passed at least one argument containing an array or "
        "axis_size must be specified, got empty *args=() and **kwargs={}"),
    "in_axes": (
        lambda: tr.vmap(lambda x: x, "0"), AxisTypeError,
        "vmap in_axes must be an int, None, or a tuple of entries corresponding to the positional "
        "arguments passed to the function, but got '0'"),
    "leaves of in_axes": (
        lambda: tr.vmap(lambda x: x, (1.0,)), AxisTypeError,
        "vmap in_axes must be an int, None, or (nested) container with those types as leaves"),
    "leaves of out_axes": (
        lambda: tr.vmap(lambda x: x, 0, {"a": "b"}), AxisTypeError,
        "vmap out_axes must be an int, None, or (nested) container with those types as leaves"),
    "number of in_axes": (
        lambda: tr.vmap(lambda x: x, (0, 0))(X), AxisError,
        "but got len(in_axes)=2, len(args)=1"),
    "prefix": (
        lambda: tr.vmap(lambda x: x, ((0, 0),))([X, X, X]), ValueError,
        "vmap in_axes specification must be a tree prefix of the corresponding value"),
    "out prefix": (
        lambda: tr.vmap(lambda x: (x, x), 0, (0, 0, 0))(X), ValueError,
        "vmap out_axes specification must be a tree prefix of the corresponding value"),
    "mapped output": (
        lambda: tr.vmap(lambda x: x, 0, None)(X), AxisError,
        "vmap has mapped output but out_axes is None"),
    "mapped output of a name": (
        lambda: tr.vmap(lambda x: x, 0, None, axis_name="i")(X), AxisError,
        "vmap has mapped output (axis_name=i) but out_axes is None"),
    "out axis": (
        lambda: tr.vmap(lambda x: x, 0, 2)(X), AxisError,
        "axis 2 is out of bounds for array of dimension 2"),
    "out axis of one of several": (
        lambda: tr.vmap(lambda x: {"a": x, "b": [x, x]}, 0, {"a": 1, "b": [0, 5]})(X), AxisError,
        "at vmap out_axes['b'][1], got axis spec 5: axis 5 is out of bounds for array of "
        "dimension 2"),
    "mapped output of several": (
        lambda: tr.vmap(lambda x: (1.0, x), 0, (None, None))(X), AxisError,
        "at vmap out_axes[1], got axis spec None: vmap has mapped output but out_axes is None"),
    "output": (lambda: tr.vmap(lambda x: "s")(X), AxisTypeError, "returns 's' (str)"),
    "function": (lambda: tr.vmap(3), TypeError, "vmap takes a function or an nn.Module"),
    "randomness": (
        lambda: tr.vmap(lambda x: x, randomness="diff"), ValueError, "'same'), but it is 'diff'"),
    "two names": (
        lambda: tr.vmap(lambda x: x, axis_name=("i", "j")), AxisError, "Nest one vmap for each"),
    "unhashable name": (
        lambda: tr.vmap(lambda x: x, axis_name=["i"]), AxisTypeError, "must be hashable"),
    "type of axis_size": (
        lambda: tr.vmap(lambda x: x, axis_size=True), AxisTypeError, "axis_size must be an int"),
    "negative axis_size": (
        lambda: tr.vmap(lambda x: x, axis_size=-1), AxisError, "at least 0, but it is -1"),
    "chunks": (lambda: tr.vmap(lambda x: x, chunk_size=0), AxisError, "at least 1"),
    "chunk type": (lambda: tr.vmap(lambda x: x, chunk_size="2"), AxisTypeError, "an int or None"),
    "chunks of a name": (
        lambda: tr.vmap(lambda x: x, axis_name="i", chunk_size=2), AxisError, "combined"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_said_as_jax_says_it(name):
    call, kind, text = BAD[name]
    with pytest.raises(kind, match=re.escape(text)):
        call()


def test_explain_names_what_runs_in_a_loop():
    def fun(x):
        return torch.segment_reduce(x, "sum", lengths=torch.tensor([1, 2])).sin().sum()

    x = torch.rand(2, 3, requires_grad=True)
    with pytest.warns(LoopWarning, match="aten::segment_reduce"):
        report = tr.explain(tr.vmap(fun), x)
    looped = [row for row in report if "vmap has no rule for it" in row.reason]
    assert [row.op.split(".")[0] for row in looped] == ["segment_reduce", "segment_reduce"]


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x if x > 0 else -x,
        lambda x: x * x.item(),
        lambda x: x * float(x),
        lambda x: torch.tensor(x.tolist()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        tr.grad(lambda x: x if x > 0 else -x),
        tr.vmap(lambda x, y: x if y > 0 else -x, (None, 0), axis_size=2),
    ],
)
def test_the_value_of_a_mapped_tensor_is_not_there(fun):
    args = (torch.ones(3),) * (2 if getattr(fun, "_mapping", None) else 1)
    in_axes = (0, None) if len(args) == 2 else 0
    args = (args[0], torch.ones(2)) if len(args) == 2 else args
    with pytest.raises(ConcretizationError, match=r"needed at test_vmap.py:\d+ .*torch.where"):
        tr.vmap(fun, in_axes)(*args)


@pytest.mark.parametrize("chunk_size", [1, 2, 4])
def test_all_chunks_draw_the_same_numbers(chunk_size):
    def draw(x):
        return x + torch.rand(2) + torch.dropout(torch.ones(3), 0.5, True).sum()

    x = torch.zeros(5, 2)
    torch.manual_seed(0)
    whole, after = tr.vmap(draw, randomness="same")(x), torch.rand(1)
    chunked = tr.vmap(draw, randomness="same", chunk_size=chunk_size)
    for _ in range(3):  # from the second call on it is traced
        torch.manual_seed(0)
        assert torch.equal(chunked(x), whole)
        assert torch.equal(torch.rand(1), after)
    torch.manual_seed(0)
    around = tr.checkpoint(lambda x: chunked(x))
    assert len(around(x).unique(dim=0)) == 1
    assert len(tr.vmap(draw, randomness="different", chunk_size=chunk_size)(x).unique(dim=0)) == 5


@pytest.mark.parametrize("wrap", [tr.vmap, tr.checkpoint], ids=["vmap", "checkpoint"])
def test_views_of_what_needs_no_gradient_are_views_of_the_argument(wrap):
    first = wrap(lambda x: x[0])
    w = torch.full((4,), 3.0, requires_grad=True)
    for _ in range(3):
        x = torch.ones(4, 4)
        y = first(x)
        assert y._base is x
        y.mul_(w)  # which makes x one that has a gradient, in PyTorch
        (gradient,) = torch.autograd.grad(x.sum(), w)
        assert gradient.tolist() == [1.0] * 4
