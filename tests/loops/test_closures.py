"""What the functions of a loop close over: found, whoever reads it, and never lost."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchremat as tr
from tests.helpers import assert_same
from torchremat.errors import EffectError

ROWS, WIDTH, STEPS = 3, 4, 6


@pytest.fixture
def xs():
    torch.manual_seed(0)
    return torch.randn(STEPS, ROWS, WIDTH, requires_grad=True)


def zeros():
    return torch.zeros(ROWS, WIDTH)


def written_out(f, state, xs):
    results = []
    for x in xs:
        state, result = f(state, x)
        results.append(result)
    return state, torch.stack(results)


def check(f, xs, wrt, *, close=False):
    wrt = list(wrt)
    found, expected = tr.scan(f, zeros(), xs), written_out(f, zeros(), xs)
    assert_same(found, expected, close=close)
    gradients = [
        torch.autograd.grad(last.sum() + results.square().sum(), [xs, *wrt], allow_unused=True)
        for last, results in (found, expected)
    ]
    assert_same(*gradients, close=close)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, cotangent):
        a, b = ctx.saved_tensors
        return cotangent * b, (cotangent * a).sum(0)


def test_parameters_of_a_module(xs):
    layer = nn.Linear(WIDTH, WIDTH)
    check(lambda h, x: (torch.tanh(layer(h + x)), h.sum()), xs, layer.parameters())


def test_a_tensor_that_is_read_three_times_in_a_step(xs):
    """Autograd adds its gradients one by one."""
    v = torch.randn(WIDTH, requires_grad=True)

    def f(h, x):
        return torch.sin(v * torch.cos(v * torch.sin(v + h + x))), x.sum()

    check(f, xs, [v])


def test_what_a_function_of_autograd_is_given(xs):
    v = torch.randn(WIDTH, requires_grad=True)
    check(lambda h, x: (Product.apply(torch.sin(h + x), v), h.sum()), xs, [v])


@pytest.mark.parametrize(
    "wrap", [tr.checkpoint, lambda f: lambda h: checkpoint(f, h, use_reentrant=False)]
)
def test_what_a_checkpoint_inside_closes_over(wrap, xs):
    layer = nn.Linear(WIDTH, WIDTH)

    def f(h, x):
        h = wrap(lambda h: torch.tanh(layer(h) + x))(h)
        return h, h.sum()

    check(f, xs, layer.parameters())


def test_what_torch_func_inside_closes_over(xs):
    v = torch.randn(WIDTH, requires_grad=True)

    def f(h, x):
        h = torch.func.vmap(lambda row: torch.sin(row * v))(h + x)
        slope = torch.func.grad(lambda h: (h * v).square().sum())(h)
        return h, slope.sum()

    check(f, xs, [v], close=True)


def test_what_an_inner_loop_closes_over(xs):
    layer = nn.Linear(WIDTH, WIDTH)

    def inner(h, x):
        return tr.scan(lambda h, _: (torch.tanh(layer(h) + x), None), h, length=3)[0]

    def inner_written_out(h, x):
        for _ in range(3):
            h = torch.tanh(layer(h) + x)
        return h

    results = []
    for body in (inner, inner_written_out):
        last, sums = tr.scan(lambda h, x, body=body: (body(h, x), h.sum()), zeros(), xs)
        results.append(torch.autograd.grad(last.sum() + sums.sum(), [xs, *layer.parameters()]))
    assert_same(*results, close=True)


def test_tensors_that_later_steps_read_first(xs):
    """A layer for each step: the first step has read one of six."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(STEPS)]

    def f(state, x):
        number, h = state
        return (number + 1, torch.tanh(layers[int(number)](h) + x)), h.sum()

    (_, found), _ = tr.scan(f, (0, zeros()), xs)
    (_, expected), _ = written_out(f, (0, zeros()), xs)
    assert_same(found, expected)
    wrt = [p for layer in layers for p in layer.parameters()]
    assert_same(torch.autograd.grad(found.sum(), wrt), torch.autograd.grad(expected.sum(), wrt))


def test_results_of_the_caller_that_have_a_graph(xs):
    v = torch.randn(WIDTH, requires_grad=True)
    scale = torch.exp(v)
    last, _ = tr.scan(lambda h, x: (torch.sin(h * scale + x), None), zeros(), xs)
    h = zeros()
    for x in xs:
        h = torch.sin(h * scale + x)
    assert_same(
        torch.autograd.grad(last.sum(), v, retain_graph=True), torch.autograd.grad(h.sum(), v)
    )


def test_what_nobody_sees_is_refused(xs):
    """A function in C that no mode is asked about: its tensor would lose its gradient."""
    layer = nn.Linear(WIDTH, WIDTH)

    def f(h, x):
        with torch._C.DisableTorchFunction():
            h = torch.tanh(layer(h) + x)
        return h, None

    last, _ = tr.scan(f, zeros(), xs)
    with pytest.raises(EffectError, match="where the loop does not see it"):
        last.sum().backward()


def test_the_condition_may_close_over_tensors():
    limit = torch.tensor(100.0, requires_grad=True)
    x = torch.tensor(1.0, requires_grad=True)
    last = tr.while_loop(lambda x: x < limit, lambda x: 3 * x, x)
    assert last.item() == 243
    assert torch.autograd.grad(last, [x, limit], allow_unused=True)[0].item() == 243


@pytest.mark.parametrize("policy", ["none", "dots", "budget:least"])
def test_a_checkpoint_around_a_loop_decides_of_its_steps(policy, xs):
    layer = nn.Linear(WIDTH, WIDTH)

    def loss(xs):
        last, sums = tr.scan(lambda h, x: (torch.tanh(layer(h) + x), h.sum()), zeros(), xs)
        return last.sum() + sums.sum()

    wrt = [xs, *layer.parameters()]
    wrapped = tr.checkpoint(loss, policy=policy)
    assert_same(torch.autograd.grad(wrapped(xs), wrt), torch.autograd.grad(loss(xs), wrt))
    assert tr.plan(loss, xs, budget=0.9).peak_bytes < tr.estimate(loss, xs).peak_bytes


def test_a_checkpoint_around_a_loop_that_ends_by_values(xs, monkeypatch):
    v = torch.full((WIDTH,), 0.5, requires_grad=True)

    def loss(x):
        return tr.while_loop(lambda h: h.abs().sum() > 0.1, lambda h: torch.sin(h * v), x).sum()

    x = xs.detach()[0]
    monkeypatch.setattr(tr.config, "untraceable", "tape")
    found = torch.autograd.grad(tr.checkpoint(loss)(x), v)
    assert_same(found, torch.autograd.grad(loss(x), v))


@pytest.mark.parametrize("backend", ["eager", "torchremat"])
def test_torch_compile_breaks_its_graph_at_a_loop(backend, xs):
    layer = nn.Linear(WIDTH, WIDTH)

    def loss(xs):
        xs = torch.sin(xs)
        last, _ = tr.scan(lambda h, x: (torch.tanh(layer(h) + x), None), zeros(), xs)
        return last.square().sum()

    options = {"codegen": "eager"} if backend == "torchremat" else None
    compiled = torch.compile(loss, backend=backend, options=options)
    wrt = [xs, *layer.parameters()]
    assert_same(torch.autograd.grad(compiled(xs), wrt), torch.autograd.grad(loss(xs), wrt))
