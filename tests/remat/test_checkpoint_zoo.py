"""Values and derivatives of a zoo of functions are equal, to the bit, with and without checkpoint.

A case is a function of a dtype that gives a function, its arguments, and what else is
differentiated (parameters). Second derivatives are of a loss linear in the gradient.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchremat as tr
from tests.helpers import (
    RandomPolicy,
    assert_same,
    derivatives,
    differences,
    leaves_of,
    nothing_left_behind,
    one_in,
)

aten = torch.ops.aten
POLICIES: dict[str, Callable[[], Any]] = {
    "full": lambda: None,
    "none": lambda: "none",
    "dots": lambda: "dots",
    "random": lambda: RandomPolicy(3),
}


@dataclass
class Case:
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    module: nn.Module | None = None
    """Whose parameters are differentiated, and whose buffers are compared."""


@dataclass
class Animal:
    build: Callable[[torch.dtype], Case]
    order: int
    close: str | None = None
    """Why derivatives are equal only to rounding, if they are."""

    def allows_rounding(self, key: str) -> bool:
        return self.close is not None and key.startswith("derivative")


ZOO: dict[str, Animal] = {}


def animal(order: int = 2, **excuses: str) -> Callable[..., Any]:
    def add(build: Callable[[torch.dtype], Case]) -> Callable[[torch.dtype], Case]:
        ZOO[build.__name__] = Animal(build, order, **excuses)
        return build

    return add


def case(fun: Callable[..., Any], *shapes: Any, **kwargs: Any) -> Callable[[torch.dtype], Case]:
    """A case of `fun` with random arguments of these shapes; tensors are taken as they are."""

    def build(dtype: torch.dtype) -> Case:
        args = [
            torch.randn(s, dtype=dtype) if isinstance(s, tuple) else copy.copy(s) for s in shapes
        ]
        return Case(fun, tuple(args), kwargs)

    return build


def add(name: str, fun: Callable[..., Any], *shapes: Any, order: int = 2, **excuses: str) -> None:
    ZOO[name] = Animal(case(fun, *shapes), order, **excuses)


# --- pointwise, products, reductions -------------------------------------------------------------

add("mm", lambda x, w: torch.tanh(x @ w), (3, 4), (4, 5))
add("pointwise", lambda x: x.sigmoid() * x.sin().exp() + x.cos() / (1 + x * x), (3, 4))
add("softmax", lambda x: torch.softmax(x, -1).log(), (3, 4))
add("log_softmax", lambda x: F.log_softmax(x.sin(), 0).exp(), (3, 4))
add("layer norm", lambda x, w, b: F.layer_norm(x, (4,), w, b).sin(), (3, 4), (4,), (4,))
add("group norm", lambda x: F.group_norm(x, 2).tanh(), (2, 4, 3))
add("reductions", lambda x: x.sum(0) * x.mean() + x.amax(0) - x.norm(), (3, 4))
add("std and var", lambda x: x.std(0) / x.var(1, keepdim=True).sqrt(), (3, 4))
add("cumsum", lambda x: x.cumsum(0).sin().cumsum(1), (3, 4))
add("logsumexp", lambda x: torch.logsumexp(x.sin(), 1), (3, 4))
add("max and sort", lambda x: x.max(1).values * x.sort(1)[0].t() + x.topk(2, 0)[0].sum(), (3, 4))
add("gelu", lambda x: F.gelu(x) * F.gelu(x.sin(), approximate="tanh"), (3, 4))
add("silu", lambda x: F.silu(x), (9, 11))
add("relu and abs", lambda x: torch.relu(x) + x.abs() + F.leaky_relu(x, 0.1), (3, 4))
add("einsum", lambda x, w: torch.einsum("ij,jk->ki", x, w).exp(), (3, 4), (4, 5))
add("bmm", lambda x, w: torch.tanh(x @ w) @ w.mT, (2, 3, 4), (2, 4, 5))
add("where", lambda x: torch.where(x > 0, x.exp(), x.sin()), (3, 4))
add(
    "loop",
    lambda x, h: functools.reduce(lambda a, _: torch.tanh(a @ h), range(4), x),
    (3, 4),
    (4, 4),
)
add("glu and roll", lambda x: F.glu(x) * x.roll(1, 1)[:, :2], (3, 4))
add(
    "linalg", lambda w: torch.linalg.inv(w @ w.t() + 5 * torch.eye(3, dtype=w.dtype)).sum(1), (3, 4)
)
add("cross entropy", lambda x: F.cross_entropy(x.tanh(), torch.tensor([0, 1, 2])), (3, 4))
add("pad and pool", lambda x: F.avg_pool1d(F.pad(x, (1, 1)), 2).sin(), (2, 3, 4))
add(
    "constants",
    lambda x: x * torch.arange(4, dtype=x.dtype) + torch.ones(3, 1, dtype=x.dtype),
    (3, 4),
)
add(
    "prod",
    lambda x: x.sin().prod(1),
    (3, 4),
    close="prod_backward looks at the values, whether one is 0: a trace cannot, and takes the "
    "formula that is right for all",
)

# --- views, indexing, layouts --------------------------------------------------------------------

add("views", lambda x: x.view(2, 6).t().reshape(4, 3).unsqueeze(0).expand(2, 4, 3).sin(), (3, 4))
add("slices", lambda x: x[1:, ::2].sin() * x[0, 1] + x.narrow(1, 0, 2)[:2], (3, 4))
add("index", lambda x: x[torch.tensor([0, 2, 0])] * x[1].exp(), (3, 4))
add("gather", lambda x: x.gather(1, torch.tensor([[0, 3], [1, 1], [2, 0]])).sin(), (3, 4))
add("cat and chunk", lambda x, v: torch.cat([x, v.sin()], 1).chunk(2, 1)[1], (3, 4), (3, 4))
add("split", lambda x: [a.exp() * i for i, a in enumerate(x.split(1, 1))], (3, 4))
add("stack", lambda x: torch.stack(x.sin().unbind(0), 1).flip(0), (3, 4))
add("expanded", lambda x: x[:1].expand(5, 4) * torch.ones(5, 4, dtype=x.dtype), (3, 4))
add(
    "scatter",
    lambda x: torch.zeros_like(x).scatter(1, torch.tensor([[3, 1, 0, 2]] * 3), x.sin()),
    (3, 4),
)
add("masked fill", lambda x: x.masked_fill(x < 0, 0.5).tril() * x, (3, 3))
add("as_strided", lambda x: x.sin().as_strided((2, 2), (4, 1)).exp(), (3, 4))


@animal()
def transposed_input(dtype):
    return Case(
        lambda x: x.contiguous().view(-1) * x.reshape(-1), (torch.randn(4, 3, dtype=dtype).t(),)
    )


@animal()
def strided_input(dtype):
    return Case(lambda x: x.sin() @ x.t(), (torch.randn(6, 8, dtype=dtype)[::2, ::2],))


@animal()
def expanded_input(dtype):
    return Case(lambda x: x.sin() * x, (torch.randn(1, 4, dtype=dtype).expand(3, 4),))


# --- in place ------------------------------------------------------------------------------------

add("in place", lambda x: x.sin().mul_(2).add_(x), (3, 4))
add("in place after use", lambda x: (lambda y: (y * 2, y.add(1).exp_()))(x.sin()), (3, 4))
add("relu_", lambda x: F.relu(x.sin(), inplace=True) * x, (3, 4))


@animal()
def in_place_through_views(dtype):
    def fun(x):
        y = x.clone()
        y[0] = y[1] * 2
        y[:, 1].add_(x[:, 0]).mul_(3)
        y.t()[2].mul_(y[0, 0].clone())
        return y.sin()

    return Case(fun, (torch.randn(3, 4, dtype=dtype),))


@animal()
def out_and_fill(dtype):
    def fun(x):
        y = torch.zeros(3, 4, dtype=x.dtype)
        for i in range(3):
            y[i] = x[i].sin() * (i + 1)
        return y.cumsum(0)

    return Case(fun, (torch.randn(3, 4, dtype=dtype),))


@animal()
def writes_to_an_argument(dtype):
    def fun(x, counter):
        counter.add_(1)
        return x.sin() * counter

    return Case(fun, (torch.randn(3, 4, dtype=dtype), torch.zeros(4)))


# --- structure of inputs and outputs -------------------------------------------------------------

add(
    "outputs",
    lambda x, w: (x.sin(), (x @ w).relu(), 3, None, {"a": x.argmax(), "s": "t"}),
    (3, 4),
    (4, 2),
)
add("the same twice", lambda x: (lambda y: [y, (y, y.cos())])(x.sin()), (3, 4))
add("an input returned", lambda x: (x, x.sin()), (3, 4))
add("only an input returned", lambda x: x, (3, 4))
add("a detached output", lambda x: (lambda y: (y, y.detach(), x.detach()))(x.sin()), (3, 4))
add("views of one output", lambda x: (lambda y: (y.view(-1), y.t(), y[0]))(x.sin()), (3, 4))
add("a view of an input", lambda x: (x.view(-1), x.sin().t()), (3, 4))
add("integer output", lambda x: (x.argmax(1), x > 0, x.exp()), (3, 4))
add("literal outputs", lambda x: {"n": x.shape[0], "f": 2.5, "x": x.tan(), "d": x.dtype}, (3, 4))
add("constant output", lambda x: (torch.ones(2, dtype=x.dtype), x * 1), (3, 4))
add("unused input", lambda x, y: x.sin(), (3, 4), (2,))
add("zero-dim", lambda x: x.exp() * x, ())
add("zero size", lambda x: x[:0].sin().sum() + x.sum(), (3, 4))
add("empty", lambda x: x.sin(), (0, 3))
add("integers in", lambda x, i: x[i].sin(), (3, 4), torch.tensor([1, 0]))
add("embedding", lambda w, i: F.embedding(i, w).tanh() @ w.t(), (5, 4), torch.tensor([0, 1, 1]))
add("one_hot", lambda w, i: F.one_hot(i, 5).to(w.dtype) @ w, (5, 4), torch.tensor([0, 1, 4]))
add("number arguments", lambda x, s, flag: x * s if flag else x, (3, 4), 2.5, True)


@animal()
def trees(dtype):
    def fun(params, *, x, scale=2.0):
        h = torch.tanh(x["in"] @ params["w"][0] + params["b"])
        return {"out": (h @ params["w"][1]) * scale, "h": [h]}

    params = {
        "w": [torch.randn(4, 5, dtype=dtype), torch.randn(5, 2, dtype=dtype)],
        "b": torch.randn(5, dtype=dtype),
    }
    x = {"in": torch.randn(3, 4, dtype=dtype), "none": None}
    return Case(fun, (params,), {"x": x, "scale": 1.5})


@animal()
def keyword_only(dtype):
    return Case(
        lambda *, a, b: a.sin() @ b,
        (),
        {"b": torch.randn(4, 2, dtype=dtype), "a": torch.randn(3, 4, dtype=dtype)},
    )


@animal()
def mixed_dtypes(dtype):
    def fun(x, y):
        return (x.to(torch.float32) * y).to(dtype).sin(), x.to(torch.bfloat16).to(dtype)

    return Case(fun, (torch.randn(3, 4, dtype=dtype), torch.randn(4, dtype=torch.float32)))


# --- autograd inside -----------------------------------------------------------------------------


class OldCube(torch.autograd.Function):
    """Its derivative is one and a half times the true one, so that we see whose rule is used."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3 * x**2 * 1.5


class NewSin(torch.autograd.Function):
    @staticmethod
    def forward(x, scale):
        return x.sin() * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos() * 2 * ctx.scale, None


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        y = x @ w
        ctx.save_for_backward(x, w)
        ctx.mark_non_differentiable(index := y.argmax(1))
        return y, index

    @staticmethod
    def backward(ctx, g, _):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


add("old Function", lambda x: OldCube.apply(x).sin(), (3, 4))
add("old Function inside", lambda x: torch.exp(OldCube.apply(x.sin())) * x, (3, 4))
add("new Function", lambda x: torch.exp(NewSin.apply(x.sin(), 3.0)), (3, 4))
add("Function of two outputs", lambda x, w: TwoOutputs.apply(x.sin(), w.cos()), (3, 4), (4, 5))
add("detach", lambda x: x * x.detach().exp() + x.data.sin(), (3, 4))
add(
    "grad inside",
    lambda x: torch.autograd.grad((x.sin() ** 2).sum(), x, create_graph=True)[0] * x,
    (3, 4),
)
add("func.grad inside", lambda x: torch.func.grad(lambda a: (a**3).sum())(x) * x, (3, 4))
add("vmap inside", lambda x: torch.vmap(lambda a: a.sin().sum() * a)(x), (3, 4))
add("jvp inside", lambda x: torch.func.jvp(torch.sin, (x,), (x * 2,))[1], (3, 4))


@animal()
def no_grad(dtype):
    def fun(x):
        with torch.no_grad():
            mask = x.sigmoid()
        return (x * mask).sin()

    return Case(fun, (torch.randn(3, 4, dtype=dtype),))


@animal()
def enable_grad_inside_no_grad(dtype):
    def fun(x):
        with torch.no_grad():
            with torch.enable_grad():
                y = x.sin()
            z = y.exp()
        return y * z

    return Case(fun, (torch.randn(3, 4, dtype=dtype),))


@animal()
def requires_grad_inside(dtype):
    def fun(x):
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(leaf.pow(3).sum(), leaf)
        return x * slope

    return Case(fun, (torch.randn(3, 4, dtype=dtype),))


@animal()
def autocast_inside(dtype):
    def fun(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
        return y.to(x.dtype).sin()

    # autocast leaves doubles alone
    return Case(fun, (torch.randn(3, 4, dtype=dtype), torch.randn(4, 4, dtype=dtype)))


@animal()
def backward_hook_on_a_tensor(dtype):
    def fun(x):
        y = x.sin()
        y.register_hook(lambda g: g * 2)
        return y.exp()

    return Case(fun, (torch.randn(3, 4, dtype=dtype),))


@animal()
def complex_numbers(dtype):
    def fun(x):
        z = torch.fft.fft(x.cos()) * torch.complex(x, x.sin()).conj()
        return torch.view_as_real(z).sum(-1), z.abs(), z.angle()

    return Case(fun, (torch.randn(3, 4, dtype=dtype),))


@animal()
def complex_input_and_output(dtype):
    kind = torch.complex128 if dtype == torch.double else torch.complex64
    z, w = torch.randn(3, 4, dtype=kind), torch.randn(4, 2, dtype=kind)
    return Case(lambda z, w: (z.conj().exp() @ w, z.imag * 2), (z, w))


@animal()
def conjugated_input(dtype):
    kind = torch.complex128 if dtype == torch.double else torch.complex64
    return Case(lambda z: z * z.sin(), (torch.randn(3, 4, dtype=kind).conj(),))


# --- control flow --------------------------------------------------------------------------------

# the derivative of torch.cond has no derivative of its own in PyTorch 2.13
add(
    "cond",
    lambda x: torch.cond(x.sum() > 0, lambda a: a.sin() * 2, lambda a: a.cos(), (x,)) * x,
    (3, 4),
    order=1,
)


@animal(order=1)
def cond_closing_over(dtype):
    def fun(x, w):
        return torch.cond(x.sum() > 0, lambda a: (a @ w).tanh(), lambda a: a.cos() @ w, (x,)).exp()

    return Case(fun, (torch.randn(3, 4, dtype=dtype), torch.randn(4, 4, dtype=dtype)))


@animal(order=1)
def scan(dtype):
    from torch._higher_order_ops.scan import scan as scan_op

    def fun(x, w):
        def step(carry, row):
            h = torch.tanh(carry @ w + row)
            return h, h.sin()

        carry, rows = scan_op(step, torch.zeros(3, dtype=x.dtype), x)
        return carry, rows

    return Case(fun, (torch.randn(5, 3, dtype=dtype), torch.randn(3, 3, dtype=dtype)))


# --- models --------------------------------------------------------------------------------------


def model(module: nn.Module, *args: torch.Tensor, dtype: torch.dtype, **kwargs: Any) -> Case:
    return Case(module, args, kwargs, module=module.to(dtype))


@animal()
def mlp(dtype):
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return model(net, torch.randn(4, 8, dtype=dtype), dtype=dtype)


@animal()
def convolution(dtype):
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.Flatten())
    return model(net, torch.randn(2, 3, 5, 5, dtype=dtype), dtype=dtype)


@animal()
def transposed_convolution(dtype):
    net = nn.Sequential(nn.ConvTranspose1d(3, 4, 3, stride=2), nn.Tanh(), nn.MaxPool1d(2))
    return model(net, torch.randn(2, 3, 5, dtype=dtype), dtype=dtype)


@animal()
def batch_norm(dtype):
    net = nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4))
    return model(net, torch.randn(2, 3, 5, dtype=dtype), dtype=dtype)


@animal()
def batch_norm_in_eval(dtype):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()).eval()
    return model(net, torch.randn(3, 4, dtype=dtype), dtype=dtype)


@animal()
def batch_norm_twice(dtype):
    """One module run twice in one call, as with shared weights."""
    norm = nn.BatchNorm1d(4)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return self.norm(self.norm(x).sin())

    return model(Net(), torch.randn(3, 4, dtype=dtype), dtype=dtype)


# the fused kernels of attention have no second derivative
@animal(order=1)
def attention(dtype):
    def fun(q, k):
        return F.scaled_dot_product_attention(q, k.sin(), k, is_causal=True).exp()

    return Case(fun, (torch.randn(1, 2, 4, 8, dtype=dtype), torch.randn(1, 2, 4, 8, dtype=dtype)))


@animal(order=1)
def transformer_layer(dtype):
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return model(net, torch.randn(2, 4, 8, dtype=dtype), dtype=dtype)


@animal(order=1)
def multihead_attention(dtype):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, mask):
            return self.attention(x, x.sin(), x, attn_mask=mask, need_weights=True)

    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    return model(Net(), torch.randn(2, 4, 8, dtype=dtype), mask, dtype=dtype)


@animal(order=1)
def dropout(dtype):
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.1))
    return model(net, torch.randn(3, 4, dtype=dtype), dtype=dtype)


@animal(order=1)
def noise(dtype):
    def fun(x):
        return (
            (x + torch.randn_like(x)).sin()
            * torch.rand(4, dtype=x.dtype)
            * torch.bernoulli(x.sigmoid())
        )

    return Case(fun, (torch.randn(3, 4, dtype=dtype),))


@animal()
def shared_weights(dtype):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.embed(tokens).tanh())

    return model(Net(), torch.tensor([[0, 1], [1, 5]]), dtype=dtype)


@animal()
def frozen_part(dtype):
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    return model(net, torch.randn(3, 4, dtype=dtype), dtype=dtype)


@animal()
def gru_cell(dtype):
    return model(
        nn.GRUCell(4, 3),
        torch.randn(2, 4, dtype=dtype),
        torch.randn(2, 3, dtype=dtype),
        dtype=dtype,
    )


@animal()
def parametrised(dtype):
    net = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    return model(net, torch.randn(2, 4, dtype=dtype), dtype=dtype)


# --- checkpoints inside --------------------------------------------------------------------------

_dots_inside = tr.checkpoint(lambda a, w: torch.tanh(a.sin() @ w), policy="dots")
add(
    "checkpoint inside",
    lambda x, w: _dots_inside(_dots_inside(x, w), w.t() @ w).exp(),
    (3, 4),
    (4, 4),
)
add(
    "checkpoint with a closure inside",
    lambda x, w: tr.checkpoint(lambda a: torch.tanh(a.sin() @ w))(x).exp(),
    (3, 4),
    (4, 5),
)
add(
    "names",
    lambda x, w: (
        tr.checkpoint_name(x @ w, "a").sin() + tr.checkpoint_name({"q": x.sum()}, "b")["q"]
    ),
    (3, 4),
    (4, 5),
)


# --- the tests -----------------------------------------------------------------------------------


def prepared(value: Any) -> Any:
    """A copy of the arguments that autograd follows, laid out as they are."""

    def prepare(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        inexact = t.is_floating_point() or t.is_complex()
        return t.detach().requires_grad_() if inexact else t

    return torch.utils._pytree.tree_map(prepare, value)


@functools.cache
def built(name: str, dtype: torch.dtype) -> tuple[Case, dict[str, Any], list[torch.Tensor]]:
    """The case, what plain PyTorch gives for it, and the buffers as they were."""
    torch.manual_seed(11)
    animal = ZOO[name]
    made = animal.build(dtype)
    if name != "writes_to_an_argument":
        made.args, made.kwargs = prepared(made.args), prepared(made.kwargs)
    else:
        made.args = (made.args[0].requires_grad_(), made.args[1])
    state = [t.detach().clone() for t in state_of(made)]
    expected = results(made, made.fun, animal.order)
    assert "derivative 1" in expected, "the case shows nothing"
    restore(made, state)
    return made, expected, state


def state_of(case: Case) -> list[torch.Tensor]:
    buffers = list(case.module.buffers()) if case.module is not None else []
    return buffers + [t for t in leaves_of((case.args, case.kwargs)) if not t.requires_grad]


def restore(case: Case, state: list[torch.Tensor]) -> None:
    for tensor, value in zip(state_of(case), state, strict=True):
        tensor.copy_(value)


def results(case: Case, fun: Callable[..., Any], order: int) -> dict[str, Any]:
    wrt = [t for t in leaves_of((case.args, case.kwargs)) if t.requires_grad]
    if case.module is not None:
        wrt += [p for p in case.module.parameters() if p.requires_grad]
    found = derivatives(fun, case.args, wrt, case.kwargs, order=order)
    found["written"] = [t.clone() for t in state_of(case)]
    found["next random number"] = torch.rand(())
    return found


def check(name: str, dtype: torch.dtype, policy: Any) -> None:
    made, expected, state = built(name, dtype)
    animal = ZOO[name]
    fun = tr.checkpoint(made.fun, policy=policy)
    for order in {animal.order, 1}:
        try:
            with nothing_left_behind():
                found = results(made, fun, order)
        finally:
            restore(made, state)
        assert order == 1 or found.keys() >= expected.keys()
        for key in found.keys() - expected.keys():
            # the gradient of a linear function is a constant: that of a checkpoint records that it
            # came from one, and has a derivative of zero
            assert all(g is None or not g.any() for g in found[key]), key
        for key in found.keys() & expected.keys():
            assert_same(expected[key], found[key], key, close=animal.allows_rounding(key))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.sampled(3)
def test_equal_to_plain(name, policy):
    check(name, torch.float64, POLICIES[policy]())


@pytest.mark.parametrize("name", one_in(3, ZOO))
@pytest.mark.sampled(3)
def test_equal_to_plain_in_single_precision(name):
    check(name, torch.float32, RandomPolicy(17))


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_equal_to_plain_under_many_policies(name):
    for seed in range(10):
        check(name, torch.float64, RandomPolicy(seed))


EXCUSED = [name for name, animal in ZOO.items() if animal.close]


@pytest.mark.parametrize("name", EXCUSED)
def test_the_excuse_is_needed(name):
    """A case that is equal to the bit needs none."""
    made, expected, _ = built(name, torch.float64)
    found = results(made, tr.checkpoint(made.fun), ZOO[name].order)
    assert differences(expected, found)


def test_no_grad_around():
    for name in ("mm", "outputs", "batch_norm"):
        made, _, state = built(name, torch.float64)
        with torch.no_grad():
            expected = made.fun(*made.args, **made.kwargs)
            restore(made, state)
            found = tr.checkpoint(made.fun)(*made.args, **made.kwargs)
            restore(made, state)
        assert_same(expected, found, name)
        assert not any(t.requires_grad for t in leaves_of(found))


def test_inference_mode_around():
    made, _, _ = built("mlp", torch.float64)
    fun = tr.checkpoint(made.fun)
    with torch.inference_mode():
        found = fun(*made.args)
        assert found.is_inference()
    assert_same(made.fun(*made.args).detach(), found)
    assert fun(*made.args).requires_grad


def test_autocast_around():
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = torch.randn(4, 8, requires_grad=True)
    wrt = [x, *net.parameters()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = derivatives(net, (x,), wrt)
    fun = tr.checkpoint(net, policy="dots")
    plain = derivatives(fun, (x,), wrt)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = derivatives(fun, (x,), wrt)
        assert found["value"].dtype == torch.bfloat16
        for key in expected:
            assert_same(expected[key], found[key], key)
    assert_same(plain, derivatives(net, (x,), wrt))


def test_backward_outside_of_autocast():
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = torch.randn(4, 8, requires_grad=True)
    for fun in (net, tr.checkpoint(net), tr.checkpoint(net, policy="none")):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = fun(x)
        grads = torch.autograd.grad(y.float().sin().sum(), [x, *net.parameters()])
        if fun is net:
            expected = grads
        assert_same(expected, grads)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_lstm(policy):
    """Whose kernel keeps a workspace for its derivative: only in single precision, in grad mode."""
    lstm, x = nn.LSTM(4, 3, num_layers=2), torch.randn(5, 2, 4)
    run = tr.checkpoint(lambda: lstm(x)[0].sin().sum(), policy=policy)
    parameters = list(lstm.parameters())
    expected = torch.autograd.grad(lstm(x)[0].sin().sum(), parameters)
    assert_same(torch.autograd.grad(run(), parameters), expected)
