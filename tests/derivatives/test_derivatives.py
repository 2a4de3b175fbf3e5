"""`grad`, `vjp`, `jvp`, Jacobians, `linearize` and `linear_transpose`, against `torch.func`."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import torchremat as tr
from torchremat import (
    custom_jvp,
    custom_vjp,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linear_transpose,
    linearize,
    value_and_grad,
    vjp,
)
from torchremat.core.avals import Aval

f64 = torch.float64
X = torch.tensor([0.1, 0.7, 2.0], dtype=f64)
W = torch.tensor([[0.3, 0.2, 0.5], [0.1, 0.9, 0.4]], dtype=f64)
CT = torch.tensor([1.0, -2.0], dtype=f64)
ONE = torch.ones((), dtype=f64)


def layer(x, w):
    return torch.tanh(w @ x)


def loss(x):
    return (torch.sin(x) * x).sum()


# --- nesting --------------------------------------------------------------------------------------

OURS = {
    "grad": lambda f: lambda x: grad(lambda x: f(x).sum())(x),
    "jvp": lambda f: lambda x: jvp(f, (x,), (torch.cos(x),))[1],
    "vjp": lambda f: lambda x: vjp(f, x)[1](torch.cos(x))[0],
    "linearize": lambda f: lambda x: linearize(f, x)[1](torch.cos(x)),
    "checkpoint": lambda f: tr.checkpoint(f),
    "vmap": lambda f: lambda x: torch.func.vmap(f)(torch.stack([x, 2 * x])).sum(0),
    "make_graph": lambda f: lambda x: tr.eval_graph(tr.make_graph(f)(x), x),
    "torch grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "torch jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (torch.cos(x),))[1],
}
THEIRS = OURS | {
    "grad": OURS["torch grad"],
    "jvp": OURS["torch jvp"],
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](torch.cos(x))[0],
    "linearize": OURS["torch jvp"],
    "checkpoint": lambda f: f,
    "make_graph": lambda f: f,
}


@pytest.mark.parametrize("names", list(itertools.product(OURS, OURS)), ids="-".join)
def test_they_nest(names):
    """Each inside each, and all of it differentiated by plain autograd."""

    def f(x):
        return torch.sin(x) * x * x

    outer, inner = names
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    ours = OURS[outer](OURS[inner](f))(x)
    theirs = THEIRS[outer](THEIRS[inner](f))(y)
    torch.testing.assert_close(ours, theirs)
    (dx,), (dy,) = torch.autograd.grad(ours.sum(), x), torch.autograd.grad(theirs.sum(), y)
    torch.testing.assert_close(dx, dy)


def test_dual_levels():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X, torch.ones_like(X))
        for tangent in (
            grad(lambda x: torch.sin(x).sum())(x),
            jvp(torch.sin, (x,), (torch.ones_like(X),))[1],
            vjp(torch.sin, x)[1](torch.ones_like(X))[0],
        ):
            torch.testing.assert_close(forward_ad.unpack_dual(tangent).tangent, -torch.sin(X))


# --- trees, argnums, aux --------------------------------------------------------------------------


def test_value_and_grad():
    def f(params, x, *, scale):
        return (params["a"] * x).sum() * scale, {"x": x, "name": "aux"}

    params = {"a": X, "unused": CT}
    (value, aux), (dp, dx) = value_and_grad(f, argnums=(0, -1), has_aux=True)(params, X, scale=3.0)
    assert value == 3 * (X * X).sum()
    assert aux["name"] == "aux"
    assert aux["x"] is not None and not aux["x"].requires_grad
    torch.testing.assert_close(dp, {"a": 3 * X, "unused": torch.zeros_like(CT)})
    torch.testing.assert_close(dx, 3 * X)
    gradient, aux = grad(f, has_aux=True)(params, X, scale=1.0)
    torch.testing.assert_close(gradient["a"], X)


def test_python_numbers():
    assert grad(lambda x: x**3)(2.0) == 12
    assert value_and_grad(lambda x: 1.0)(2.0)[1] == 0
    assert jvp(lambda x, y: x * y, (2.0, 3.0), (1.0, 1.0))[1] == 5
    assert grad(lambda x, n: x**n)(2.0, 3) == 12


def test_integers():
    n = torch.arange(3)
    assert grad(lambda n, x: (n * x).sum(), argnums=(0, 1), allow_int=True)(n, X)[0] is None
    _, pull = vjp(lambda n, x: (n, n * x), n, X)
    found = pull((None, torch.ones_like(X)))
    assert found[0] is None
    torch.testing.assert_close(found[1], n.to(f64))
    _, tangents = jvp(lambda n, x: (n, n * x), (n, X), (None, X))
    assert tangents[0] is None
    torch.testing.assert_close(tangents[1], n * X)
    assert vjp(lambda n: n + 1, n)[1](None) == (None,)
    assert grad(lambda x: torch.zeros(()))(X).tolist() == [0, 0, 0]
    assert vjp(lambda x: n, X)[1](None)[0].tolist() == [0, 0, 0]


def test_modules():
    module = torch.nn.Linear(3, 2).double()
    torch.testing.assert_close(jacrev(module)(X), module.weight)
    torch.testing.assert_close(jacfwd(module)(X), module.weight)
    torch.testing.assert_close(linearize(module, X)[1](X), module.weight @ X)
    found = vjp(module, X)[1](CT)[0]
    (second,) = torch.autograd.grad(found.sum(), module.weight)
    torch.testing.assert_close(second, CT[:, None].expand(2, 3))
    transposed = linear_transpose(torch.nn.Linear(3, 2, bias=False).double(), X)
    assert transposed(CT)[0].shape == (3,)


@pytest.mark.parametrize("jacobian", [jacfwd, jacrev])
def test_jacobians(jacobian):
    """The shapes of JAX: trees of the result, of trees of the arguments."""
    theirs = torch.func.jacrev(layer, argnums=(0, 1))(X, W)
    torch.testing.assert_close(jacobian(layer, argnums=(0, 1))(X, W), theirs)
    torch.testing.assert_close(jacobian(layer)(X, W), theirs[0])
    found = jacobian(lambda p: {"y": layer(p["x"], p["w"]), "s": p["x"].sum()})({"x": X, "w": W})
    torch.testing.assert_close(found["y"], {"x": theirs[0], "w": theirs[1]})
    torch.testing.assert_close(found["s"], {"x": torch.ones_like(X), "w": torch.zeros_like(W)})
    value, aux = jacobian(lambda x: (x, "aux"), has_aux=True)(X)
    assert aux == "aux"
    torch.testing.assert_close(value, torch.eye(3, dtype=f64))


def test_hessian():
    torch.testing.assert_close(hessian(loss)(X), torch.func.hessian(loss)(X))
    both = hessian(lambda x, y: loss(x) * loss(y), argnums=(0, 1))(X, 2 * X)
    theirs = torch.func.hessian(lambda x, y: loss(x) * loss(y), argnums=(0, 1))(X, 2 * X)
    torch.testing.assert_close(both, theirs)
    found, aux = hessian(lambda x: (loss(x), 3), has_aux=True)(X)
    assert aux == 3
    torch.testing.assert_close(found, torch.func.hessian(loss)(X))
    torch.testing.assert_close(hessian(tr.checkpoint(loss))(X), found)


def test_gradients_by_finite_differences():
    step = 1e-6
    for i, gradient in enumerate(grad(loss)(X)):
        shift = torch.zeros_like(X)
        shift[i] = step
        torch.testing.assert_close((loss(X + shift) - loss(X - shift)) / (2 * step), gradient)


# --- complex numbers: JAX's convention ------------------------------------------------------------


def test_nothing_is_conjugated():
    """JAX: grad of a holomorphic function is its complex derivative, and vjp the transpose."""
    z = torch.tensor(1 + 2j)
    torch.testing.assert_close(grad(lambda z: z**3, holomorphic=True)(z), 3 * z**2)
    torch.testing.assert_close(grad(lambda z: z.abs() ** 2)(z), 2 * z.conj().resolve_conj())
    a, ct = torch.tensor([[1j, 2], [3 - 1j, 1 + 1j]]), torch.tensor([1 + 1j, 2 - 3j])
    expected = a.T @ ct
    x = torch.zeros(2, dtype=torch.complex64)
    torch.testing.assert_close(vjp(lambda x: a @ x, x)[1](ct)[0], expected)
    torch.testing.assert_close(linear_transpose(lambda x: a @ x, x)(ct)[0], expected)
    lin = linearize(lambda x: a @ x, x)[1]
    torch.testing.assert_close(linear_transpose(lin, x)(ct)[0], expected)
    torch.testing.assert_close(tr.eval_graph(vjp(lambda x: a @ x, x)[1].graph, ct)[0], expected)
    torch.testing.assert_close(jacrev(lambda x: a @ x)(x), a)
    torch.testing.assert_close(jacfwd(lambda x: a @ x)(x), a)


# --- linear functions -----------------------------------------------------------------------------


def ops(g):
    return [str(eqn.op) for eqn in g.eqns]


def test_a_linear_function_computes_what_is_left():
    def f(x):
        return torch.exp(torch.sin(x)) * 3.0

    out, lin = linearize(f, X)
    torch.testing.assert_close(out, f(X))
    assert {op.split(".")[1] for op in ops(lin.graph)} == {"mul"}
    for tangent in (X, W[0], torch.zeros_like(X)):
        torch.testing.assert_close(lin(tangent), jvp(f, (X,), (tangent,))[1])
        torch.testing.assert_close(tr.eval_graph(lin.graph, tangent), lin(tangent))
    torch.testing.assert_close(torch.func.vmap(lin)(torch.eye(3, dtype=f64)), jacfwd(f)(X))
    torch.testing.assert_close(jacrev(lin)(X), jacfwd(f)(X))


def test_primal_work_is_done_once():
    def f(x, w):
        return torch.tanh(w @ torch.tanh(w.T @ torch.tanh(w @ x)))

    def flops(call, *args):
        with FlopCounterMode(display=False) as counter:
            result = call(*args)
        return result, counter.get_total_flops()

    x, product = X[:, None], 2 * 6
    (_, lin), once = flops(linearize, f, x, W)
    assert once == 3 * product
    assert flops(lin, x, W)[1] == 6 * product
    pull = vjp(f, x, W)[1].graph
    assert flops(tr.eval_graph, pull, CT[:, None])[1] == 6 * product


@pytest.mark.parametrize("wrap", [lambda f: f, tr.checkpoint], ids=["plain", "checkpoint"])
def test_the_transpose_of_the_linear_function_is_the_pull_back(wrap):
    f = wrap(layer)
    _, pull = vjp(f, X, W)
    expected = pull(CT)
    torch.testing.assert_close(linear_transpose(linearize(f, X, W)[1], X, W)(CT), expected)
    torch.testing.assert_close(tr.eval_graph(pull.graph, CT), expected)
    torch.testing.assert_close(expected, torch.func.vjp(layer, X, W)[1](CT))
    assert not {"aten.tanh", "aten.tanh.default"} & set(ops(pull.graph))


def test_linear_functions_of_trees():
    def f(p, n):
        return {"y": p["w"] @ p["x"], "n": n, "k": 3, "zero": torch.zeros(2)}

    p = {"w": W, "x": X}
    n = torch.arange(2)
    out, lin, aux = linearize(lambda p, n: (f(p, n), "aux"), p, n, has_aux=True)
    assert (out["k"], aux) == (3, "aux")
    tangent = lin(p, None)
    torch.testing.assert_close(tangent["y"], 2 * W @ X)
    assert tangent["zero"].tolist() == [0, 0]
    assert (tangent["n"], tangent["k"]) == (None, None)
    torch.testing.assert_close(tr.eval_graph(lin.graph, p, None)["y"], 2 * W @ X)
    pull = vjp(f, p, n)[1]
    cts = {"y": CT, "n": None, "k": None, "zero": torch.zeros(2)}
    found = pull(cts)
    assert found[1] is None
    torch.testing.assert_close(found[0], {"w": torch.outer(CT, X), "x": W.T @ CT})
    torch.testing.assert_close(tr.eval_graph(pull.graph, cts)[0], found[0])


def test_derivatives_of_linear_functions():
    """To the points they were taken at too."""
    found = grad(lambda x: linearize(loss, x)[1](X))(X)
    torch.testing.assert_close(found, hessian(loss)(X) @ X)
    x = X.clone().requires_grad_()
    (found,) = torch.autograd.grad(linearize(loss, x)[1](X), x)
    torch.testing.assert_close(found, hessian(loss)(X) @ X)
    found = torch.func.vmap(lambda x: linearize(torch.sin, x)[1](x))(torch.stack([X, 2 * X]))
    torch.testing.assert_close(found[1], torch.cos(2 * X) * 2 * X)


def test_rules_in_linear_functions():
    f = custom_jvp(torch.sin)
    f.defjvp(lambda p, t: (f(*p), 2 * torch.cos(p[0]) * t[0]))
    g = custom_vjp(torch.sin)
    g.defvjp(lambda x: (torch.sin(x), torch.cos(x)), lambda cos, ct: (2 * cos * ct,))
    torch.testing.assert_close(linearize(f, X)[1](X), 2 * torch.cos(X) * X)
    for h in (f, g):
        pull = vjp(h, X)[1]
        torch.testing.assert_close(tr.eval_graph(pull.graph, X), (2 * torch.cos(X) * X,))
        assert {op.split(".")[1] for op in ops(pull.graph)} == {"mul"}
    with pytest.raises(TypeError, match="forward-mode"):
        linearize(g, X)


def test_linear_transpose():
    assert linear_transpose(tr.checkpoint(lambda x: 2 * x), ONE)(3 * ONE) == (6,)
    for example in (ONE.expand(3), torch.ones(3, dtype=f64, device="meta"), Aval((3,), f64)):
        (found,) = linear_transpose(lambda x: W @ x, example)(CT)
        torch.testing.assert_close(found, W.T @ CT)
    found = linear_transpose(lambda d: (d["a"] + 2 * d["b"], d["a"].sum()), {"a": X, "b": X})
    torch.testing.assert_close(found((X, ONE)), ({"a": X + 1, "b": 2 * X},))
    torch.testing.assert_close(torch.func.vmap(found)((W, CT))[0]["b"], 2 * W)
    twice = linear_transpose(lambda ct: linear_transpose(lambda x: W @ x, X)(ct)[0], CT)
    torch.testing.assert_close(twice(X), (W @ X,))


# --- errors ---------------------------------------------------------------------------------------

N = torch.arange(3)
ERRORS = [
    (
        lambda: grad(torch.sin)(X),
        TypeError,
        r"Gradient only defined for scalar-output functions. Output had shape: \(3,\)\.",
    ),
    (lambda: grad(lambda x: (x,))(X), TypeError, r"scalar-output functions. Output was \(\*,\)\."),
    (
        lambda: grad(torch.sum)(N),
        TypeError,
        r"grad requires real- or complex-valued inputs .* got torch.int64 \(argument 0\)",
    ),
    (
        lambda: grad(lambda p: p["n"].sum())({"n": N}),
        TypeError,
        r"got torch.int64 \(argument 0\['n'\]\)",
    ),
    (lambda: grad(lambda x: x)(3), TypeError, r"but got 3 \(int\)"),
    (
        lambda: grad(loss, argnums=2)(X),
        TypeError,
        r"argnums=2 requires at least 3 positional arguments .* only 1",
    ),
    (lambda: grad(loss, argnums="x")(X), TypeError, "argnums must be an int"),
    (lambda: grad(3), TypeError, "takes a function or an nn.Module"),
    (lambda: grad(lambda x: (x * 1j).sum())(X), TypeError, "grad requires real-valued outputs"),
    (
        lambda: grad(loss, holomorphic=True)(X),
        TypeError,
        "holomorphic=True requires inputs with complex dtype",
    ),
    (lambda: grad(loss, has_aux=True)(X), TypeError, "must return a pair"),
    (lambda: jvp(loss, X, (X,)), TypeError, "must be tuples or lists; found Tensor and tuple"),
    (
        lambda: jvp(loss, (X,), (X, X)),
        TypeError,
        r"primals have tree structure \(\*,\) whereas tangents have .* \(\*, \*\)",
    ),
    (
        lambda: jvp(loss, (X,), (X[:2],)),
        ValueError,
        r"argument 0 got primal shape \(3,\) and tangent shape \(2,\)",
    ),
    (
        lambda: jvp(loss, (X,), (X.float(),)),
        TypeError,
        "argument 0 got primal dtype torch.float64 .* but got dtype torch.float32",
    ),
    (lambda: jvp(torch.sum, (N,), (N,)), TypeError, "tangent must be None"),
    (
        lambda: vjp(layer, X, W)[1]((CT, CT)),
        TypeError,
        r"unexpected tree structure .* got \(\*, \*\), but expected to match \*",
    ),
    (
        lambda: vjp(layer, X, W)[1](X),
        ValueError,
        r"got f64\[3\], but expected f64\[2\] because .* output of the function layer",
    ),
    (lambda: vjp(layer, X, W)[1](CT.float()), ValueError, r"got f32\[2\]"),
    (lambda: linearize(loss, X)[1](X, X), TypeError, "tangents of another structure"),
    (
        lambda: linearize(loss, X)[1](CT),
        ValueError,
        r"inconsistent with the original .* got tangent f64\[2\] for primal f64\[3\]",
    ),
    (
        lambda: linear_transpose(torch.sin, X),
        ValueError,
        r"linear_transpose of sin: .*test_derivatives.py.* aten.cos.default, reads a value",
    ),
    (
        lambda: linear_transpose(torch.sum, N),
        TypeError,
        r"only supports float and complex inputs, but got i64\[3\]",
    ),
    (lambda: linear_transpose(torch.sum, "x"), TypeError, "trees of tensors or Avals"),
    (
        lambda: linear_transpose(lambda x: 2 * x, X)(CT),
        ValueError,
        r"expected f64\[3\] and got f64\[2\]",
    ),
    (lambda: linear_transpose(lambda x: 2 * x, X)((X,)), TypeError, r"expected \* but got \(\*,\)"),
    (lambda: jacrev(lambda x: N)(X), TypeError, "jacrev requires outputs with a floating-point"),
    (lambda: jacfwd(torch.sin)(N), TypeError, "jacfwd requires real- or complex-valued inputs"),
]


@pytest.mark.parametrize(("call", "error", "text"), ERRORS)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("jacobian", [jacfwd, jacrev, hessian])
def test_jacobians_of_nothing(jacobian):
    assert jacobian(lambda x: ())(X) == ()
    assert jacobian(lambda x: ((), x.sum()), has_aux=True)(X) == ((), X.sum())


def test_tangents_have_the_dtype_of_their_values():
    """PyTorch's tangent of a number that is multiplied by a Python number is of 64 bits."""
    x = torch.tensor(2.0)
    value, tangent = jvp(lambda x: x * 0.1, (x,), (x,))
    assert (value.dtype, tangent.dtype) == (torch.float32, torch.float32)
    assert jacfwd(lambda x: x * 0.1)(x).dtype == torch.float32


def drop_and_scale(x):
    return torch.nn.functional.dropout(x, 0.5).pow(2) * torch.randn(())


JACOBIANS = {
    "jacfwd": tr.jacfwd(drop_and_scale),
    "jacfwd of a checkpoint": tr.jacfwd(tr.checkpoint(drop_and_scale)),
    "jacrev of a checkpoint": tr.jacrev(tr.checkpoint(drop_and_scale)),
}


@pytest.mark.parametrize("randomness", [None, "same", "different"])
@pytest.mark.parametrize("name", JACOBIANS)
def test_all_columns_have_the_same_draws(name, randomness):
    found = []
    for jacobian in (tr.jacrev(drop_and_scale), JACOBIANS[name]):
        torch.manual_seed(0)
        x = torch.randn(3, 5)
        mapped = tr.vmap(jacobian, randomness=randomness) if randomness else jacobian
        found.append((mapped(x), torch.get_rng_state()))
    torch.testing.assert_close(found[1], found[0])


def test_all_columns_of_a_hessian_have_the_same_draws():
    found = []
    for second in (
        tr.jacrev(tr.grad(lambda x: drop_and_scale(x).sum())),
        tr.hessian(lambda x: drop_and_scale(x).sum()),
    ):
        torch.manual_seed(0)
        found.append((second(torch.randn(5)), torch.get_rng_state()))
    torch.testing.assert_close(found[1], found[0])
