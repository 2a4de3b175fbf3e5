"""Derivatives of loops of any order, and batches, beside `torch.func` of the loop written out."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import torchremat as tr
from tests.helpers import assert_same

torch.manual_seed(0)
W = torch.randn(4, 4, dtype=torch.double)
H = torch.randn(3, 4, dtype=torch.double)
XS = torch.randn(5, 3, 4, dtype=torch.double)


def loop(steps, h, w=W):
    """A loop with a counter, an int, in its state."""

    def body(state):
        number, h = state
        return number + 1, torch.tanh(h @ w)

    return tr.while_loop(lambda state: state[0] < steps, body, (0, h), budget=3 * h.nbytes)[1]


def plain(steps, h, w=W):
    for _ in range(int(steps)):
        h = torch.tanh(h @ w)
    return h


def scanned(h, xs, w):
    last, sums = tr.scan(lambda h, x: (torch.tanh(h @ w + x), (h * x).sum()), h, xs)
    return last.sum() + sums.square().sum()


def unrolled(h, xs, w):
    sums = []
    for x in xs.unbind():
        h, result = torch.tanh(h @ w + x), (h * x).sum()
        sums.append(result)
    return h.sum() + torch.stack(sums).square().sum()


@pytest.mark.parametrize("order", [1, 2, 3])
def test_reverse_mode_of_any_order(order):
    found = []
    for fun in (scanned, unrolled):
        inputs = [t.clone().requires_grad_() for t in (H, XS, W)]
        value = fun(*inputs)
        for _ in range(order):
            value = sum(
                g.sin().sum() for g in torch.autograd.grad(value, inputs, create_graph=True)
            )
        found.append(value.detach())
    torch.testing.assert_close(*found, rtol=1e-8, atol=0)


def test_gradcheck():
    inputs = [t.clone().requires_grad_() for t in (H[:1], XS[:3, :1], W)]
    options = {"check_forward_ad": True, "check_batched_grad": True}
    assert torch.autograd.gradcheck(scanned, inputs, **options)
    assert torch.autograd.gradgradcheck(scanned, inputs, check_fwd_over_rev=True)


PAIRS = list(itertools.product((jacfwd, jacrev), repeat=2))


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_jacobians_of_jacobians(outer, inner):
    expected = hessian(lambda h: plain(4, h).square().sum())(H)
    found = outer(inner(lambda h: loop(4, h).square().sum()))(H)
    assert_same(found, expected, close=True)


def test_forward_mode_and_vjp_of_several_inputs():
    inputs, moves = (H, XS, W), (H.sin(), XS.cos(), W.exp())
    assert_same(jvp(scanned, inputs, moves), jvp(unrolled, inputs, moves), close=True)
    found, expected = (vjp(f, *inputs)[1](torch.tensor(2.0).double()) for f in (scanned, unrolled))
    assert_same(found, expected, close=True)


def test_a_dual_level():
    found = []
    for fun in (scanned, unrolled):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(H, H.sin())
            found.append(forward_ad.unpack_dual(fun(dual, XS, W)).tangent)
    assert_same(*found, close=True)


@pytest.mark.parametrize(
    "dims", [(0, None, None), (None, 1, None), (0, 1, None), (0, 0, 0), (None, None, 0)]
)
def test_batches_of_scans(dims):
    sizes = [(2, 0), (2, 1), (2, 0)]
    inputs = [
        t if dim is None else torch.stack([t, t.cos()], dim)
        for t, dim, _ in zip((H, XS, W), dims, sizes, strict=True)
    ]
    for transform in (lambda f: f, lambda f: grad(f, argnums=(0, 1, 2)), lambda f: jacfwd(f)):
        found, expected = (vmap(transform(f), dims)(*inputs) for f in (scanned, unrolled))
        assert_same(found, expected, close=True)


def test_gradients_of_batches_are_sums():
    inputs = torch.stack([H, H.cos()])
    found, expected = (
        grad(lambda w, f=f: vmap(f, (0, None, None))(inputs, XS, w).sum())(W)
        for f in (scanned, unrolled)
    )
    assert_same(found, expected, close=True)


def test_elements_of_a_batch_end_apart():
    steps = torch.tensor([2, 5, 3])
    for transform in (lambda f: f, grad, lambda f: grad(lambda h, n: grad(f)(h, n).sin().sum())):
        found = vmap(transform(lambda h, n: loop(n, h).sum()))(H, steps)
        one = transform(lambda h, n: plain(n, h).sum())
        expected = torch.stack([one(h, n) for h, n in zip(H, steps, strict=True)])
        assert_same(found, expected, close=True)


def test_batches_of_batches():
    steps = torch.tensor([2, 4])
    found = vmap(vmap(lambda h, n: loop(n, h).sum(), (0, None)), (None, 0))(H, steps)
    expected = torch.stack([torch.stack([plain(n, h).sum() for h in H]) for n in steps])
    assert_same(found, expected, close=True)


def test_batches_of_random_steps():
    def draw(h):
        return tr.scan(lambda h, _: (h + torch.rand_like(h), None), h, length=3)[0]

    torch.manual_seed(0)
    found = vmap(draw, randomness="different")(torch.zeros(4, 2))
    assert len(set(found.flatten().tolist())) == 8
    same = vmap(draw, randomness="same")(torch.zeros(4, 2))
    assert_same(same, same[:1].expand(4, 2))
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(draw)(torch.zeros(4, 2))


def test_our_transforms_take_loops():
    found = tr.vmap(tr.grad(lambda h: loop(3, h).sum()))(H)
    assert_same(found, vmap(grad(lambda h: plain(3, h).sum()))(H), close=True)
    _, push = tr.linearize(lambda h: scanned(h, XS, W), H)
    assert_same(push(H), jvp(lambda h: unrolled(h, XS, W), (H,), (H,))[1], close=True)


def test_second_derivatives_with_a_checkpoint_in_each_step():
    step = tr.checkpoint(lambda h: torch.tanh(h @ W), policy="dots")

    def loss(h):
        return tr.scan(lambda h, _: (step(h), None), h, length=5)[0].square().sum()

    expected = hessian(lambda h: plain(5, h).square().sum())(H[0])
    assert_same(hessian(loss)(H[0]), expected, close=True)
    found = vmap(grad(loss))(H)
    assert_same(found, vmap(grad(lambda h: plain(5, h).square().sum()))(H), close=True)


def test_second_derivatives_save_few_states_too():
    from torchremat.measure import LiveBytes

    w = torch.randn(32, 32, requires_grad=True)
    h0 = torch.randn(64, 32)

    def peak(steps):
        def run():
            last, _ = tr.scan(lambda h, _: (torch.tanh(h @ w), None), h0, length=steps)
            (first,) = torch.autograd.grad(last.sum(), w, create_graph=True)
            first.square().sum().backward()

        run()
        with LiveBytes() as memory:
            run()
        return memory.peak

    assert peak(256) - peak(16) < 90 * h0.nbytes  # of states and tangents; 240 steps more
