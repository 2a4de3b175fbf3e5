"""`jit`: the function's values and derivatives, from graphs that a backend compiled."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same
from torchremat.measure import LiveBytes


@pytest.fixture(params=["eager", "aot_eager", "inductor"])
def backend(request):
    return request.param


def mlp(params, x):
    for w in params:
        x = torch.tanh(x @ w)
    return {"out": x, "loss": x.sum()}


def arguments():
    torch.manual_seed(0)
    params = [torch.randn(6, 6, requires_grad=True) for _ in range(2)]
    return params, torch.randn(4, 6)


def derivatives(fun):
    params, x = arguments()
    out = fun(params, x)
    return out, torch.autograd.grad(out["loss"] + out["out"].square().sum(), params)


# --- values and derivatives ----------------------------------------------------------------------


def test_values_and_gradients_are_those_of_the_function(backend):
    torch.testing.assert_close(derivatives(tr.jit(mlp, backend=backend)), derivatives(mlp))


def test_without_anything_to_differentiate_only_the_forward_graph_is_there(backend):
    params, x = arguments()
    jitted = tr.jit(mlp, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(jitted(params, x), mlp(params, x))
        lowered = jitted.lower(params, x)
    assert lowered.backward_graph is None
    plain = [p.detach() for p in params]
    assert not jitted(plain, x)["out"].requires_grad
    assert jitted.lower(plain, x).backward_graph is None
    assert jitted.lower(params, x).backward_graph is not None


def test_modules_train(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    jitted = tr.jit(model, backend=backend)
    x = torch.randn(16, 4)
    for run, module in ((jitted, model), (twin, twin)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            run(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_it_is_part_of_transformations_around_it(backend):
    jitted = tr.jit(lambda x: torch.sin(x).prod(), backend=backend)
    x = torch.randn(5)
    fun = lambda x: torch.sin(x).prod()  # noqa: E731
    torch.testing.assert_close(torch.func.grad(jitted)(x), torch.func.grad(fun)(x))
    torch.testing.assert_close(torch.func.hessian(jitted)(x), torch.func.hessian(fun)(x))
    xs = torch.randn(3, 5)
    torch.testing.assert_close(torch.func.vmap(jitted)(xs), torch.func.vmap(fun)(xs))
    torch.testing.assert_close(tr.checkpoint(jitted)(x), fun(x))
    torch.testing.assert_close(tr.jit(jitted, backend=backend)(x), fun(x))


def test_inside_a_compiled_function_it_is_left_to_that_compiler():
    jitted = tr.jit(lambda x, w: torch.tanh(x @ w), donate_argnums=0, backend="eager")
    x, w = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: jitted(x, w) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, w), torch.tanh(x @ w) * 2)
    assert type(x) is torch.Tensor
    torch._dynamo.reset()


def test_second_derivatives_of_plain_autograd(backend):
    jitted = tr.jit(lambda x: torch.sin(x).prod(), backend=backend)
    x = torch.randn(5, requires_grad=True)
    (g,) = torch.autograd.grad(jitted(x), x, create_graph=True)
    (found,) = torch.autograd.grad(g.square().sum(), x)
    (h,) = torch.autograd.grad(torch.sin(x).prod(), x, create_graph=True)
    (expected,) = torch.autograd.grad(h.square().sum(), x)
    torch.testing.assert_close(found, expected)


def test_writes_to_arguments_are_done(backend):
    jitted = tr.jit(lambda x, y: x.add_(y).sum(), backend=backend)
    x = torch.zeros(4)
    assert jitted(x, torch.ones(4)).item() == 4
    assert x.tolist() == [1.0] * 4


# --- what is kept --------------------------------------------------------------------------------


def held(fun, x):
    return [str(residual) for residual in tr.saved_residuals(fun, x)]


def body(x):
    return torch.cos(torch.sin(torch.exp(x)))


def test_without_a_policy_it_keeps_what_plain_autograd_keeps():
    x = torch.ones(4, requires_grad=True)
    for fun in (body, lambda x: body(x) * 2 + body(torch.tanh(x))):
        with LiveBytes() as plain:
            y = fun(x)
        with LiveBytes() as jitted:
            z = tr.jit(fun, backend="eager")(x)
        assert jitted.live <= plain.live
        del y, z


def test_a_checkpoint_inside_keeps_to_its_own_policy():
    inner = tr.checkpoint(body, policy=tr.checkpoint_policies.save_ops("aten.sin"))

    def fun(x):
        return torch.tanh(inner(torch.tanh(x)))

    x = torch.ones(4, requires_grad=True)
    program = _program(tr.jit(fun, backend="eager"), x)
    assert [node.name for node in program.residuals if "tanh" in node.name] == ["tanh", "tanh_1"]
    assert len(program.residuals) == 3  # and the sine, of four values inside
    everything = _program(tr.jit(fun, policy="none", backend="eager"), x)
    assert len(everything.residuals) > 3
    assert_same(
        torch.autograd.grad(tr.jit(fun, backend="eager")(x).sum(), x),
        torch.autograd.grad(fun(x).sum(), x),
    )


def test_a_policy_decides_on_what_is_kept(backend):
    x = torch.ones(4, requires_grad=True)
    jitted = tr.jit(body, policy="full", backend=backend)
    assert len(_program(jitted, x).residuals) == 0
    (found,) = torch.autograd.grad(jitted(x).sum(), x)
    (expected,) = torch.autograd.grad(body(x).sum(), x)
    torch.testing.assert_close(found, expected)


def _program(jitted, x):
    jitted(x)
    return jitted.last_program


# --- caches --------------------------------------------------------------------------------------


def test_it_is_traced_once_for_each_kind_of_call():
    traced = []

    @tr.jit(backend="eager", static_argnums=1, static_argnames="mode")
    def fun(x, n, mode="a"):
        traced.append((n, mode))
        return x * n

    x = torch.ones(3)
    for n, mode in [(1, "a"), (1, "a"), (True, "a"), (1.0, "a"), (1, "b"), (1, "a")]:
        assert fun(x, n, mode=mode).dtype == torch.float32
    assert list(dict.fromkeys(map(repr, traced))) == [
        "(1, 'a')", "(True, 'a')", "(1.0, 'a')", "(1, 'b')",
    ]  # fmt: skip
    count = len(traced)
    for n in (1, True, 1.0):
        fun(x, n, mode="a")
    assert len(traced) == count


def test_a_static_argument_may_be_passed_by_name_or_left_out():
    @tr.jit(backend="eager", static_argnums=1)
    def power(x, n=2):
        return x**n

    x = torch.full((2,), 3.0)
    assert power(x).tolist() == [9.0, 9.0]
    assert power(x, 3).tolist() == power(x, n=3).tolist() == [27.0, 27.0]


def test_dropping_the_function_frees_what_was_traced_for_it():
    weight = torch.ones(3)
    reference = weakref.ref(weight)

    def make(weight):
        return lambda x: x * weight

    fun = make(weight)
    jitted = tr.jit(fun, backend="eager")
    jitted(torch.ones(3))
    del fun, jitted, weight
    gc.collect()
    assert reference() is None


# --- what it shows -------------------------------------------------------------------------------


def test_trace_gives_the_typed_graph():
    g = tr.jit(lambda x: torch.sin(x) + 1, backend="eager").trace(torch.ones(3))
    assert str(g) == str(tr.make_graph(lambda x: torch.sin(x) + 1)(torch.ones(3)))


def test_lower_shows_graphs_and_code_and_runs_nothing(backend):
    params, x = arguments()
    jitted = tr.jit(mlp, backend=backend)
    lowered = jitted.lower(params, x)
    ops = [str(n.target) for n in lowered.graph.graph.nodes if n.op == "call_function"]
    assert ops.count("aten.mm.default") == 2
    text = lowered.as_text()
    assert "def run(inputs)" in text if backend != "inductor" else "async_compile" in text
    torch.testing.assert_close(lowered.compile()(params, x), mlp(params, x))


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "indctor"}, ValueError, "nearest: 'inductor'"),
        ({"backend": "xla"}, ValueError, "backend='xla' is not a backend"),
        ({"policy": "dotz"}, ValueError, "dotz"),
        ({"static_argnums": ["x"]}, TypeError, "static_argnums must be an int or a tuple of ints"),
        ({"static_argnums": 5}, ValueError, "but only accepts 1 positional arguments"),
    ],
)
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        tr.jit(lambda x: x, **options)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="jit takes a function or an nn.Module"):
        tr.jit(torch.ones(3))


def test_a_jit_of_a_jit_keeps_its_own_options():
    inner = tr.jit(lambda x: x + 1, backend="eager")
    outer = tr.jit(inner, backend="aot_eager")
    assert (outer.backend, inner.backend) == ("aot_eager", "eager")
    assert torch.equal(outer(torch.ones(2)), torch.full((2,), 2.0))


VIEWS = {
    "slice": lambda x: x[:, 1:],
    "dtype": lambda x: x.view(torch.int32)[1:],
    "transpose": lambda x: x.t(),
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", VIEWS)
def test_autograd_sees_a_write_through_a_view_of_an_argument(name, backend):
    jitted = tr.jit(VIEWS[name], backend=backend)
    w = torch.ones(3, 4, requires_grad=True)
    for _ in range(2):
        x = torch.ones(3, 4)
        loss = (w * x).sum()
        y = jitted(x)
        assert torch.equal(y, VIEWS[name](x))
        assert y.data_ptr() == VIEWS[name](x).data_ptr()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_autograd_sees_a_write_through_another_output(backend):
    def f(x):
        y = x * 2
        return y[1:], y.t()

    a, b = tr.jit(f, backend=backend)(torch.ones(3, 4))
    w = torch.ones(2, 4, requires_grad=True)
    loss = (w * a).sum()
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
