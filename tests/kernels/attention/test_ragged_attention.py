"""Attention within segments, against the plain formula in a loop, under every transformation."""

import math

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn.functional import scaled_dot_product_attention

import torchremat as tr
from torchremat.errors import SegmentError, SegmentTypeError
from torchremat.kernels.attention import (
    attention_eager as ragged_eager,
)
from torchremat.kernels.attention import (
    attention_ops as ragged_ops,
)
from torchremat.kernels.attention.ragged_attention import ragged_attention
from torchremat.kernels.segments.segments import offsets_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
# rows outside of all segments, segments without queries and without keys
CUTS_Q = torch.tensor([1, 3, 3, 4, 6, 8])
CUTS_K = torch.tensor([0, 3, 5, 5, 8, 9])
HEADS = {"as many": (4, 4), "groups": (4, 2), "one": (2, 1)}
each_heads = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
each_mask = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
# of values: as of keys, which is PyTorch's kernel, and not, which is the formula
each_dim_v = pytest.mark.parametrize("dim_v", [3, 5])


def by_loop(q, k, v, cuts_q=CUTS_Q, cuts_k=None, *, is_causal=False, scale=None):
    """The oracle: the formula for each segment."""
    cuts_k = CUTS_K if cuts_k is None else cuts_k
    groups = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    blank = q.new_zeros(*q.shape[:2], v.shape[2])
    ends_q, ends_k = cuts_q.tolist(), cuts_k.tolist()
    parts = [blank[: ends_q[0]]]
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * scale
        if is_causal:
            scores = scores.where(torch.ones_like(scores).bool().tril(), -math.inf)
        empty = b == a or d == c
        parts.append(
            blank[a:b] if empty else torch.einsum("hqk,khe->qhe", scores.softmax(-1), v[c:d])
        )
    return torch.cat([*parts, blank[ends_q[-1] :]])


def inputs(heads=(4, 2), dim_v=3, rows=(9, 10), dim=3, **options):
    options = {"dtype": torch.float64} | options
    q = torch.randn(rows[0], heads[0], dim, **options)
    k = torch.randn(rows[1], heads[1], dim, **options)
    return q, k, torch.randn(rows[1], heads[1], dim_v, **options)


def ours(q, k, v, cuts_q=CUTS_Q, cuts_k=CUTS_K, **options):
    return ragged_attention(q, k, v, cuts_q.to(q.device), cuts_k.to(q.device), **options)


@pytest.mark.parametrize("device", DEVICES)
@each_heads
@each_mask
@each_dim_v
def test_equals_a_loop(device, heads, is_causal, dim_v):
    args = inputs(heads, dim_v, device=device, requires_grad=True)
    options = {"is_causal": is_causal, "scale": 0.3 if is_causal else None}
    actual, expected = ours(*args, **options), by_loop(*args, **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    cotangent = torch.randn_like(actual)
    grads = (torch.autograd.grad(x, args, cotangent) for x in (actual, expected))
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "lengths", [[], [0, 0], [7], [1] * 9, [40, 3, 40, 0, 3, 70, 3, 1]], ids=str
)
@each_mask
def test_any_lengths(lengths, is_causal):
    cuts = offsets_of(torch.tensor(lengths, dtype=torch.int64))
    args = inputs(rows=(int(cuts[-1]),) * 2)
    actual = ragged_attention(*args, cuts.to(torch.int32), is_causal=is_causal)
    expected = by_loop(*args, cuts, cuts, is_causal=is_causal)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@each_mask
def test_rounds_as_pytorchs_kernels(device, dtype, is_causal):
    cuts = torch.tensor([0, 40, 41, 41, 130])
    args = inputs((4, 2), 16, (130, 130), 16, dtype=dtype, device=device)
    wide = [x.double().requires_grad_() for x in args]
    args = [x.requires_grad_() for x in args]
    actual = ours(*args, cuts, cuts, is_causal=is_causal)
    expected = by_loop(*wide, cuts, cuts, is_causal=is_causal)
    assert actual.dtype == dtype
    tolerance = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)
    cotangent = torch.randn_like(actual)
    grads = torch.autograd.grad(actual, args, cotangent)
    wide_grads = torch.autograd.grad(expected, wide, cotangent.double())
    for grad, wide_grad in zip(grads, wide_grads, strict=True):
        torch.testing.assert_close(grad.double(), wide_grad, rtol=tolerance, atol=tolerance)


@each_mask
def test_a_segment_is_what_pytorch_gives_for_it_alone(is_causal):
    """To the bit, whatever else is in the batch: nothing is padded."""
    lengths = torch.tensor([5, 60, 5, 300, 1, 5, 0, 60])
    cuts = offsets_of(lengths)
    q, k, v = inputs((4, 4), 16, (int(cuts[-1]),) * 2, 16, dtype=torch.float32)
    out = ragged_attention(q, k, v, cuts, is_causal=is_causal)
    for start, end in zip(cuts.tolist(), cuts.tolist()[1:], strict=False):
        if start == end:
            continue
        alone = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        expected = scaled_dot_product_attention(*alone, is_causal=is_causal)[0].transpose(0, 1)
        assert torch.equal(out[start:end], expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twice_is_equal_to_the_bit(device, dtype):
    args = inputs((4, 2), 16, dim=16, dtype=dtype, device=device, requires_grad=True)
    runs = [torch.autograd.grad(ours(*args).square().sum(), args) for _ in range(2)]
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.cat([x, x], 2)[..., : x.shape[2]],
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x[:1].expand_as(x),
        lambda x: x[:, :1].expand_as(x),
    ],
    ids=["heads first", "a part of each row", "dims before heads", "one row", "one head"],
)
def test_strides(view):
    q, k, v = map(view, inputs())
    torch.testing.assert_close(ours(q, k, v), by_loop(q, k, v), rtol=0, atol=1e-10)


@each_dim_v
def test_infinities_stay_in_their_segment(dim_v):
    q, k, v = inputs(dim_v=dim_v)
    k[8] = math.inf  # of the last segment
    v[3] = math.nan  # of the one without queries
    torch.testing.assert_close(ours(q, k, v)[:6], by_loop(q, k, v)[:6], rtol=0, atol=1e-10)


@each_dim_v
@pytest.mark.parametrize("cuts", [(CUTS_Q, CUTS_K), (torch.tensor([0, 2, 9]),) * 2])
def test_logsumexp(dim_v, cuts):
    q, k, v = inputs((2, 2), dim_v)
    _, lse = ragged_ops.OPS["ragged_attention"](q, k, v, *cuts, False, 0.5)
    for a, b, c, d in zip(*(x[i:].tolist() for x in cuts for i in (0, 1)), strict=False):
        expected = torch.einsum("qhd,khd->qhk", q[a:b], k[c:d]).mul(0.5).logsumexp(-1)
        torch.testing.assert_close(lse[a:b], expected)
    assert lse[9:].numel() == 0


# --- derivatives ---------------------------------------------------------------------------------


@each_mask
@each_dim_v
@pytest.mark.sampled(2)
def test_derivatives_equal_finite_differences(is_causal, dim_v):
    args = inputs((2, 1), dim_v, (4, 4), 3, requires_grad=True)
    cuts = torch.tensor([0, 1, 4]), torch.tensor([1, 3, 4])

    def call(*args):
        return ours(*args, *cuts, is_causal=is_causal)

    assert gradcheck(call, args, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(lambda *args: call(*args).sin(), args, check_fwd_over_rev=True)


ROUTES = {
    "hessian": torch.func.hessian,
    "fwd over fwd": lambda f, n: torch.func.jacfwd(torch.func.jacfwd(f, n), n),
    "rev over rev": lambda f, n: torch.func.jacrev(torch.func.jacrev(f, n), n),
    "rev over fwd": lambda f, n: torch.func.jacrev(torch.func.jacfwd(f, n), n),
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
@each_dim_v
def test_second_derivatives_by_every_route(route, dim_v):
    args = inputs((2, 1), dim_v)
    actual, expected = (
        transform(lambda *args, call=call: call(*args).sin().sum(), (0, 1, 2))(*args)
        for transform, call in ((route, ours), (torch.func.hessian, by_loop))
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_third_derivatives():
    q, k, v = inputs((1, 1))
    jacrev, jacfwd = torch.func.jacrev, torch.func.jacfwd
    actual, expected = (
        transform(lambda x, call=call: call(x, k, v).sin().sum())(q)
        for transform, call in (
            (lambda f: jacfwd(jacrev(jacrev(f))), ours),
            (lambda f: jacrev(jacrev(jacrev(f))), by_loop),
        )
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@each_dim_v
def test_gradients_of_the_logsumexp(dim_v):
    args = inputs((2, 2), dim_v, (5, 5), requires_grad=True)
    cuts = torch.tensor([0, 2, 5])

    def call(*args):
        return ragged_ops.OPS["ragged_attention"](*args, cuts, cuts, True, 0.7)

    assert gradcheck(call, args)
    (grad,) = torch.autograd.grad(call(*args)[1].sum(), args[0])
    assert grad.abs().sum() > 0


def test_tangents_carry_gradients():
    """Reverse over forward with dual numbers, on a tensor that autograd records."""
    q, k, v = inputs()
    t = torch.randn_like(q)
    q.requires_grad_()
    with forward_ad.dual_level():
        out = ours(forward_ad.make_dual(q, t), k, v).sin()
        (actual,) = torch.autograd.grad(forward_ad.unpack_dual(out).tangent.sum(), q)
    push = torch.func.jvp(
        torch.func.grad(lambda q: by_loop(q, k, v).sin().sum()), (q.detach(),), (t,)
    )
    torch.testing.assert_close(actual, push[1], rtol=0, atol=1e-10)


def results_and_grads(call):
    def run(*args):
        def loss(*args):
            out = call(*args)
            return out.sin().sum(), out

        return torch.func.grad(loss, (0, 1, 2), has_aux=True)(*args)

    return run


@pytest.mark.parametrize(
    "in_dims",
    [(0, None, None), (2, 2, 2), (None, 0, 1), (3, None, 0)],
    ids=str,
)
@each_dim_v
def test_vmap_equals_a_loop(in_dims, dim_v):
    examples = [inputs(dim_v=dim_v) for _ in range(3)]
    fixed = examples[0]
    args = [
        x if d is None else torch.stack([e[i] for e in examples], d)
        for i, (x, d) in enumerate(zip(fixed, in_dims, strict=True))
    ]
    actual = torch.vmap(results_and_grads(ours), in_dims)(*args)
    for n, example in enumerate(examples):
        each = [f if d is None else e for f, e, d in zip(fixed, example, in_dims, strict=True)]
        expected = results_and_grads(by_loop)(*each)
        leaves = [x[n] for x in torch.utils._pytree.tree_leaves(actual)]
        wanted = torch.utils._pytree.tree_leaves(expected)
        torch.testing.assert_close(leaves, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("in_dims", [(0, None, 0, 0, 0), (1, 0, 0, 0, None), (0, 0, 0, None, 0)])
def test_vmap_over_offsets(in_dims):
    cuts = [torch.stack(c) for c in (
        [CUTS_Q, torch.tensor([0, 2, 2, 4, 6, 9]), torch.tensor([2, 2, 2, 3, 3, 5])],
        [CUTS_K, torch.tensor([1, 1, 4, 4, 10, 10]), torch.tensor([0, 0, 0, 9, 9, 9])],
    )]  # fmt: skip
    examples = [(*inputs(), *(c[n] for c in cuts)) for n in range(3)]
    args = [
        examples[0][i] if d is None else torch.stack([e[i] for e in examples], d)
        for i, d in enumerate(in_dims)
    ]
    actual = torch.vmap(lambda *args: torch.func.jacrev(ours)(*args), in_dims)(*args)
    for n, example in enumerate(examples):
        each = [examples[0][i] if d is None else example[i] for i, d in enumerate(in_dims)]
        expected = torch.func.jacrev(by_loop)(*each)
        torch.testing.assert_close(actual[n], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", list(ragged_ops.OPS))
# the checks read .grad of what they are given, and hide this warning unless it is an error
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_operators_pass_the_checks_of_pytorch(name):
    args = inputs((2, 1), requires_grad=True)
    rest = (CUTS_Q, CUTS_K, False, 0.5)
    out, lse = (x.detach() for x in ragged_ops.OPS["ragged_attention"](*args, *rest))
    call = {
        "ragged_attention": (*args, *rest),
        "ragged_attention_backward": (torch.randn_like(out), *args, out, lse, *rest),
        "ragged_attention_derivative": ([*args, out, lse.clamp(min=0)], "r", *rest),
    }[name]
    results = torch.library.opcheck(ragged_ops.OPS[name], call)
    assert set(results.values()) == {"SUCCESS"}


# --- graphs --------------------------------------------------------------------------------------


def loss(q, k, v, cuts):
    return ragged_attention(q.exp(), k, v, cuts).sin().sum()


def names_of(graph):
    return [e.op._opname for e in graph.eqns if e.op.namespace == "torchremat"]


def test_is_one_node_and_so_is_its_derivative():
    args = (*inputs(rows=(9, 9)), torch.tensor([0, 3, 9]))
    graph = tr.make_graph(loss)(*args)
    assert names_of(graph) == ["ragged_attention"]
    grad = tr.make_graph(torch.func.grad(loss))(*args)
    assert names_of(grad) == ["ragged_attention", "ragged_attention_backward"]
    pushed = names_of(tr.jvp_graph(graph))
    assert pushed == ["ragged_attention", "ragged_attention_derivative"]


@pytest.mark.parametrize("policy", ["none", "full", "ops:torchremat.ragged_attention"])
def test_in_a_checkpoint(policy):
    args = (*inputs(rows=(9, 9)), torch.tensor([0, 3, 9]))
    block = tr.checkpoint(loss, policy=policy)
    torch.testing.assert_close(torch.func.grad(block)(*args), torch.func.grad(loss)(*args))
    torch.testing.assert_close(torch.func.hessian(block)(*args), torch.func.hessian(loss)(*args))


def test_many_lengths_in_a_checkpoint():
    block = tr.checkpoint(loss)
    for total in (4, 6, 9, 30):
        args = (*inputs(rows=(total, total), requires_grad=True), torch.tensor([0, 1, total]))
        grads = (torch.autograd.grad(f(*args), args[:3]) for f in (block, loss))
        assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_under_torch_compile(backend):
    args = (*inputs(rows=(9, 9), requires_grad=True), torch.tensor([0, 3, 9]))
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    grads = (torch.autograd.grad(f(*args), args[:3]) for f in (compiled, loss))
    torch.testing.assert_close(*grads)


# --- parts and errors ----------------------------------------------------------------------------


def test_chunks_hold_each_pair_of_rows_once():
    lengths = torch.randint(0, 9, (2, 60))
    cuts = [offsets_of(row) for row in lengths]
    seen = torch.zeros(int(cuts[0][-1]), int(cuts[1][-1]), dtype=torch.int64)
    for chunk in ragged_eager.chunks_of(*cuts):
        rows = [chunk.take(torch.arange(c[-1]), side) for side, c in enumerate(cuts)]
        for queries, keys in zip(*rows, strict=True):
            seen[queries[:, None], keys] += 1
    segments = [torch.arange(60).repeat_interleave(row) for row in lengths]
    assert torch.equal(seen, (segments[0][:, None] == segments[1]).long())


Q, K, CUTS = torch.ones(3, 4, 2), torch.ones(3, 2, 2), torch.tensor([0, 3])


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (([1.0], K, K, CUTS), SegmentTypeError, "q that is a tensor.*list"),
        ((Q, K, K, [0, 3]), SegmentTypeError, "offsets_q that is a tensor.*list"),
        ((Q, K, K, CUTS, (0, 3)), SegmentTypeError, "offsets_k that is a tensor.*tuple"),
        ((Q, K.double(), K, CUTS), SegmentTypeError, "one floating dtype.*k torch.float64"),
        ((Q.int(), K.int(), K.int(), CUTS), SegmentTypeError, "one floating dtype.*int32"),
        ((Q, K, K, CUTS.float()), SegmentTypeError, "offsets_q of an integer dtype.*float32"),
        ((Q.to("meta"), K, K, CUTS), SegmentError, "q meta, k cpu.*one device"),
        ((Q, K, K, CUTS.to("meta")), SegmentError, "q on cpu and offsets_q on meta"),
        ((Q[0], K, K, CUTS), SegmentError, r"q \[total_q, heads, dim\].*q \[4, 2\]"),
        ((Q, K[..., :1], K, CUTS), SegmentError, r"one dim.*k \[3, 2, 1\]"),
        ((Q, K, K[:2], CUTS), SegmentError, r"a value for each key.*v \[2, 2, 2\]"),
        ((Q[:, :3], K, K, CUTS), SegmentError, r"a multiple.*q \[3, 3, 2\]"),
        ((Q, K, K, CUTS[None]), SegmentError, r"\[num_segments \+ 1\].*shape \[1, 2\]"),
        ((Q, K, K, CUTS, CUTS[:1]), SegmentError, "2 offsets_q and 1 offsets_k"),
        ((Q, K, K, torch.tensor([0, 3, 2])), SegmentError, r"offsets\[1\] is 3"),
        ((Q, K, K, CUTS, torch.tensor([0, 4])), SegmentError, "to 4.*the 3 rows"),
    ],
)
def test_errors(args, error, message):
    with pytest.raises(error, match=message):
        ragged_attention(*args)
