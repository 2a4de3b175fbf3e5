"""Functions with rules of their own, under every transformation.

The rules are those of sin(x), with a factor that no derivative of PyTorch's would have, or those
of JAX's documentation; the oracle is the derivative written out.
"""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import torchremat as tr
from torchremat import custom_jvp, custom_vjp
from torchremat.derivatives.symbolic_zeros import SymbolicZero

X = torch.tensor(0.7, dtype=torch.float64)
ONE = torch.ones_like(X)
XS = torch.tensor([0.1, 0.7, 2.0], dtype=torch.float64)


class Counted:
    """sin(x) with the derivative 2 cos(x), in either kind of rule; `log` tells what ran."""

    def __init__(self, kind):
        self.log = []
        if kind == "jvp":
            self.f = custom_jvp(self.primal)
            self.f.defjvp(self.jvp)
        else:
            self.f = custom_vjp(self.primal)
            self.f.defvjp(self.fwd, self.bwd)

    def primal(self, x):
        self.log.append("primal")
        return torch.sin(x)

    def jvp(self, primals, tangents):
        self.log.append("jvp")
        (x,), (dx,) = primals, tangents
        return self.f(x), 2 * torch.cos(x) * dx

    def fwd(self, x):
        self.log.append("fwd")
        return torch.sin(x), torch.cos(x)

    def bwd(self, cos, ct):
        self.log.append("bwd")
        return (2 * cos * ct,)


@pytest.fixture(params=["jvp", "vjp"])
def kind(request):
    return request.param


@pytest.fixture
def counted(kind):
    return Counted(kind)


def d(x):
    return 2 * torch.cos(x)


def d2(x):
    return -2 * torch.sin(x)


def d3(x):
    return -2 * torch.cos(x)


def batched(f, x):
    return tr.eval_graph(tr.batch_graph(tr.make_graph(f)(X), 3, 0)[0], x)


def along(f, x):
    """The derivative in forward mode."""
    return jvp(f, (x,), (torch.ones_like(x),))[1]


DERIVATIVES = {
    "grad": (lambda f: grad(f)(X), d(X)),
    "grad grad": (lambda f: grad(grad(f))(X), d2(X)),
    "grad grad grad": (lambda f: grad(grad(grad(f)))(X), d3(X)),
    "vmap grad": (lambda f: vmap(grad(f))(XS), d(XS)),
    "grad vmap": (lambda f: grad(lambda x: vmap(f)(x).sum())(XS), d(XS)),
    "vmap vmap grad": (lambda f: vmap(vmap(grad(f)))(XS.expand(2, 3)), d(XS).expand(2, 3)),
    "grad vmap grad": (lambda f: grad(lambda x: vmap(grad(f))(x).sum())(XS), d2(XS)),
    "shared": (lambda f: grad(lambda x: vmap(lambda a: f(x) * a)(XS).sum())(X), d(X) * XS.sum()),
    "shared inside": (
        lambda f: grad(lambda x: vmap(lambda a: f(x * a))(XS).sum())(X),
        (d(X * XS) * XS).sum(),
    ),
    "jvp grad": (lambda f: jvp(grad(f), (X,), (torch.ones_like(X),))[1], d2(X)),
    "jacfwd jacrev": (lambda f: jacfwd(jacrev(f))(XS).diagonal().diagonal(), d2(XS)),
    "vjp twice": (lambda f: sum(vjp(f, X)[1](torch.ones_like(X))[0] for _ in range(2)), 2 * d(X)),
    "checkpoint grad": (lambda f: grad(tr.checkpoint(f))(X), d(X)),
    "checkpoint grad grad": (lambda f: grad(grad(tr.checkpoint(f)))(X), d2(X)),
    "vmap checkpoint grad": (lambda f: vmap(grad(tr.checkpoint(f)))(XS), d(XS)),
    "grad vmap checkpoint": (lambda f: grad(lambda x: vmap(tr.checkpoint(f))(x).sum())(XS), d(XS)),
    "graph": (lambda f: grad(lambda x: tr.eval_graph(tr.make_graph(f)(X), x))(X), d(X)),
    "batched graph": (
        lambda f: grad(lambda x: batched(f, x).sum())(XS),
        d(XS),
    ),
    "graph of grad": (lambda f: tr.eval_graph(tr.make_graph(grad(f))(X), X), d(X)),
    "nested": (lambda f: grad(lambda x: f(f(x)))(X), d(torch.sin(X)) * d(X)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_rules_are_used(counted, name):
    derive, expected = DERIVATIVES[name]
    torch.testing.assert_close(derive(counted.f), expected)


FORWARD = {
    "jvp": (lambda f: jvp(f, (X,), (torch.ones_like(X),))[1], d(X)),
    "jvp jvp": (
        lambda f: along(lambda x: along(f, x), X),
        d2(X),
    ),
    "vmap jvp": (lambda f: vmap(lambda x: along(f, x))(XS), d(XS)),
    "jvp vmap": (lambda f: jvp(vmap(f), (XS,), (torch.ones_like(XS),))[1], d(XS)),
    "grad jvp": (lambda f: grad(lambda x: along(f, x))(X), d2(X)),
    "checkpoint": (lambda f: jvp(tr.checkpoint(f), (X,), (torch.ones_like(X),))[1], d(X)),
    "graph": (lambda f: tr.eval_graph(tr.jvp_graph(tr.make_graph(f)(X)), X, ONE)[1], d(X)),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode(name):
    derive, expected = FORWARD[name]
    torch.testing.assert_close(derive(Counted("jvp").f), expected)


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_of_reverse_rules_is_refused(name):
    derive, _ = FORWARD[name]
    text = r"can't apply forward-mode differentiation \(jvp\) to a custom_vjp function"
    with pytest.raises(TypeError, match=text):
        derive(Counted("vjp").f)


def test_dual_numbers():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X, torch.ones_like(X))
        torch.testing.assert_close(forward_ad.unpack_dual(Counted("jvp").f(x)).tangent, d(X))
        with pytest.raises(TypeError, match="forward-mode"):
            Counted("vjp").f(x)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "checkpoint"])
def test_plain_autograd_to_third_order(counted, wrapped):
    x = X.clone().requires_grad_()
    f = tr.checkpoint(counted.f) if wrapped else counted.f
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x, create_graph=True)
    (third,) = torch.autograd.grad(second, x)
    torch.testing.assert_close((first, second, third), (d(X), d2(X), d3(X)))


def test_results_of_func_have_a_history(counted):
    x = X.clone().requires_grad_()
    (second,) = torch.autograd.grad(grad(counted.f)(x), x)
    torch.testing.assert_close(second, d2(X))


def test_what_runs(kind):
    differentiated = ["jvp", "primal"] if kind == "jvp" else ["fwd", "bwd"]
    for derive, expected in [
        (lambda f: f(X), ["primal"]),
        (lambda f: vmap(f)(XS), ["primal"]),
        (lambda f: grad(f)(X), differentiated),
        (lambda f: vmap(grad(f))(XS), differentiated),
        (lambda f: f(X.clone().requires_grad_()).backward(), differentiated),
    ]:
        counted = Counted(kind)
        derive(counted.f)
        assert counted.log == expected
    with torch.no_grad():
        counted = Counted(kind)
        assert not counted.f(X.clone().requires_grad_()).requires_grad
    assert counted.log == ["primal"]


def test_a_replay_runs_no_rule(counted):
    f = tr.checkpoint(counted.f)
    x = X.clone().requires_grad_()
    f(x).backward()
    counted.log.clear()
    f(x).backward()
    assert counted.log == []
    torch.testing.assert_close(x.grad, 2 * d(X))


def test_one_node_of_a_graph(counted, kind):
    g = tr.make_graph(lambda x: counted.f(x) * 3.0)(X)
    name = {"jvp": "CustomJvpCall", "vjp": "CustomVjpCall"}[kind]
    assert [str(eqn.op) for eqn in g.eqns] == ["function_p", "aten.mul.Tensor"]
    assert f"{name}(primal, *)" in str(g)
    batched, _ = tr.batch_graph(g, 3, 0)
    assert name in str(batched)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [("full", []), ("names:cos", ["cos", "cos"]), ("none", ["cos", "cos"]), ("ops:aten.sin", None)],
)
def test_policies_see_inside_rules(policy, kept):
    """JAX: names in a forward rule are honoured, and nothing is computed again."""

    def fwd(x):
        return torch.sin(x), tr.checkpoint_name(torch.cos(x), "cos")

    f = custom_vjp(torch.sin)
    f.defvjp(fwd, lambda cos, ct: (cos * ct,))
    x = torch.ones(3, requires_grad=True)
    found = tr.saved_residuals(tr.checkpoint(lambda x: f(f(x)), policy=policy), x)
    named = [r.source for r in found if "argument" not in r.source]
    if kept is None:
        assert len(named) == 1
        assert named[0].startswith("output of sin")
    else:
        assert [source.split("'")[1] for source in named] == kept


def test_what_autograd_holds():
    """A residual that is an input or a bool needs nothing more kept."""

    def held(fwd, bwd):
        f = custom_vjp(lambda x: torch.relu(x))
        f.defvjp(fwd, bwd)
        kept = []
        x = torch.ones(5, requires_grad=True) * 1.0
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            f(x)
        return [t.dtype for t in kept]

    mask = held(lambda x: (torch.relu(x), x > 0), lambda mask, ct: (ct * mask,))
    assert mask == [torch.bool]
    argument = held(lambda x: (torch.relu(x), x), lambda x, ct: (ct * (x > 0),))
    assert argument == [torch.float32]


def test_what_a_rule_kept_is_freed_by_the_backward_pass():
    class Kept(Tensor):
        pass

    kept = []

    def rule(primals, tangents):
        factor = torch.cos(primals[0])
        kept.append(weakref.ref(factor))
        return torch.sin(primals[0]), factor * tangents[0]

    f = custom_jvp(torch.sin)
    f.defjvp(rule)
    x = torch.ones(3, requires_grad=True)
    y = f(x).sum()
    y.backward()
    gc.collect()
    assert kept[0]() is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_saved_tensors_hooks_and_torch_checkpoint(counted):
    x = X.clone().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        y = counted.f(x)
    torch.testing.assert_close(torch.autograd.grad(y, x)[0], d(X))
    y = torch.utils.checkpoint.checkpoint(counted.f, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y, x)[0], d(X))


def test_integers_have_no_derivative(kind):
    def double(x, n):
        return x * n, n + 1

    if kind == "vjp":
        f = custom_vjp(double)
        f.defvjp(lambda x, n: (double(x, n), n), lambda n, ct: (ct[0] * n, None))
    else:
        f = custom_jvp(double)
        f.defjvp(lambda p, t: (double(*p), (t[0] * p[1], None)))
    n = torch.tensor(3)
    assert grad(lambda x: f(x, n)[0])(X) == 3
    assert vmap(grad(lambda x, n: f(x, n)[0]))(XS, torch.arange(3)).tolist() == [0, 1, 2]
    x = X.clone().requires_grad_()
    y, m = f(x, n)
    assert not m.requires_grad
    assert torch.autograd.grad(y, x)[0] == 3


def test_complex_numbers_are_not_conjugated():
    """As in JAX: `bwd` multiplies with the transpose of the Jacobian."""
    z, ct = torch.tensor(1 + 2j), torch.tensor(3 - 1j)
    f = custom_vjp(lambda z: z**3)
    f.defvjp(lambda z: (z**3, z), lambda z, ct: (3 * z**2 * ct,))
    h = custom_jvp(lambda z: z**3)
    h.defjvp(lambda p, t: (p[0] ** 3, 3 * p[0] ** 2 * t[0]))
    expected = vjp(lambda z: z**3, z)[1](ct)[0]
    for g in (f, h):
        torch.testing.assert_close(vjp(g, z)[1](ct)[0], expected)
        leaf = z.clone().requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(g(leaf), leaf, ct)[0], expected)


def test_autocast():
    f = custom_vjp(lambda x, w: x @ w)
    f.defvjp(
        lambda x, w: (x @ w, (x, w)),
        lambda r, ct: ((ct @ r[1].T).float(), (r[0].T @ ct).float()),
    )
    x, w = torch.randn(2, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = f(x, w)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    torch.testing.assert_close(
        w.grad, x.detach().sum(0)[:, None].expand(3, 4), rtol=0.05, atol=0.05
    )


# --- what rules close over ------------------------------------------------------------------------


def scaled(kind, w):
    """x -> w x, with a rule that closes over w."""
    if kind == "jvp":
        f = custom_jvp(lambda x: w * x)
        f.defjvp(lambda p, t: (w * p[0], w * t[0]))
    else:
        f = custom_vjp(lambda x: w * x)
        f.defvjp(lambda x: (w * x, None), lambda _, ct: (w * ct,))
    return f


REFUSED = {
    "plain": lambda kind: scaled(kind, X.clone().requires_grad_())(X),
    "plain, differentiated": lambda kind: scaled(kind, X.clone().requires_grad_())(
        X.clone().requires_grad_()
    ),
    "checkpoint": lambda kind: tr.checkpoint(scaled(kind, X.clone().requires_grad_()))(X),
    "grad": lambda kind: grad(lambda w: scaled(kind, w)(X))(X),
    "grad of both": lambda kind: grad(lambda w: scaled(kind, w)(w))(X),
    "jvp": lambda kind: jvp(lambda w: scaled(kind, w)(X), (X,), (X,)),
    "vmap grad": lambda kind: vmap(grad(lambda w: scaled(kind, w)(X)))(XS),
    "module": lambda kind: scaled(kind, torch.nn.Linear(1, 1).weight)(torch.ones(1, 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_closed_over_gradients_are_refused(kind, name):
    text = f"Detected differentiation of a custom_{kind} function with respect to a closed-over"
    with pytest.raises(RuntimeError, match=text) as raised:
        REFUSED[name](kind)
    assert isinstance(raised.value, tr.errors.TorchrematError)
    assert "Pass it as an argument" in str(raised.value)


CLOSURES = {
    "constant": (lambda k: grad(scaled(k, X))(X), X),
    "vmap": (lambda k: vmap(lambda w: scaled(k, w)(X))(XS), X * XS),
    "vmap grad": (lambda k: vmap(lambda w: grad(scaled(k, w))(X))(XS), XS),
    "no_grad": (lambda k: torch.no_grad()(scaled(k, X.clone().requires_grad_()))(X), X * X),
    "graph": (lambda k: tr.eval_graph(tr.make_graph(scaled(k, X))(X), X), X * X),
    "outer grad": (lambda k: grad(lambda w: grad(scaled(k, w))(X))(X), torch.ones_like(X)),
    "outer plain": (
        lambda k: torch.autograd.grad(grad(scaled(k, w := X.clone().requires_grad_()))(X), w)[0],
        torch.ones_like(X),
    ),
    "grad vmap": (
        lambda k: grad(lambda x: vmap(lambda w: scaled(k, w)(x))(XS).sum())(X),
        XS.sum(),
    ),
}


@pytest.mark.parametrize("name", CLOSURES)
def test_closures(kind, name):
    compute, expected = CLOSURES[name]
    torch.testing.assert_close(compute(kind), expected)


def test_parameters_are_arguments():
    """A module inside the rules, whose parameters are passed."""
    linear = torch.nn.Linear(3, 2).double()
    names = [name for name, _ in linear.named_parameters()]

    @custom_vjp
    def call(params, x):
        return torch.func.functional_call(linear, params, (x,))

    def fwd(params, x):
        return torch.func.functional_call(linear, params, (x,)), (params, x)

    def bwd(residuals, ct):
        params, x = residuals
        return {"weight": torch.outer(ct, x), "bias": 2 * ct}, ct @ params["weight"]

    call.defvjp(fwd, bwd)
    x = torch.ones(3, dtype=torch.float64)
    out = call(dict(linear.named_parameters()), x).sum()
    out.backward()
    assert names == ["weight", "bias"]
    assert linear.bias.grad.tolist() == [2.0, 2.0]
    torch.testing.assert_close(linear.weight.grad, torch.ones_like(linear.weight))
    per_sample = vmap(grad(lambda p, x: call(p, x).sum()), (None, 0))
    found = per_sample({k: v.detach() for k, v in linear.named_parameters()}, torch.eye(3).double())
    assert found["bias"].shape == (3, 2)


# --- JAX's calling conventions --------------------------------------------------------------------


def test_trees_and_nones():
    f = custom_vjp(lambda p, x: {"y": p["a"] * x, "n": 1.5})
    f.defvjp(
        lambda p, x: ({"y": p["a"] * x, "n": 1.5}, (p, x)),
        lambda r, ct: ({"a": ct["y"] * r[1], "b": None}, None),
    )
    params = {"a": X, "b": XS}
    gradients = grad(lambda p, x: f(p, x)["y"] * 2, argnums=(0, 1))(params, X)
    torch.testing.assert_close(gradients, ({"a": 2 * X, "b": 0 * XS}, 0 * X))
    assert f(params, X)["n"] == 1.5


def test_nondiff_arguments_come_first(kind):
    """JAX's documentation: app(f, x)."""

    def app(f, x, scale=2.0):
        return f(x) * scale

    if kind == "jvp":
        app = custom_jvp(app, nondiff_argnums=(0,))
        app.defjvp(lambda f, p, t: (f(p[0]) * p[1], 3 * t[0]))
    else:
        app = custom_vjp(app, nondiff_argnums=(0,))
        app.defvjp(lambda f, x, s: (f(x) * s, (x, s)), lambda f, r, ct: (f(ct) * 3, None))
    assert app(lambda x: x, X) == 2 * X
    assert grad(lambda x: app(lambda v: v, x, scale=5.0))(X) == 3


def test_arguments_are_named_that_are_not_differentiated(kind):
    """As `nondiff_argnames` of JAX: rules take them first, in the order of the signature."""

    def power(x, n, scale):
        return scale * x**n

    if kind == "jvp":
        fun = custom_jvp(power, nondiff_argnums=2, nondiff_argnames="n")
        fun.defjvp(lambda n, s, p, t: (s * p[0] ** n, 3 * s * n * p[0] ** (n - 1) * t[0]))
    else:
        fun = custom_vjp(power, nondiff_argnums=(2,), nondiff_argnames=["n", "scale"])
        fun.defvjp(
            lambda x, n, s: (s * x**n, x), lambda n, s, x, ct: (3 * s * n * x ** (n - 1) * ct,)
        )
    assert fun(X, 3, scale=2.0) == 2 * X**3
    torch.testing.assert_close(grad(fun)(X, 3, 2.0), 18 * X**2)
    torch.testing.assert_close(grad(lambda x: fun(x, scale=2.0, n=3))(X), 18 * X**2)


def test_a_zero_cotangent(kind):
    seen = []
    f = custom_vjp(lambda x: (x, x))
    f.defvjp(lambda x: ((x, x), None), lambda _, ct: (seen.append(ct) or ct[0],))
    assert grad(lambda x: f(x)[0])(X) == 1
    torch.testing.assert_close(seen[0], (torch.ones_like(X), torch.zeros_like(X)))


def test_symbolic_zeros_of_custom_vjp():
    seen = []

    def fwd(x, y):
        seen.append((x.perturbed, y.perturbed))
        return (x.value * y.value, x.value), (x.value, y.value)

    def bwd(residuals, cts):
        seen.append(tuple(type(ct) is SymbolicZero for ct in cts))
        x, y = residuals
        return cts[0] * y, SymbolicZero(cts[1].aval) if type(cts[1]) is SymbolicZero else cts[0] * x

    f = custom_vjp(lambda x, y: (x * y, x))
    f.defvjp(fwd, bwd, symbolic_zeros=True)
    assert grad(lambda x: f(x, 2 * X)[0])(X) == 2 * X
    assert seen == [(True, False), (False, True)]
    x = X.clone().requires_grad_()
    f(x, X)[0].backward()
    assert seen[2:] == [(True, False), (False, True)]
    found = vmap(grad(lambda x, y: f(x, y)[0]), (0, None))(XS, X)
    torch.testing.assert_close(found, X.expand(3))


def test_symbolic_zeros_of_custom_jvp():
    seen = []

    def rule(primals, tangents):
        seen.append([type(t) is SymbolicZero for t in tangents])
        assert tangents[1].aval.shape == ()
        return primals[0] * primals[1], tangents[0] * primals[1]

    f = custom_jvp(lambda x, y: x * y)
    f.defjvp(rule, symbolic_zeros=True)
    assert grad(f)(X, 2 * X) == 2 * X
    assert jvp(lambda x: f(x, X), (X,), (X,))[1] == X * X
    assert seen == [[False, True]] * 2


def test_defjvps():
    f = custom_jvp(lambda x, y: torch.sin(x) * y)
    f.defjvps(None, lambda t, ans, x, y: 2 * t * ans)
    assert grad(f, argnums=(0, 1))(X, X) == (0, 2 * torch.sin(X) * X)
    with pytest.raises(TypeError, match="Can't use ``defjvps`` with ``nondiff_argnums``"):
        custom_jvp(lambda f, x: f(x), nondiff_argnums=(0,)).defjvps(None, None)


def test_methods():
    class Layer:
        scale = 3.0

        @custom_jvp
        def call(self, x):
            return x * self.scale

        call.defjvp(lambda primals, tangents: (primals[1] * primals[0].scale, 10 * tangents[1]))

    assert Layer().call(X) == 3 * X
    assert grad(Layer().call)(X) == 10


def test_optimize_remat():
    """In a checkpoint the function itself computes the result, if `fwd` is not needed for it."""
    log = []

    def fwd(x):
        log.append("fwd")
        return torch.sin(x), torch.cos(x)

    f = custom_vjp(lambda x: log.append("primal") or torch.sin(x))
    f.defvjp(fwd, lambda cos, ct: (cos * ct,), optimize_remat=True)
    assert grad(f)(X) == torch.cos(X)
    assert log == ["fwd"]
    x = X.clone().requires_grad_()
    tr.checkpoint(f)(x).backward()
    assert "primal" in log
    torch.testing.assert_close(x.grad, torch.cos(X))


# Dynamo itself asks for it after each graph break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_under_torch_compile(counted):
    x = X.clone().requires_grad_()
    compiled = torch.compile(lambda x: counted.f(x * 1.0) * 3.0, backend="eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], 3 * d(X))
    torch._dynamo.reset()
    whole = torch.compile(counted.f, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="runs outside of the compiler, with its rules"):
        whole(x)


# --- errors ---------------------------------------------------------------------------------------


def vjp_with(fwd, bwd):
    def f(x, y):
        return x.sum() * y

    f = custom_vjp(f)
    f.defvjp(fwd, bwd)
    return lambda: grad(f)(XS, X)


def jvp_with(rule):
    def f(x):
        return x.sum()

    f = custom_jvp(f)
    f.defjvp(rule)
    return lambda: grad(f)(XS)


def ok(x, y):
    return x.sum() * y, None


ERRORS = [
    (
        lambda: custom_vjp(torch.sin)(X),
        AttributeError,
        "No VJP defined for custom_vjp function sin using defvjp",
    ),
    (
        lambda: custom_jvp(torch.sin)(X),
        AttributeError,
        "No JVP defined for custom_jvp function sin using defjvp",
    ),
    (
        vjp_with(lambda x, y: x, None),
        TypeError,
        r"fwd rule <lambda> for function f must produce a pair .* fwd rule output was \*",
    ),
    (
        vjp_with(ok, lambda r, ct: (ct,)),
        TypeError,
        r"got bwd output structure \(\*,\) for primal input structure \(\*, \*\)",
    ),
    (
        vjp_with(ok, lambda r, ct: ct),
        TypeError,
        "same container .pytree. structure as the args tuple",
    ),
    (vjp_with(ok, lambda r, ct: None), TypeError, "bwd output structure None"),
    (vjp_with(ok, lambda r, ct: ({"x": ct}, None)), TypeError, "bwd output structure"),
    (
        vjp_with(ok, lambda r, ct: (ct, None)),
        ValueError,
        r"at output\[0\] the bwd rule produced .* f64\[\] corresponding to an input .* f64\[3\]",
    ),
    (
        vjp_with(ok, lambda r, ct: (ct.float().expand(3), None)),
        ValueError,
        r"f32\[3\] corresponding to an input of shape/dtype f64\[3\]",
    ),
    (
        jvp_with(lambda p, t: p[0].sum()),
        TypeError,
        "must produce a pair .list or tuple of length two. representing primal and tangent outputs",
    ),
    (
        jvp_with(lambda p, t: (p[0].sum(), (t[0].sum(),))),
        TypeError,
        r"equal container .pytree. structures, but got \* and \(\*,\) respectively. The rule is at "
        r"test_custom_rules.py:\d+ \(<lambda>\)",
    ),
    (
        jvp_with(lambda p, t: ((p[0].sum(), None), (t[0].sum(), t[0]))),
        TypeError,
        r"equal container .pytree. structures, but got \(\*, None\) and \(\*, \*\) respectively",
    ),
    (
        jvp_with(lambda p, t: (p[0].sum(), t[0])),
        TypeError,
        r"Expected f64\[\] .tangent type of f64\[\]. but got f64\[3\]",
    ),
    (jvp_with(lambda p, t: (p[0].sum(), t[0].sum().float())), TypeError, r"but got f32\[\]"),
    (lambda: custom_vjp(torch.sin, nondiff_argnums="x"), TypeError, "nondiff_argnums must be"),
    (
        lambda: custom_jvp(lambda x, y, *, z: x, nondiff_argnames=("y", "z")),
        ValueError,
        r"nondiff_argnames contains \['z'\], but <lambda> has the positional parameters \['x', 'y'",
    ),
    (lambda: custom_vjp(torch.sin, nondiff_argnames=1), TypeError, "nondiff_argnames must be a"),
]


@pytest.mark.parametrize(("call", "error", "text"), ERRORS)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


REREADS = {
    "checkpoint": lambda f: tr.checkpoint(f, policy="none"),
    "budget": lambda f: tr.checkpoint(f, policy="budget:1MiB"),
    "jit": lambda f: tr.jit(f, backend="eager"),
    "jit of checkpoint": lambda f: tr.jit(tr.checkpoint(f, policy="none"), backend="eager"),
    "checkpoint of checkpoint": lambda f: tr.checkpoint(
        tr.checkpoint(f, policy="none"), policy="none"
    ),
}


@pytest.mark.parametrize("way", REREADS)
def test_a_second_derivative_has_the_arguments_that_the_rule_reads_again(way):
    """The first derivative reads only `sum`, so that no argument was saved."""

    def plain(x):
        return x.sum().detach() * x

    def derivatives(f):
        x = torch.linspace(0.1, 0.9, 3, dtype=torch.double).requires_grad_()
        (first,) = torch.autograd.grad(f(x).sin().sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.sin().sum(), x)

    custom = custom_jvp(plain)
    custom.defjvp(lambda primals, tangents: jvp(plain, primals, tangents))
    torch.testing.assert_close(derivatives(REREADS[way](custom)), derivatives(plain))
