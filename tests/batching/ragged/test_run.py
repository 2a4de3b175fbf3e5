"""Functions mapped over piles are those of a loop over the elements: values and gradients."""

import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.batching.ragged.checks import LENGTHS, check, looped, mapped, pile_of
from tests.helpers import skip_before_2_13
from torchremat import checkpoint, jit
from torchremat.batching import Pile, axis_index, pile_axis, psum, vmap
from torchremat.batching.ragged.run import Dense, as_pile, run_ragged
from torchremat.errors import LoopWarning, RaggedError, RaggedTypeError

W = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
NONEMPTY = (3, 1, 4)

EVERYWHERE = {
    "square": lambda x: x**2,
    "twice": lambda x: x + x,
    "scale_by_size": lambda x: x.sum(0) * x.shape[0] + x.shape[0],
    "divide_by_root_of_size": lambda x: x / x.shape[0] ** 0.5,
    "broadcast_against_shared": lambda x: x @ W + W.sum(0),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "no_grad": lambda x: x * x.detach(),
    "sum": lambda x: x.sum(),
    "sum_along_ragged": lambda x: x.sum(0),
    "sum_along_ragged_keepdim": lambda x: x - x.sum(0, keepdim=True),
    "sum_along_dense": lambda x: x.sum(1),
    "amax_along_dense": lambda x: x.amax(1),
    "norm": lambda x: x.norm() + torch.linalg.vector_norm(x, dim=0).sum(),
    "prod": lambda x: x.prod(0),
    "any": lambda x: (x > 0).any(0),
    "softmax_along_ragged": lambda x: x.softmax(0),
    "softmax_along_dense": lambda x: x.softmax(1),
    "log_softmax_along_ragged": lambda x: x.log_softmax(0),
    "cumsum_along_ragged": lambda x: x.cumsum(0),
    "sort_along_ragged": lambda x: x.sort(0).values,
    "sort_descending": lambda x: x.sort(0, descending=True).values,
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "rms_norm": lambda x: F.rms_norm(x, (5,)),
    "matmul_contracting_dense": lambda x: x @ W,
    "matmul_contracting_ragged": lambda x: x.T @ x,
    "doubly_ragged": lambda x: x @ x.T,
    "doubly_ragged_reduced": lambda x: (x @ x.T).sum(0),
    "einsum": lambda x: torch.einsum("id,jd->ij", x, x).sum(1),
    "attention_by_hand": lambda x: (x @ x.T / 5**0.5).softmax(-1) @ x,
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "transpose": lambda x: x.T,
    "unsqueeze_and_squeeze": lambda x: x.unsqueeze(1).transpose(0, 2).squeeze(1),
    "heads": lambda x: x.view(x.shape[0], 1, 5).transpose(0, 1).reshape(-1, 5),
    "flatten": lambda x: x.reshape(-1),
    "flatten_transposed": lambda x: x.T.reshape(-1),
    "slice_from": lambda x: x[1:],
    "slice_to": lambda x: x[:-1],
    "slice_step": lambda x: x[::2],
    "slice_dense": lambda x: x[:, 1:3],
    "select_dense": lambda x: x[:, -1],
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "pad": lambda x: F.pad(x, (0, 0, 1, 2)),
    "repeat": lambda x: x.repeat(2, 1),
    "cat_along_ragged": lambda x: torch.cat([x, 2 * x]),
    "cat_along_dense": lambda x: torch.cat([x, 2 * x], 1),
    "stack": lambda x: torch.stack([x, 2 * x], 1),
    "expand": lambda x: x.sum(0, keepdim=True).expand_as(x),
    "arange": lambda x: x * torch.arange(x.shape[0])[:, None],
    "tril": lambda x: (x @ x.T).tril(),
    "eye": lambda x: (x @ x.T) * torch.eye(x.shape[0]),
    "new_zeros": lambda x: x.new_zeros(x.shape[0], 5) + x,
    "inner_vmap": lambda x: torch.func.vmap(lambda row: row.softmax(0))(x),
    "grad_inside": lambda x: torch.func.grad(lambda x: (x @ W).pow(2).sum())(x),
    "grad_of_softmax": lambda x: torch.func.grad(lambda x: x.softmax(0).pow(2).sum())(x),
    "grad_of_slices": lambda x: torch.func.grad(lambda x: (torch.cat([x, x])[1:] ** 2).sum())(x),
    "grad_of_layer_norm": lambda x: torch.func.grad(
        lambda x: F.layer_norm(x, (5,), W[:, 0]).pow(3).sum()
    )(x),
    "grad_of_attention": lambda x: torch.func.grad(
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]).pow(2).sum()
    )(x),
}
WHERE_NONEMPTY = {
    "mean": lambda x: x.mean(0) + x.mean(),
    "amax": lambda x: x.amax(0),
    "max": lambda x: x.max(),
    "max_with_index": lambda x: x.max(0).values,
    "argmax": lambda x: x.argmax(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "var": lambda x: x.var(0, correction=0),
    "std": lambda x: x.std(),
    "first_and_last": lambda x: x[0] * x[-1],
    "shared_index": lambda x: x[torch.tensor([0, -1])],
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.int64)),
    "grad_of_cross_entropy": lambda x: torch.func.grad(
        lambda x: F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.int64))
    )(x),
    "inverse_of_dense": lambda x: torch.linalg.inv(x.T @ x + torch.eye(5, dtype=x.dtype)),
}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_values_and_gradients_are_those_of_a_loop(name):
    if name == "grad_of_attention":
        skip_before_2_13("torch.matmul of batches reads sizes as numbers, which a RaggedError says")
    check(EVERYWHERE[name], pile_of(LENGTHS, 5))


@pytest.mark.parametrize("name", WHERE_NONEMPTY)
def test_values_and_gradients_where_no_element_is_empty(name):
    check(WHERE_NONEMPTY[name], pile_of(NONEMPTY, 5))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=7),
    st.sampled_from(["softmax_along_ragged", "attention_by_hand", "cat_along_ragged", "slice_to"]),
)
def test_any_lengths(lengths, name):
    check(EVERYWHERE[name], pile_of(lengths, 5))


TWO = {
    "batch": (lambda x, y: x + y, (4, 5)),
    "batch_of_scalars": (lambda x, y: x * y, (4,)),
    "batch_matmul": (lambda x, y: x @ y, (4, 5, 2)),
    "batch_mv": (lambda x, y: x @ y, (4, 5)),
    "cat": (lambda x, y: torch.cat([x, y]), (4, 2, 5)),
}


@pytest.mark.parametrize("name", TWO)
def test_a_batch_beside_a_pile(name):
    f, shape = TWO[name]
    check(f, pile_of(LENGTHS, 5), torch.randn(shape, dtype=torch.float64))


def test_what_all_elements_share():
    shared = torch.randn(5, 2, dtype=torch.float64)
    check(lambda x, w: x @ w, pile_of(LENGTHS, 5), shared, axes=[pile_axis, None])


@pytest.mark.parametrize("f", [lambda x, y: x * y + y.sum(0), lambda x, y: (x @ y.T).softmax(1)])
def test_two_piles_of_equal_lengths(f):
    check(f, pile_of(LENGTHS, 5), pile_of(LENGTHS, 5, seed=1))


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: x @ y.T,
        lambda x, y: (x @ y.T).sum(1) + x.sum(1),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None])[0],
    ],
)
def test_two_piles_of_different_lengths(f):
    check(f, pile_of(NONEMPTY, 5), pile_of((2, 4, 1), 5, seed=1))


def test_elements_that_differ_in_two_dims():
    pile = Pile.from_list(
        [torch.randn(n, m, dtype=torch.float64) for n, m in [(2, 3), (0, 1), (1, 4)]]
    )
    check(lambda x: x.sum(0), pile)
    check(lambda x: 2 * x, pile)


SIZES = {
    "arange": lambda n: torch.arange(n),
    "sum_of_arange": lambda n: torch.arange(n).sum(),
    "zeros": lambda n: torch.zeros(n, 2) + n,
    "twice_the_same": lambda n: torch.arange(n) * torch.ones(n),
    "square": lambda n: torch.ones(n, n).sum(1),
    "fill": lambda n: torch.full((n,), 2.0) * n,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_may_be_a_number_in_a_tensor(name):
    check(SIZES[name], torch.tensor([3, 0, 4]))


def test_a_size_is_an_output():
    (out,) = run_ragged(lambda xs: [xs[0].shape[0]], [pile_of(LENGTHS, 5)], [pile_axis], 4)
    assert isinstance(out, Dense)
    assert out.tensor.tolist() == list(LENGTHS)


def test_lookups():
    table = torch.nn.Embedding(7, 5, dtype=torch.float64)
    tokens = Pile.from_list([torch.tensor(t, dtype=torch.int64) for t in ([1, 2, 3], [], [6])])
    check(lambda i: table(i), tokens)
    check(lambda i: table.weight[i], tokens)
    check(lambda x, i: x[i], pile_of((3, 2, 4), 5), torch.tensor([[0, 2], [1, 1], [-1, 0]]))


def test_attention_of_modules_is_one_operator():
    layer = torch.nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True, dtype=torch.float64)
    pile = pile_of(NONEMPTY, 6)
    check(lambda x: layer(x), pile)
    met = Counter()
    with Counted(met):
        mapped(lambda x: layer(x), pile)
    assert met["torchremat.ragged_attention"] == 1
    assert not any("softmax" in name for name in met)


class Counted(TorchDispatchMode):
    def __init__(self, met):
        super().__init__()
        self.met = met

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.met[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


# --- transformations -----------------------------------------------------------------------------

linear = torch.nn.Linear(5, 5, dtype=torch.float64)


def attend(x):
    return (x @ x.T).softmax(-1) @ linear(x)


def whole(pile):
    (out,) = run_ragged(lambda xs: [attend(*xs)], [pile], [pile_axis], len(pile), owner=attend)
    return as_pile(out, len(pile))


def reference(pile):
    return torch.cat(looped(attend, pile))


def with_data(function, pile):
    return lambda data: function(Pile(pile.aval, data))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(lambda d: f(d).pow(2).sum()),
        lambda f: lambda d: torch.func.jvp(f, (d,), (2 * d,))[1],
        lambda f: torch.func.jacrev(f),
        lambda f: torch.func.hessian(lambda d: f(d).pow(2).sum()),
        lambda f: lambda d: torch.func.vmap(f)(torch.stack([d, 2 * d])),
    ],
    ids=["grad", "jvp", "jacrev", "hessian", "vmap"],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func_around_it(transform):
    pile = pile_of((2, 0, 1), 5)
    ours = transform(with_data(lambda p: whole(p).data, pile))(pile.data)
    theirs = transform(with_data(reference, pile))(pile.data)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "around",
    [lambda f: f, checkpoint, lambda f: jit(f, backend="eager")],
    ids=["plain", "checkpoint", "jit"],
)
def test_piles_go_into_and_out_of_what_is_traced(around):
    function = around(whole)
    for seed, lengths in enumerate([LENGTHS, (1, 1, 4, 0), (2, 3, 0, 4)]):
        pile = pile_of(lengths, 5, seed=seed)
        pile.data.requires_grad_()
        result = function(pile)
        assert result.lengths.tolist() == list(lengths)
        torch.testing.assert_close(result.data, reference(pile))
        ours = torch.autograd.grad(result.data.pow(2).sum(), [pile.data, linear.weight])
        theirs = torch.autograd.grad(reference(pile).pow(2).sum(), [pile.data, linear.weight])
        torch.testing.assert_close(ours, theirs)


def test_a_first_call_may_be_inside_a_trace():
    def outer(x):
        return (x @ x.T).sum(-1)

    pile = pile_of(LENGTHS, 5)
    result = checkpoint(lambda p: vmap(outer, pile_axis, pile_axis)(p).data.sum())(pile)
    torch.testing.assert_close(result, sum(outer(x).sum() for x in pile.to_list()))


def test_a_checkpoint_inside_stays_one():
    body = checkpoint(lambda x: linear(x).sin().cos())
    check(lambda x: body(x).sum(0), pile_of(LENGTHS, 5))
    pile = pile_of(LENGTHS, 5)
    pile.data.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        mapped(body, pile)
    assert sum(t.shape == pile.data.shape for t in kept) == 1


def test_a_graph_serves_all_lengths_and_what_is_closed_over_now():
    calls = []
    holder = torch.nn.ParameterList([torch.ones(())])

    def f(x):
        calls.append(1)
        return x * holder[0]

    for lengths in (LENGTHS, (1, 1), (0, 9, 2)):
        pile = pile_of(lengths, 2)
        torch.testing.assert_close(mapped(f, pile).data, pile.data)
    assert len(calls) == 1
    holder[0] = torch.nn.Parameter(torch.tensor(3.0))
    pile = pile_of(LENGTHS, 2)
    torch.testing.assert_close(mapped(f, pile).data, 3 * pile.data)


# --- what cannot be done -------------------------------------------------------------------------


def test_an_operator_without_a_rule_runs_in_a_loop_and_says_so():
    kernel = torch.ones(2, 5, 3, dtype=torch.float64)
    pile = pile_of(NONEMPTY, 5)

    def f(x):
        return F.conv1d(x.T, kernel, padding=1)

    with pytest.warns(LoopWarning, match=r"aten.convolution, at test_run.py"):
        mapped(f, pile)
    check(f, pile, loops=True)


@pytest.mark.parametrize(
    ("f", "error", "text"),
    [
        (lambda x: x if x.shape[0] > 2 else -x, RaggedError, r"test_run.py:\d+.*torch.where"),
        (lambda x: sum(x[i] for i in range(x.shape[0])), RaggedError, "value of a size"),
        (lambda x: F.dropout(x), RuntimeError, "random operation while in randomness error mode"),
        (lambda x: x[3], RaggedError, r"test_run.py:\d+.*differs for s\d+ = "),
        (lambda x: torch.kron(x, W), RaggedError, "has no form for (sizes that differ|such)"),
        (lambda x: x.mul_(2), RaggedError, "writes in place"),
    ],
)
def test_errors_name_the_line(f, error, text):
    with pytest.raises(error, match=text):
        mapped(f, pile_of(NONEMPTY, 5))


def test_lengths_that_differ_do_not_fit():
    with pytest.raises(RaggedError, match="size of dim 0 of input 0.*size of dim 0 of input 1"):
        mapped(lambda x, y: x + y, pile_of(NONEMPTY, 5), pile_of((2, 4, 1), 5))


def test_a_pile_needs_pile_axis():
    with pytest.raises(RaggedTypeError, match="pile input without using pile_axis in_axes spec"):
        run_ragged(lambda xs: xs, [pile_of(NONEMPTY, 5)], [0], 3)
    with pytest.raises(RaggedTypeError, match="which is not a Pile but Tensor"):
        run_ragged(lambda xs: xs, [torch.ones(3)], [pile_axis], 3)


def test_random_numbers_are_drawn_for_each_row():
    pile = pile_of((50, 0, 70), 2)
    result = mapped(lambda x: F.dropout(torch.ones_like(x), 0.5), pile, randomness="different")
    kept = (result.data != 0).double().mean()
    assert 0.3 < kept < 0.7
    with pytest.raises(RaggedError, match="cannot draw the same numbers"):
        mapped(F.dropout, pile, randomness="same")


def test_nothing_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapped(attend, pile_of(LENGTHS, 5))


def test_collectives_are_over_the_elements():
    pile = pile_of(NONEMPTY)
    total = pile.data.sum()
    shares = vmap(lambda x: x / psum(x.sum(), "i"), pile_axis, pile_axis, axis_name="i")(pile)
    torch.testing.assert_close(shares.data, pile.data / total)
    same = vmap(lambda x: psum(x.sum(), "i"), pile_axis, None, axis_name="i")(pile)
    torch.testing.assert_close(same, total)
    places = vmap(lambda x: x.sum() * 0 + axis_index("i"), pile_axis, 0, axis_name="i")(pile)
    assert places.tolist() == [0, 1, 2]
    with pytest.raises(RaggedError, match=r"psum over 'i', at test_run.py:\d+ .* Reduce"):
        vmap(lambda x: psum(x, "i"), pile_axis, pile_axis, axis_name="i")(pile)
