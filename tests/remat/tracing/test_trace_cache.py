"""One trace for each kind of call: when a function is traced anew, when not, and what is freed."""

import copy
import functools
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import torchremat as tr
from tests.helpers import assert_freed, assert_same, derivatives, in_threads, nothing_left_behind
from torchremat.errors import RetraceWarning

D = torch.double


class Counted:
    """A function that counts the executions of its body."""

    def __init__(self, fun):
        self.runs = 0

        def counted(*args, **kwargs):
            self.runs += 1
            return fun(*args, **kwargs)

        self.fun = counted

    def new(self) -> bool:
        """Whether the body has run since this was last asked."""
        runs, self.runs = self.runs, 0
        return runs > 0


def gradients(out, wrt, **options):
    return list(torch.autograd.grad(out, wrt, **options))


def leaf(*shape, dtype=D):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


# --- one trace -----------------------------------------------------------------------------------


def test_ten_calls_and_ten_gradients_are_one_trace():
    body = Counted(lambda x, w: torch.tanh(x @ w))
    fun = tr.checkpoint(body.fun)
    w = leaf(4, 4)
    gradients(fun(leaf(3, 4), w).sum(), w)
    assert body.runs <= 2
    body.runs = 0
    for _ in range(10):
        fun(leaf(3, 4), w)
        gradients(fun(leaf(3, 4), w).sum(), w)
    assert body.runs == 0


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.grad,
        torch.vmap,
        lambda f: torch.vmap(torch.func.grad(f)),
        torch.func.hessian,
        torch.func.jacrev,
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
        lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).pow(2).sum()),
    ],
    ids=["grad", "vmap", "vmap(grad)", "hessian", "jacrev", "jvp", "grad(grad)"],
)
@pytest.mark.sampled(2)
def test_one_trace_under_torch_func(transform):
    body = Counted(lambda x: x.sin().prod().exp())
    fun = transform(tr.checkpoint(body.fun))
    fun(torch.randn(2, 2))
    assert body.new()
    for _ in range(10):
        fun(torch.randn(2, 2))
    assert not body.new()


def test_second_derivatives_are_traced_once():
    body = Counted(lambda x: x.sin().exp())
    fun = tr.checkpoint(body.fun)

    def second():
        x = leaf(3)
        (g,) = gradients(fun(x).sum(), x, create_graph=True)
        return gradients(g.sum(), x)

    second()
    assert body.new()
    for _ in range(10):
        second()
    assert not body.new()


def test_one_trace_of_a_cond_inside():
    body = Counted(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))
    fun = tr.checkpoint(body.fun)
    x = leaf(3)
    gradients(fun(x).sum(), x)
    assert body.new()
    for _ in range(3):
        gradients(fun(x).sum(), x)
    assert not body.new()


def test_one_trace_of_a_scan_inside():
    from torch._higher_order_ops.scan import scan

    body = Counted(lambda x: scan(lambda c, r: (c + r.sin(), c * r), torch.zeros(2, dtype=D), x)[1])
    fun = tr.checkpoint(body.fun)
    x = leaf(3, 2)
    gradients(fun(x).sum(), x)
    assert body.new()
    for _ in range(3):
        gradients(fun(x).sum(), x)
    assert not body.new()


def test_leaf_or_not_does_not_matter_to_the_number_of_traces():
    """Traces of the first layer, whose input is a leaf, and of those behind it: two at most."""
    body = Counted(lambda x, w: torch.tanh(x @ w))
    fun = tr.checkpoint(body.fun)
    x, w = leaf(3, 4), leaf(4, 4)
    fun(fun(x, w), w).sum().backward()
    body.new()
    for _ in range(3):
        fun(fun(fun(x, w), w), w).sum().backward()
    assert not body.new()


def test_an_inner_checkpoint_is_not_traced_again_by_the_outer():
    inner = Counted(lambda x: x.sin())
    outer = Counted(lambda x: checked(checked(x)).exp())
    checked = tr.checkpoint(inner.fun)
    fun = tr.checkpoint(outer.fun)
    x = leaf(3)
    gradients(fun(x).sum(), x)
    inner.new(), outer.new()
    for _ in range(10):
        gradients(fun(x).sum(), x)
    assert not inner.new() and not outer.new()


def test_a_fresh_inner_checkpoint_at_each_call_is_replayed_from_the_outer_trace():
    body = Counted(lambda x: tr.checkpoint(lambda a: a.sin())(x).exp())
    fun = tr.checkpoint(body.fun)
    x = leaf(3)
    gradients(fun(x).sum(), x)
    body.new()
    for _ in range(3):
        gradients(fun(x).sum(), x)
    assert not body.new()


# --- a new trace ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: (leaf(2, 3),), lambda: (leaf(3, 2),)),
        (lambda: (leaf(2),), lambda: (leaf(2, dtype=torch.float32),)),
        (lambda: (leaf(2),), lambda: (torch.randn(2, dtype=D),)),
        (lambda: (leaf(3, 4),), lambda: (leaf(4, 3).t(),)),
        (lambda: (leaf(2), 1), lambda: (leaf(2), 2)),
        (lambda: (leaf(2), 1), lambda: (leaf(2), 1.0)),
        (lambda: (leaf(2), 1), lambda: (leaf(2), True)),
        (lambda: (leaf(2), "a"), lambda: (leaf(2), "b")),
        (lambda: (leaf(2), "a"), lambda: (leaf(2), None)),
        (lambda: ([leaf(2)],), lambda: ((leaf(2),),)),
        (lambda: ({"a": leaf(2)},), lambda: ({"b": leaf(2)},)),
        (lambda: ([leaf(2)],), lambda: ([leaf(2), 1],)),
        (lambda: (leaf(2), torch.float32), lambda: (leaf(2), torch.float64)),
    ],
    ids=[
        "shape",
        "dtype",
        "requires_grad",
        "strides",
        "number",
        "1 and 1.0",
        "1 and True",
        "string",
        "string and None",
        "list and tuple",
        "dict keys",
        "length",
        "dtype argument",
    ],
)
def test_calls_of_different_kinds(first, second):
    body = Counted(
        lambda *args: [
            t.sin() for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)
        ]
    )
    fun = tr.checkpoint(body.fun)
    for call in (first, second):
        fun(*call())
        assert body.new()
    for call in (first, second, first, first, second):
        fun(*call())
        assert not body.new()


def test_keyword_structure():
    body = Counted(lambda x, **kwargs: x * kwargs.get("a", 1) + kwargs.get("b", 0))
    fun = tr.checkpoint(body.fun)
    x, y = leaf(2), leaf(2)
    for kwargs in ({}, {"a": y}, {"b": y}, {"a": y, "b": y}):
        assert_same(fun(x, **kwargs), x * kwargs.get("a", 1) + kwargs.get("b", 0))
        assert body.new()
    assert_same(fun(x, b=y, a=x), x * x + y)
    assert not body.new(), "the order of keywords is of no matter"


def test_no_grad_and_grad_mode():
    body = Counted(lambda x: x.sin() * torch.is_grad_enabled())
    fun = tr.checkpoint(body.fun)
    x = leaf(2)
    assert fun(x).requires_grad and body.new()
    with torch.no_grad():
        assert not fun(x).any() and body.new()
        assert not fun(x).requires_grad and not body.new()
    assert fun(x).any() and not body.new()


def test_autocast():
    body = Counted(lambda x, w: x @ w)
    fun = tr.checkpoint(body.fun)
    x, w = leaf(2, 2, dtype=torch.float32), leaf(2, 2, dtype=torch.float32)
    assert fun(x, w).dtype == torch.float32 and body.new()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert fun(x, w).dtype == dtype and body.new()
            assert fun(x, w).dtype == dtype and not body.new()
            with torch.autocast("cpu", enabled=False):
                assert fun(x, w).dtype == torch.float32 and not body.new()


def test_default_dtype():
    fun = tr.checkpoint(lambda x: x + torch.ones(2))
    x = leaf(2, dtype=torch.float32)
    assert fun(x).dtype == torch.float32
    torch.set_default_dtype(D)
    try:
        assert fun(x).dtype == D
    finally:
        torch.set_default_dtype(torch.float32)


# --- static arguments ----------------------------------------------------------------------------


def test_static_values_are_equal_when_type_and_value_are():
    def scale(x, n):
        if n is True:
            return x * 10
        return x * (20 if isinstance(n, int) else 30)

    fun = tr.checkpoint(scale, static_argnums=1)
    x = torch.ones((), requires_grad=True)
    for n, expected in [(1, 20), (True, 10), (1.0, 30), (1, 20), (1.0, 30), (True, 10)]:
        assert fun(x, n).item() == expected
    nested = tr.checkpoint(lambda x, n: scale(x, n[0]["n"]), static_argnums=1)
    for n, expected in [(1, 20), (True, 10), (1.0, 30), (1, 20)]:
        assert nested(x, ({"n": n},)).item() == expected


def test_a_list_changed_in_place_is_traced_anew():
    fun = tr.checkpoint(lambda x, scales: x * sum(scales), static_argnums=1)
    x, scales = torch.ones((), requires_grad=True), [1, 2]
    assert fun(x, scales).item() == 3
    scales.append(12)
    assert fun(x, scales).item() == 15
    scales.pop()
    assert fun(x, scales).item() == 3
    nested = {"a": [1]}
    fun = tr.checkpoint(lambda x, d: x * len(d["a"]), static_argnums=1)
    assert fun(x, nested).item() == 1
    nested["a"].append(1)
    assert fun(x, nested).item() == 2


def test_static_by_keyword_position_and_name():
    body = Counted(lambda x, flag=False: x.sin() if flag else x.cos())
    body.fun.__wrapped__ = lambda x, flag=False: None  # its signature
    fun = tr.checkpoint(body.fun, static_argnums=1)
    named = tr.checkpoint(body.fun, static_argnames="flag")
    x = leaf(2)
    for call in (fun, named):
        assert_same(call(x, flag=True), x.sin())
        assert_same(call(x, True), x.sin())
        assert_same(call(x, False), x.cos())
        assert_same(call(x), x.cos()) if call is named else None
    body.new()
    assert_same(fun(x, flag=True), x.sin())
    assert_same(named(x, flag=True), x.sin())
    assert not body.new()


def test_static_objects():
    class Config:
        def __init__(self, n):
            self.n = n

    config = Config(2)
    fun = tr.checkpoint(lambda x, c, f: f(x) * c.n, static_argnums=(1, -1))
    x = leaf(2)
    assert_same(fun(x, config, torch.sin), x.sin() * 2)
    assert_same(fun(x, Config(3), torch.cos), x.cos() * 3)


def test_a_static_tensor_free_function_and_a_mutated_static_object():
    """An object hashed by identity stands for itself: what it holds is the user's affair."""
    fun = tr.checkpoint(lambda x, f: f(x), static_argnums=1)
    x = leaf(2)
    assert_same(fun(x, torch.exp), x.exp())
    assert_same(fun(x, lambda a: a * 2), x * 2)


# --- what the function reads besides its arguments -----------------------------------------------

FACTOR = 2


def test_a_closed_over_number():
    factor = 2

    def body(x):
        return x * factor

    fun = tr.checkpoint(body)
    x = torch.ones((), requires_grad=True)
    assert fun(x).item() == 2
    factor = 5
    assert fun(x).item() == 5


def test_a_global_number():
    global FACTOR
    fun = tr.checkpoint(lambda x: x * FACTOR)
    x = torch.ones((), requires_grad=True)
    assert fun(x).item() == 2
    FACTOR = 7
    try:
        assert fun(x).item() == 7
    finally:
        FACTOR = 2


def test_a_closed_over_number_of_an_inner_function():
    factor = 2

    def inner(x):
        return x * factor

    fun = tr.checkpoint(lambda x: inner(x).sin())
    x = leaf(2)
    assert_same(fun(x), (x * 2).sin())
    factor = 5
    assert_same(fun(x), (x * 5).sin())


def test_a_closed_over_number_of_a_decorator():
    factor = 2

    def body(x):
        return x.sin()

    @functools.wraps(body)
    def around(x):
        return body(x) * factor

    fun = tr.checkpoint(around)
    x = leaf(2)
    assert_same(fun(x), x.sin() * 2)
    factor = 5
    assert_same(fun(x), x.sin() * 5)


def test_a_default_argument():
    def body(x, n=2):
        return x * n

    fun = tr.checkpoint(body)
    x = torch.ones((), requires_grad=True)
    assert fun(x).item() == 2
    assert fun(x, 3).item() == 3
    assert fun(x, n=4).item() == 4


def test_a_closed_over_tensor_replaced():
    w = leaf(3)
    fun = tr.checkpoint(lambda x: x * w)
    x = leaf(3)
    for _ in range(3):
        w = leaf(3)
        assert_same(gradients(fun(x).sum(), [x, w]), [w, x])


def test_a_closed_over_tensor_replaced_by_one_of_another_shape():
    w = leaf(3)
    fun = tr.checkpoint(lambda x: (x * w).sum())
    x = leaf(3)
    assert_same(fun(x), (x * w).sum())
    w = leaf(2, 3)
    assert_same(fun(x), (x * w).sum())
    w = leaf(3).detach()
    assert_same(gradients(fun(x), x), [w])


def test_a_closed_over_tensor_in_a_list_replaced():
    ws = [leaf(3)]
    fun = tr.checkpoint(lambda x: x * ws[0])
    x = leaf(3)
    assert_same(fun(x), x * ws[0])
    ws[0] = leaf(3)
    assert_same(fun(x), x * ws[0])


def test_modules_of_a_function_in_a_list():
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    fun = tr.checkpoint(lambda x: layers[1](layers[0](x).sin()))
    x = leaf(3, dtype=torch.float32)
    assert_same(fun(x), layers[1](layers[0](x).sin()))
    layers[0] = nn.Linear(3, 3)
    assert_same(fun(x), layers[1](layers[0](x).sin()))


def test_a_parameter_replaced():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    fun = tr.checkpoint(net)
    x = leaf(2, 3, dtype=torch.float32)
    for _ in range(3):
        net[0].weight = nn.Parameter(torch.randn(3, 3))
        wrt = [x, net[0].weight]
        assert_same(gradients(fun(x).sum(), wrt), gradients(net(x).sum(), wrt))
    net.to(D)
    assert fun(x.double()).dtype == D


def test_train_and_eval_of_a_submodule():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4)))
    fun = tr.checkpoint(net)
    x = leaf(3, 4, dtype=torch.float32)
    fun(x)
    net[1][0].eval()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    assert_same(fun(x), net(x))
    assert_same(dict(net.state_dict()), state)
    net.train()
    fun(x)
    assert net[1][0].num_batches_tracked == 2


def test_a_layer_replaced_added_frozen():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fun = tr.checkpoint(net)
    x = leaf(3, 4, dtype=torch.float32)
    assert_same(fun(x), net(x))
    net[1] = nn.Sigmoid()
    assert_same(fun(x), net(x))
    net.append(nn.Linear(4, 2))
    assert_same(fun(x), net(x))
    net[0].requires_grad_(False)
    assert_same(fun(x), net(x))
    fun(x).sum().backward()
    assert net[0].weight.grad is None and net[2].weight.grad is not None


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def test_a_class_replaced():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    wrapped = tr.nn.wrap(copy.deepcopy(model), "full")
    x = torch.randn(2, 3, requires_grad=True)
    for _ in range(2):
        assert torch.equal(wrapped(x), model(x))
    for net in (model, wrapped):
        net[0].__class__ = Doubled
    for _ in range(2):
        assert torch.equal(wrapped(x), model(x))
    assert tr.nn.report(wrapped).traces == 2


class ReadsABuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        return self.norm(x + self.shift).sin()


def test_a_buffer_that_is_written_takes_the_place_of_another():
    plain, wrapped = ReadsABuffer(), tr.nn.wrap(ReadsABuffer(), "full")
    for step in range(4):
        if step == 2:
            for model in (plain, wrapped):
                model.shift = model.norm.running_mean
        x = torch.randn(4, 3)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [model(x) for model, x in zip((plain, wrapped), inputs, strict=True)]
        for out in outputs:
            out.sum().backward()
        assert torch.equal(*outputs)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        assert torch.equal(plain.shift, wrapped.shift)
    assert tr.nn.report(wrapped).traces == 2


def test_a_forward_hook_added():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fun = tr.checkpoint(net)
    x = leaf(3, 4, dtype=torch.float32)
    plain = fun(x).detach()
    handle = net[0].register_forward_hook(lambda module, args, out: out * 2)
    assert_same(fun(x), net(x))
    handle.remove()
    assert_same(fun(x).detach(), plain)


class Defaults:
    scale = 2.0
    weight = torch.ones(2)


class Inherited(Defaults):
    """Has no attributes of its own, as yet."""


class Scaled:
    scale = 3.0

    @tr.checkpoint
    def __call__(self, x):
        return x * self.scale

    @classmethod
    @tr.checkpoint
    def of_class(cls, x):
        return x * cls.scale


def test_attributes_of_classes_are_noticed(monkeypatch):
    defaults, scaled = Defaults(), Scaled()
    funs = [
        tr.checkpoint(lambda x: x * Defaults.scale),
        tr.checkpoint(lambda x: x * Inherited.scale),
        tr.checkpoint(lambda x: x * defaults.scale),
        tr.checkpoint(lambda x: x * defaults.weight),
        scaled,
        Scaled.of_class,
    ]

    def found():
        return [fun(torch.ones(2, requires_grad=True))[0].item() for fun in funs]

    assert found() == found() == [2, 2, 2, 1, 3, 3]
    monkeypatch.setattr(Defaults, "scale", 5.0)
    monkeypatch.setattr(Defaults, "weight", torch.full((2,), 4.0))
    monkeypatch.setattr(Scaled, "scale", 6.0)
    assert found() == [5, 5, 5, 4, 6, 6]
    monkeypatch.setattr(Inherited, "scale", 7.0, raising=False)
    defaults.scale, scaled.scale = 8.0, 9.0
    assert found() == [5, 7, 8, 4, 9, 6]
    del defaults.scale
    assert found() == [5, 7, 5, 4, 9, 6]


def test_an_attribute_of_a_module_changed():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = 2.0

        def forward(self, x):
            return x * self.factor

    net = Scale()
    fun = tr.checkpoint(net)
    x = leaf(2)
    assert_same(fun(x), x * 2)
    net.factor = 3.0
    assert_same(fun(x), x * 3)


def test_a_changing_number_warns_once():
    fun = tr.checkpoint(lambda x, scale: x * scale)
    x = leaf(2)
    with pytest.warns(RetraceWarning, match="pass a tensor") as caught:
        for step in range(20):
            fun(x, step / 7)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_changing_shapes_do_not_warn_of_numbers():
    fun = tr.checkpoint(lambda x, scale: x * scale)
    for n in range(1, 15):
        fun(leaf(n), 2.0)


# --- sharing and freeing -------------------------------------------------------------------------


def test_wrappers_of_one_function_share_the_trace():
    body = Counted(lambda x: x.sin().exp())
    x = leaf(3)
    gradients(tr.checkpoint(body.fun)(x).sum(), x)
    assert body.new()
    for policy in (None, "none", "dots", tr.checkpoint_policies.save_ops("aten.sin")):
        for _ in range(2):
            gradients(tr.checkpoint(body.fun, policy=policy)(x).sum(), x)
    assert not body.new()


def test_a_wrapper_made_anew_for_each_call():
    """As in a `forward` that says `tr.checkpoint(self.block)(x)`."""
    body = Counted(torch.tanh)

    class Net(nn.Module):
        def forward(self, x):
            return body.fun(x)

    net = Net()
    x = leaf(2, 3, dtype=torch.float32)
    for _ in range(5):
        tr.checkpoint(net, policy="dots")(x).sum().backward()
    assert body.runs <= 2


def test_methods():
    class Model:
        def __init__(self, factor):
            self.w = torch.tensor(factor, requires_grad=True)
            self.runs = 0

        @tr.checkpoint
        def plain(self, x):
            self.runs += 1
            return x.sin() * self.w

        @tr.checkpoint(policy="none", static_argnums=2)
        def with_options(self, x, n):
            return x**n * self.w

        def undecorated(self, x):
            self.runs += 1
            return x.cos() * self.w

    x = leaf(3, dtype=torch.float32)
    models = [Model(2.0), Model(3.0)]
    for model in models * 2:
        assert_same(model.plain(x), x.sin() * model.w)
        assert_same(model.with_options(x, 3), x**3 * model.w)
        assert_same(tr.checkpoint(model.undecorated)(x), x.cos() * model.w)
        assert_same(gradients(model.plain(x).sum(), model.w), [x.sin().sum()])
    runs = [model.runs for model in models]
    for model in models:
        model.plain(x), tr.checkpoint(model.undecorated)(x)
    assert [model.runs for model in models] == runs
    assert Model.plain.__name__ == "plain"


def test_a_decorated_forward():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        @tr.checkpoint(policy="dots")
        def forward(self, x):
            return self.fc(x).tanh()

    nets = [Net(), Net()]
    x = leaf(2, 3, dtype=torch.float32)
    for net in nets * 2:
        assert_same(net(x), net.fc(x).tanh())
        net(x).sum().backward()
    assert all(p.grad is not None for net in nets for p in net.parameters())


def test_what_a_dropped_function_frees():
    w = leaf(5)
    net = nn.Linear(5, 5).double()

    def body(x):
        return net(x * w).sin()  # noqa: F821  (deleted below)

    fun = tr.checkpoint(body)
    x = leaf(5)
    (g,) = gradients(fun(x).sum(), x, create_graph=True)
    gradients(g.sum(), x)
    torch.vmap(fun)(torch.randn(2, 5, dtype=D))
    references = [weakref.ref(o) for o in (body, w, net, net.weight, fun)]
    del g, body, w, net, fun
    assert_freed(*references)


def test_a_dropped_module_is_freed():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    x = leaf(4, 3, dtype=torch.float32)
    fun = tr.checkpoint(net)
    fun(x).sum().backward()
    references = [weakref.ref(o) for o in (net, net[0], net[0].weight)]
    del net, fun
    assert_freed(*references)


def test_a_dropped_module_whose_own_forward_leads_to_it_is_freed():
    def replace_forward(net):
        inner = net.forward
        net.forward = lambda x: inner(x).tanh()

    net = nn.Linear(3, 3)
    replace_forward(net)
    tr.nn.wrap(net, "full")
    net(torch.randn(4, 3)).sum().backward()
    reference = weakref.ref(net)
    del net
    assert_freed(reference)


def test_a_dropped_object_of_a_method_is_freed():
    class Model:
        def __init__(self):
            self.w = leaf(3)

        @tr.checkpoint
        def run(self, x):
            return x * self.w

    model = Model()
    model.run(leaf(3)).sum().backward()
    references = [weakref.ref(model), weakref.ref(model.w)]
    del model
    assert_freed(*references)


def test_the_last_arguments_are_not_kept():
    fun = tr.checkpoint(lambda x: x.sin())
    x = leaf(3)
    y = fun(x)
    y.sum().backward()
    references = [weakref.ref(x), weakref.ref(y)]
    del x, y
    assert_freed(*references)


def test_a_graph_keeps_its_function_alive():
    """The derivative of a derivative traces the function again, though only the graph is left."""
    fun = tr.checkpoint(lambda x: x.sin().exp())
    x = leaf(3)
    y = fun(x)
    del fun
    gc.collect()
    (g,) = gradients(y.sum(), x, create_graph=True)
    (gg,) = gradients(g.sum(), x)
    s = x.detach().sin()
    torch.testing.assert_close(gg, s.exp() * (x.detach().cos() ** 2 - s))


def test_backward_frees_what_was_saved():
    fun = tr.checkpoint(lambda x: x.sin().exp().sin(), policy="none")
    x = leaf(3)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(weakref.ref(t)) or t, lambda t: t
    ):
        kept = []
        y = fun(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


# --- exceptions ----------------------------------------------------------------------------------


def test_an_exception_in_the_forward_pass():
    class Fault(Exception):
        pass

    fail = [True]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            y = self.fc(x).sin()
            if fail[0]:
                raise Fault
            return y

    net = Net()
    fun = tr.checkpoint(net)
    x = leaf(2, 3, dtype=torch.float32)
    for _ in range(2):
        with nothing_left_behind(), pytest.raises(Fault):
            fun(x)
    fail[0] = False
    assert_same(fun(x), net(x))


def test_an_exception_in_a_transformation():
    fail = [True]

    def body(x):
        if fail[0]:
            raise ZeroDivisionError
        return x.sin().sum()

    fun = tr.checkpoint(body)
    x = torch.randn(3)
    for transform in (torch.func.grad, torch.vmap, torch.func.hessian):
        fail[0] = True
        with nothing_left_behind(), pytest.raises(ZeroDivisionError):
            transform(fun)(x)
        fail[0] = False
        assert_same(transform(fun)(x), transform(body)(x))


class _Failing(torch.autograd.Function):
    fail = True

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        if _Failing.fail:
            raise ZeroDivisionError("in backward")
        return g * 2


def test_an_exception_in_the_backward_pass():
    fun = tr.checkpoint(lambda x: _Failing.apply(x.sin()))
    x = leaf(3)
    _Failing.fail = True
    with nothing_left_behind(), pytest.raises(ZeroDivisionError, match="in backward"):
        gradients(fun(x).sum(), x)
    _Failing.fail = False
    torch.testing.assert_close(gradients(fun(x).sum(), x)[0], 2 * x.detach().cos())


def test_an_exception_in_a_higher_derivative():
    fail = [False]

    def body(x):
        if fail[0]:
            raise ZeroDivisionError
        return x.sin().exp()

    fun = tr.checkpoint(body)
    x = leaf(3)
    (g,) = gradients(fun(x).sum(), x, create_graph=True)
    fail[0] = True
    with nothing_left_behind(), pytest.raises(ZeroDivisionError):
        gradients(g.sum(), x, retain_graph=True)
    fail[0] = False
    (found,) = gradients(g.sum(), x)
    (h,) = gradients(body(x).sum(), x, create_graph=True)
    assert_same(found, gradients(h.sum(), x)[0])


def test_a_policy_that_raises():
    fail = [True]

    def policy(op, *avals, **params):
        if fail[0]:
            raise ZeroDivisionError
        return True

    fun = tr.checkpoint(lambda x: x.sin().exp(), policy=policy)
    x = leaf(3)
    for _ in range(2):
        with nothing_left_behind(), pytest.raises(ZeroDivisionError):
            fun(x)
    fail[0] = False
    assert_same(gradients(fun(x).sum(), x), gradients(x.sin().exp().sum(), x))


def test_a_saved_tensors_hook_that_raises():
    fun = tr.checkpoint(lambda x: x.sin().exp())
    x = leaf(3)
    fun(x)

    def pack(t):
        raise ZeroDivisionError

    with nothing_left_behind(), pytest.raises(ZeroDivisionError):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            fun(x)
    assert_same(fun(x), x.sin().exp())


# --- changed between forward and backward --------------------------------------------------------


@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize("captured", [True, False], ids=["closed over", "argument"])
def test_a_weight_changed_before_backward_raises(policy, captured):
    w = leaf(3)
    fun = tr.checkpoint(
        (lambda x: (x * w).sin()) if captured else (lambda x, w: (x * w).sin()), policy=policy
    )
    x = leaf(3)
    y = fun(x) if captured else fun(x, w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_value_that_is_not_needed_may_change():
    b = leaf(3)
    fun = tr.checkpoint(lambda x: x.sin() + b)
    x = leaf(3)
    y = fun(x)
    with torch.no_grad():
        b.add_(1)
    assert_same(gradients(y.sum(), x), [x.cos()])


def test_an_output_changed_before_backward():
    """exp keeps its output in plain PyTorch; a checkpoint keeps its input, and need not mind."""
    x = leaf(3)
    y = tr.checkpoint(lambda x: x.exp())(x)
    z = y * 1
    with torch.no_grad():
        y.zero_()
    assert_same(gradients(z.sum(), x), [x.exp()])
    y = tr.checkpoint(lambda x: x.exp(), policy="none")(x)
    z = y * 1
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_an_output_written_to_in_place_by_the_caller():
    x = leaf(3)
    for policy in ("full", "none"):
        fun = tr.checkpoint(lambda x: x.sin() * 2, policy=policy)
        y = fun(x)
        y.mul_(3)
        assert_same(gradients(y.sum(), x), gradients((x.sin() * 2).mul(3).sum(), x))


# --- threads -------------------------------------------------------------------------------------


def _gradient(fun, x):
    x = x.detach().requires_grad_()
    return gradients(fun(x).sum(), x)[0]


def test_two_threads_use_one_checkpoint():
    w = leaf(4, 4)
    for _ in range(10):
        body = Counted(lambda x: torch.tanh(x @ w).sin())
        fun = tr.checkpoint(body.fun)
        xs = [torch.randn(3, 4, dtype=D) for _ in range(2)]
        with nothing_left_behind():
            found = in_threads(*(lambda x=x: [_gradient(fun, x) for _ in range(3)] for x in xs))
        for x, grads in zip(xs, found, strict=True):
            for grad in grads:
                assert_same(grad, _gradient(lambda x: torch.tanh(x @ w).sin(), x))


def test_two_threads_trace_two_checkpoints():
    w, v = leaf(4, 4), leaf(4, 4)
    x = torch.randn(3, 4, dtype=D)
    bodies = [lambda x: torch.tanh(x @ w), lambda x: (x.sin() @ v).exp()]
    for _ in range(10):
        funs = [tr.checkpoint(lambda x, b=body: b(x)) for body in bodies]
        with nothing_left_behind():
            found = in_threads(*(lambda f=f: _gradient(f, x) for f in funs))
        assert_same(found, [_gradient(b, x) for b in bodies])


def test_a_thread_traces_while_another_runs_plain_functions():
    x = torch.randn(3, dtype=D)
    stop = []

    def plain():
        results = []
        while not stop:
            results.append(_gradient(_Failing.apply, x))
        return results

    def traced():
        try:
            return [
                _gradient(tr.checkpoint(lambda x, i=i: _Failing.apply(x.sin() * i)), x)
                for i in range(8)
            ]
        finally:
            stop.append(True)

    _Failing.fail = False
    plain_results, traced_results = in_threads(plain, traced)
    assert all(torch.equal(g, torch.full((3,), 2, dtype=D)) for g in plain_results)
    assert_same(
        traced_results, [_gradient(lambda x, i=i: _Failing.apply(x.sin() * i), x) for i in range(8)]
    )


def test_a_forward_in_one_thread_and_its_backward_in_another():
    fun = tr.checkpoint(lambda x: x.sin().exp(), policy="full")
    x = leaf(3)
    (y,) = in_threads(lambda: fun(x).sum())
    in_threads(lambda: y.backward(create_graph=False))
    assert_same(x.grad, gradients(x.sin().exp().sum(), x)[0])


# --- found by a reader ---------------------------------------------------------------------------


def test_signed_zeros_and_not_a_number():
    body = Counted(lambda x, n: torch.copysign(x, torch.full_like(x, n)))
    fun = tr.checkpoint(body.fun)
    x = torch.ones(2, dtype=D)
    assert_same([fun(x, 0.0), fun(x, -0.0)], [x, -x])
    fun(x, float("nan"))
    assert body.new()
    for number in (float("nan"), 0.0, -0.0):
        fun(x, number)
    assert not body.new()


def test_an_array_as_static_argument():
    fun = tr.checkpoint(lambda x, n: x * float(n.sum()), static_argnums=1)
    x, n = torch.ones(2, dtype=D), np.array([1, 2])
    assert_same([fun(x, n), fun(x, n.copy())], [x * 3, x * 3])
    n[0] = 5
    assert_same(fun(x, n), x * 7)


def test_containers_among_the_attributes_of_a_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel, self.scales, self.names = (2,), [1.0], {"a": 1}

        def forward(self, x):
            return x * self.kernel[0] * self.scales[0] * self.names["a"]

    net = Net()
    fun = tr.checkpoint(net)
    x = torch.ones(2, dtype=D)
    found = [fun(x)]
    net.kernel = (3,)
    found.append(fun(x))
    net.scales[0] = 5.0
    found.append(fun(x))
    net.names["a"] = 7
    found.append(fun(x))
    assert_same(found, [x * 2, x * 3, x * 15, x * 105])


def test_a_weight_that_is_pruned():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).double()
    fun = tr.checkpoint(net)
    x = leaf(3, 4)
    fun(x)
    prune.l1_unstructured(net[0], "weight", 0.5)
    assert_same(fun(x), net(x))
    weight = net[0].weight
    assert_same(fun(x), net(x))
    assert net[0].weight is not weight


def test_residuals_are_logged_when_the_setting_changes(caplog, monkeypatch):
    fun = tr.checkpoint(lambda x: x.sin().exp(), policy="dots")
    x = leaf(3)
    fun(x)
    assert not caplog.records
    monkeypatch.setattr(tr.config, "log_checkpoint_residuals", True)
    fun(x)
    fun(x)
    assert len(caplog.records) == 1


def test_a_function_that_took_the_place_of_one_that_is_gone():
    holder = {}

    @tr.checkpoint
    def fun(x):
        return holder["act"](x)

    def call(k):
        holder["act"] = lambda x: x * k  # its address is that of the one before
        result = fun(torch.ones(2))[0].item()
        del holder["act"]
        return result

    assert [call(k) for k in range(1, 6)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["T", "mT", "H", "mH", "data", "real"])
def test_what_is_asked_first_of_a_closed_over_tensor(name):
    w = torch.randn(3, 3, dtype=torch.double, requires_grad=True)
    x = torch.randn(2, 3, dtype=torch.double, requires_grad=True)

    def fun(x):
        return x @ getattr(w, name)

    wrt = [x, w]
    found = derivatives(tr.checkpoint(fun), [x], wrt, order=1)
    assert_same(found, derivatives(fun, [x], wrt, order=1))


def test_an_attribute_that_changes_at_each_step_is_warned_of():
    class Annealed(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = 1.0

        def forward(self, x):
            return torch.softmax(x / self.temperature, -1)

    net = nn.Sequential(Annealed())
    fun, x = tr.checkpoint(net), torch.randn(2, 3)
    for step in range(8):
        net[0].temperature = 1.0 + step
        assert_same(fun(x), net(x))
    net[0].temperature = 0.5
    with pytest.warns(RetraceWarning, match=r"the attribute temperature of the module 0 changes"):
        assert_same(fun(x), net(x))


def test_of_very_many_traces_the_oldest_go():
    @tr.checkpoint
    def fun(x, *, mode):
        return x.sin() if mode else x.cos()

    x = torch.ones(2)
    with pytest.warns(RetraceWarning, match="16 times for calls that differ in several things"):
        for mode in map(str, range(140)):
            fun(x, mode=mode)
    assert len(fun._trace_cache.traces) == 128


# what a function, or the forward of a module, reads; each is set to another value between calls


class Settings:
    def __init__(self, scale):
        self.scale = scale


act, factors, table, weights, settings, dtype = (
    torch.relu, [2.0, 3.0], {"s": 2.0}, [torch.ones(3)], Settings(2.0), torch.float32
)  # fmt: skip
READ = {
    "act": (lambda x: act(x), torch.sigmoid),
    "factors": (lambda x: sum(x * f for f in factors), [5.0]),
    "table": (lambda x: x * table["s"], {"s": 3.0}),
    "weights": (lambda x: sum(x * w for w in weights), [7 * torch.ones(3)]),
    "settings": (lambda x: x * settings.scale, Settings(3.0)),
    "dtype": (lambda x: x.to(dtype), torch.float64),
}


@pytest.mark.parametrize("name", READ)
def test_what_a_function_reads_may_be_another(name, monkeypatch):
    body, value = READ[name]
    fun, x = tr.checkpoint(body), torch.randn(3)
    assert_same(fun(x), body(x))
    monkeypatch.setitem(globals(), name, value)
    assert_same(fun(x), body(x))


def test_what_a_function_reads_may_grow():
    scales = [2.0]

    def body(x):
        return sum(x * s for s in scales)

    fun, x = tr.checkpoint(body), torch.randn(3)
    for _ in range(3):
        assert_same(fun(x), body(x))
        scales.append(5.0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.relu, torch.sigmoid),
        (nn.functional.relu, nn.functional.silu),
        (Settings(2.0), Settings(3.0)),
        ({1}, {1, 2}),
    ],
)
def test_what_a_module_reads_may_be_another(before, after):
    class Net(nn.Module):
        def forward(self, x):
            if isinstance(self.held, Settings):
                return x * self.held.scale
            return x * len(self.held) if isinstance(self.held, set) else self.held(x)

    net = Net()
    net.held = before
    fun, x = tr.checkpoint(nn.Sequential(net)), torch.randn(3)
    assert_same(fun(x), net(x))
    net.held = after
    assert_same(fun(x), net(x))
