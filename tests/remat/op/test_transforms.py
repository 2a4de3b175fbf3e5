"""Checkpoints under, over and between transformations: equal to plain PyTorch, to the bit."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import torchremat as tr
from tests.helpers import (
    OpCounter,
    RandomPolicy,
    assert_same,
    bits,
    leaves_of,
    nothing_left_behind,
    one_in,
)

D = torch.double
Fn = torch.func
POLICIES = {
    "full": lambda: None,
    "none": lambda: "none",
    "dots": lambda: "dots",
    "random": lambda: RandomPolicy(5),
}
W = torch.randn(4, 4, dtype=D, generator=torch.Generator().manual_seed(3))


def inputs():
    return torch.randn(3, 4, dtype=D, generator=torch.Generator().manual_seed(4))


def layer(x, w):
    return torch.sin(torch.tanh(x @ w) * 2)


def loss(x):
    return layer(x, W).sum()


def two(x, w):
    return {"out": layer(x, w), "norm": [(x * x).sum()]}


def double_backward(f):
    def run(x):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        (h,) = torch.autograd.grad((g * x.detach()).sum(), x, create_graph=True)
        (i,) = torch.autograd.grad(h.sum(), x)
        return g.detach(), h.detach(), i

    return run


def dual(f):
    def run(x):
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos()))))

    return run


def plain_over_vmap(f):
    def run(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(Fn.vmap(f)(x).cos().sum(), x)

    return run


def forward_over_reverse(f):
    def run(x):
        return Fn.jvp(Fn.grad(f), (x,), (x.sin(),))

    return run


def reverse_over_forward(f):
    def run(x):
        return Fn.grad(lambda x: Fn.jvp(f, (x,), (x.sin(),))[1])(x)

    return run


def closing_over_plain(f):
    """A `torch.func` level inside, backward of PyTorch outside."""

    def run(x):
        x = x.clone().requires_grad_()
        y = Fn.grad(lambda a: f(a * x) * 2)(x.detach())
        return torch.autograd.grad(y.sin().sum(), x)

    return run


def linearized(f):
    def run(x):
        with warnings.catch_warnings():  # PyTorch's own folding of constants warns
            warnings.simplefilter("ignore")
            y, push = Fn.linearize(f, x)
        return y, push(x.sin())

    return run


TRANSFORMS = {
    "grad": Fn.grad,
    "grad_and_value": Fn.grad_and_value,
    "grad(grad)": lambda f: Fn.grad(lambda x: Fn.grad(f)(x).pow(2).sum()),
    "grad(grad(grad))": lambda f: Fn.grad(
        lambda x: Fn.grad(lambda x: Fn.grad(f)(x).pow(2).sum())(x).sum()
    ),
    "vjp": lambda f: lambda x: Fn.vjp(f, x)[1](torch.tensor(2.0, dtype=D)),
    "jvp": lambda f: lambda x: Fn.jvp(f, (x,), (x * 2,)),
    "jvp(jvp)": lambda f: (
        lambda x: Fn.jvp(lambda a: Fn.jvp(f, (a,), (x.sin(),))[1], (x,), (x * 2,))
    ),
    "linearize": linearized,
    "vmap": Fn.vmap,
    "vmap(in_dims=1)": lambda f: Fn.vmap(lambda x: f(x @ W[:3]), in_dims=1),
    "vmap(vmap)": lambda f: Fn.vmap(Fn.vmap(lambda x: f(x * W[0]))),
    "vmap(grad)": lambda f: Fn.vmap(Fn.grad(f)),
    "vmap(jvp)": lambda f: Fn.vmap(lambda x: Fn.jvp(f, (x,), (x.cos(),))),
    "jvp(vmap)": lambda f: lambda x: Fn.jvp(Fn.vmap(f), (x,), (x.cos(),)),
    "grad(vmap)": lambda f: Fn.grad(lambda x: Fn.vmap(f)(x).pow(2).sum()),
    "grad(vmap(grad))": lambda f: Fn.grad(lambda x: Fn.vmap(Fn.grad(f))(x).pow(2).sum()),
    "vmap(grad(vmap(grad)))": lambda f: Fn.vmap(
        Fn.grad(lambda x: Fn.vmap(Fn.grad(lambda a: f(a * W[0])))(x).pow(2).sum())
    ),
    "vmap(chunked)": lambda f: Fn.vmap(Fn.grad(f), chunk_size=2),
    "jacrev": Fn.jacrev,
    "jacfwd": Fn.jacfwd,
    "jacrev(jacrev)": lambda f: Fn.jacrev(Fn.jacrev(f)),
    "jacfwd(jacfwd)": lambda f: Fn.jacfwd(Fn.jacfwd(f)),
    "hessian": Fn.hessian,
    "vmap(hessian)": lambda f: Fn.vmap(Fn.hessian(f)),
    "forward over reverse": forward_over_reverse,
    "reverse over forward": reverse_over_forward,
    "plain over vmap": plain_over_vmap,
    "double backward": double_backward,
    "dual_level": dual,
    "plain autograd round a level": closing_over_plain,
    "functional.hessian": lambda f: lambda x: torch.autograd.functional.hessian(f, x),
    "functional.jvp": lambda f: lambda x: torch.autograd.functional.jvp(f, x, x.cos()),
    "functionalize": lambda f: Fn.functionalize(f),
}


# beyond the second order PyTorch adds up the parts of a derivative in another order
CLOSE = {"grad(grad(grad))"}


@pytest.mark.parametrize(("name", "policy"), one_in(3, TRANSFORMS, POLICIES))
@pytest.mark.sampled(3)
def test_transformations_of_a_checkpoint(name, policy):
    transform = TRANSFORMS[name]
    expected = transform(loss)(inputs())
    fun = tr.checkpoint(loss, policy=POLICIES[policy]())
    for _ in range(2):
        with nothing_left_behind():
            found = transform(fun)(inputs())
        assert_same(expected, found, name, close=name in CLOSE)


ARRAYS = {
    "jacrev": lambda f: Fn.jacrev(f, argnums=(0, 1)),
    "jacfwd": lambda f: Fn.jacfwd(f, argnums=(0, 1)),
    "vmap": lambda f: Fn.vmap(f, in_dims=(0, None)),
    "vmap out_dims": lambda f: Fn.vmap(f, in_dims=(0, None), out_dims=-1),
    "jvp": lambda f: lambda x, w: Fn.jvp(f, (x, w), (x.sin(), w.cos())),
    "jvp of one": lambda f: lambda x, w: Fn.jvp(lambda x: f(x, w), (x,), (x.sin(),)),
}


@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize("name", ARRAYS)
def test_transformations_of_a_function_with_several_outputs(name, policy):
    def fun(x, w):
        y = layer(x, w)
        return y, {"norm": (x * x).sum(), "index": y.argmax(-1)}

    def floating(x, w):
        y = layer(x, w)
        return y, {"norm": (x * x).sum()}

    fun = floating if name.startswith("jac") else fun
    expected = ARRAYS[name](fun)(inputs(), W)
    assert_same(expected, ARRAYS[name](tr.checkpoint(fun, policy=POLICIES[policy]()))(inputs(), W))


@pytest.mark.parametrize(
    "inner",
    [Fn.grad, Fn.hessian, Fn.vmap, lambda f: Fn.vmap(Fn.grad(f)), Fn.jacfwd, TRANSFORMS["jvp"]],
    ids=["grad", "hessian", "vmap", "vmap(grad)", "jacfwd", "jvp"],
)
@pytest.mark.parametrize("policy", ["full", "dots"])
@pytest.mark.sampled(3)
def test_a_checkpoint_of_a_transformed_function(inner, policy):
    transformed = inner(loss)
    fun = tr.checkpoint(transformed, policy=POLICIES[policy]())
    for transform in (
        lambda f: f,
        lambda f: Fn.grad(lambda x: sum(t.sum() for t in leaves_of(f(x)))),
    ):
        assert_same(transform(transformed)(inputs()), transform(fun)(inputs()))
    x = inputs().requires_grad_()
    found = [
        torch.autograd.grad(sum((t * t).sum() for t in leaves_of(f(x))), x)
        for f in (transformed, fun)
    ]
    assert_same(*found)


def test_per_sample_gradients_of_a_model():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    params = {name: p.detach() for name, p in net.named_parameters()}

    def sample_loss(params, x, y):
        return ((Fn.functional_call(net, params, (x[None],)) - y) ** 2).sum()

    x, y = torch.randn(5, 4, dtype=D), torch.randn(5, 2, dtype=D)
    expected = Fn.vmap(Fn.grad(sample_loss), in_dims=(None, 0, 0))(params, x, y)
    for policy in POLICIES.values():
        fun = tr.checkpoint(sample_loss, policy=policy())
        assert_same(expected, Fn.vmap(Fn.grad(fun), in_dims=(None, 0, 0))(params, x, y))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_view_of_heads_that_are_side_by_side_in_one_example_only(policy):
    def heads(x):
        q = x.view(1, 16, 4, 8).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, q, q)
        return y.transpose(1, 2).contiguous().view(1, 16, 32).square().sum()

    x = torch.randn(3, 16, 32)
    checkpointed = tr.checkpoint(heads, policy=POLICIES[policy]())
    assert_same(Fn.vmap(Fn.grad(checkpointed))(x), Fn.vmap(Fn.grad(heads))(x))


def test_functional_call_of_a_checkpointed_module():
    net = nn.Linear(4, 2).double()
    fun = tr.checkpoint(net)
    x = torch.randn(3, 4, dtype=D)
    assert_same(fun(x), net(x))
    params = {name: p.detach() * 2 for name, p in net.named_parameters()}

    def run(f):
        def total(params):
            with torch.nn.utils.stateless._reparametrize_module(net, params):
                return f(x).sin().sum()

        return Fn.grad(total)(params)

    assert_same(run(net), run(fun))


def test_randomness_under_vmap():
    fun = tr.checkpoint(lambda x: torch.nn.functional.dropout(x, 0.5) * x.sin())
    for randomness in ("different", "same"):
        torch.manual_seed(1)
        expected = Fn.vmap(fun.fun, randomness=randomness)(inputs())
        torch.manual_seed(1)
        assert_same(expected, Fn.vmap(fun, randomness=randomness)(inputs()))
    with nothing_left_behind(), pytest.raises(RuntimeError, match="random"):
        Fn.vmap(fun)(inputs())


def test_closed_over_tensors_of_a_level():
    """A checkpoint made inside a transformation, of a function that closes over its tensors."""

    def outer(a, wrap):
        return wrap(lambda x: (x * a).sin() @ a)(a * 2).sum()

    a = torch.randn(4, dtype=D)
    for transform in (Fn.grad, Fn.hessian, lambda f: Fn.vmap(f), lambda f: Fn.vmap(Fn.grad(f))):
        x = a if transform in (Fn.grad, Fn.hessian) else torch.stack([a, a.sin()])
        expected = transform(lambda a: outer(a, lambda f: f))(x)
        assert_same(expected, transform(lambda a: outer(a, tr.checkpoint))(x))
        saving = functools.partial(tr.checkpoint, policy="none")
        assert_same(expected, transform(lambda a: outer(a, saving))(x))


def test_a_level_around_that_a_checkpoint_closes_over_two_of():
    def outer(a):
        def middle(b):
            return tr.checkpoint(lambda x: (x * a * b).sin())(b).sum()

        return (Fn.grad(middle)(a) * a).sum()

    def plain(a):
        return (Fn.grad(lambda b: (b * a * b).sin().sum())(a) * a).sum()

    a = torch.randn(4, dtype=D)
    assert_same(Fn.grad(plain)(a), Fn.grad(outer)(a))
    assert_same(Fn.hessian(plain)(a), Fn.hessian(outer)(a), close=True)


# --- PyTorch's own autograd ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
class TestAutograd:
    def both(self, policy, run, *, close=False):
        x, w = inputs().requires_grad_(), W.clone().requires_grad_()
        expected = run(two, x, w)
        x, w = inputs().requires_grad_(), W.clone().requires_grad_()
        with nothing_left_behind():
            found = run(tr.checkpoint(two, policy=POLICIES[policy]()), x, w)
        assert_same(expected, found, close=close)

    def test_backward(self, policy):
        def run(f, x, w):
            out = f(x, w)
            (out["out"].sum() + out["norm"][0]).backward()
            return x.grad, w.grad

        self.both(policy, run)

    def test_backward_accumulates(self, policy):
        def run(f, x, w):
            for _ in range(2):
                f(x, w)["out"].sum().backward()
            return x.grad, w.grad

        self.both(policy, run)

    def test_one_input_only(self, policy):
        def run(f, x, w):
            return torch.autograd.grad(f(x, w)["out"].sum(), w)

        self.both(policy, run)

    def test_one_output_only(self, policy):
        def run(f, x, w):
            out = f(x, w)
            return torch.autograd.grad(out["norm"][0], [x, w], allow_unused=True)

        self.both(policy, run)

    def test_retain_graph_twice(self, policy):
        def run(f, x, w):
            y = f(x, w)["out"].sum()
            return [torch.autograd.grad(y, [x, w], retain_graph=True) for _ in range(3)]

        self.both(policy, run)

    def test_a_second_backward_raises_as_plain(self, policy):
        x, w = inputs().requires_grad_(), W.clone().requires_grad_()
        y = tr.checkpoint(two, policy=POLICIES[policy]())(x, w)["out"].sum()
        y.backward()
        with nothing_left_behind(), pytest.raises(RuntimeError, match="second time"):
            y.backward()

    def test_two_losses(self, policy):
        def run(f, x, w):
            out = f(x, w)
            out["out"].sin().sum().backward(retain_graph=True)
            first = x.grad.clone()
            out["norm"][0].backward()
            return first, x.grad, w.grad

        self.both(policy, run)

    def test_create_graph_in_backward(self, policy):
        def run(f, x, w):
            (gx, gw) = torch.autograd.grad(f(x, w)["out"].sum(), [x, w], create_graph=True)
            return torch.autograd.grad(gx.sum(), [x, w], retain_graph=True), torch.autograd.grad(
                gw.sin().sum(), [x, w]
            )

        self.both(policy, run)

    def test_gradient_penalty_with_respect_to_the_cotangent(self, policy):
        def run(f, x, w):
            out = f(x, w)["out"]
            ct = torch.ones_like(out, requires_grad=True)
            (gx,) = torch.autograd.grad(out, x, ct, create_graph=True)
            return torch.autograd.grad(gx.sum(), ct)

        self.both(policy, run)

    def test_hooks_on_inputs_and_outputs(self, policy):
        def run(f, x, w):
            seen = []
            x.register_hook(lambda g: seen.append(g) or g * 2)
            out = f(x, w)["out"]
            out.register_hook(lambda g: g * 3)
            out.sum().backward()
            return seen, x.grad, w.grad

        self.both(policy, run)

    def test_batched_cotangents(self, policy):
        def run(f, x, w):
            out = f(x, w)["out"]
            cts = torch.stack([torch.ones_like(out), out.detach()])
            return torch.autograd.grad(out, [x, w], cts, is_grads_batched=True)

        # a batch of products is one matrix product or many: PyTorch asks whether an operand
        # requires a gradient, which what a checkpoint runs backward does not
        self.both(policy, run, close=True)

    def test_cotangents_that_are_expanded_or_strided(self, policy):
        def run(f, x, w):
            out = f(x, w)["out"]
            grads = []
            for ct in (
                torch.ones((), dtype=D).expand(3, 4),
                torch.ones(4, 3, dtype=D).t(),
                torch.ones(6, 8, dtype=D)[::2, ::2],
            ):
                grads.append(torch.autograd.grad(out, [x, w], ct, retain_graph=True))
            return grads

        self.both(policy, run)

    def test_anomaly_mode(self, policy):
        def run(f, x, w):
            with torch.autograd.detect_anomaly(check_nan=True):
                return torch.autograd.grad(f(x, w)["out"].sum(), [x, w])

        with pytest.warns(UserWarning, match="Anomaly"):
            self.both(policy, run)

    def test_gradcheck(self, policy):
        fun = tr.checkpoint(lambda x, w: layer(x, w).sum(1), policy=POLICIES[policy]())
        x, w = inputs().requires_grad_(), W.clone().requires_grad_()
        assert torch.autograd.gradcheck(fun, (x, w), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(
            fun, (x[:2, :2].detach().requires_grad_(), w[:2, :2].detach().requires_grad_())
        )

    def test_chained(self, policy):
        def run(f, x, w):
            y = x
            for _ in range(3):
                y = f(y, w)["out"]
            y.sum().backward()
            return x.grad, w.grad

        self.both(policy, run)


def test_backward_in_a_deep_stack_of_dual_and_plain():
    x = inputs().requires_grad_()
    fun = tr.checkpoint(loss)

    def run(f):
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.detach().cos())))
            return torch.autograd.grad(out.tangent, x)

    assert_same(run(loss), run(fun))


# --- saved_tensors_hooks -------------------------------------------------------------------------


def kept_by(fun, *args):
    """What autograd packs while `fun` runs."""
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = fun(*args)
    return out, kept


def test_hooks_see_everything_that_is_kept():
    x, w = inputs().requires_grad_(), W.clone().requires_grad_()
    h = torch.tanh(x @ w)
    for policy, expected in {
        "full": [x, w],
        tr.checkpoint_policies.save_ops("aten.tanh"): [x, w, h],
        tr.checkpoint_policies.save_ops("aten.mm"): [x, w, x @ w],
        "none": [x, w, h, h * 2],
    }.items():
        _, kept = kept_by(tr.checkpoint(layer, policy=policy), x, w)
        assert sorted(map(bits, kept)) == sorted(map(bits, expected)), policy


def test_nothing_is_kept_without_a_gradient():
    x, w = inputs(), W
    assert kept_by(tr.checkpoint(layer, policy="none"), x, w)[1] == []
    x.requires_grad_()
    with torch.no_grad():
        assert kept_by(tr.checkpoint(layer, policy="none"), x, w)[1] == []


def test_what_the_hooks_give_back_is_used():
    x, w = inputs().requires_grad_(), W.clone().requires_grad_()
    for policy in POLICIES.values():
        fun = tr.checkpoint(layer, policy=policy())
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t + 0):
            grads = torch.autograd.grad(fun(x, w).sum(), [x, w])
        assert_same(grads, torch.autograd.grad(layer(x, w).sum(), [x, w]))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: None, lambda t: torch.zeros(3, 4, dtype=D) if t is None else t
        ):
            y = fun(x, w)
        with pytest.raises(Exception, match=r".*"):
            torch.autograd.grad(y.sum(), [x, w])  # nonsense comes back, of wrong shapes


def test_save_on_cpu():
    x, w = inputs().requires_grad_(), W.clone().requires_grad_()
    for policy in POLICIES.values():
        fun = tr.checkpoint(layer, policy=policy())
        with torch.autograd.graph.save_on_cpu():
            y = fun(x, w)
        assert_same(
            torch.autograd.grad(y.sum(), [x, w]), torch.autograd.grad(layer(x, w).sum(), [x, w])
        )


def test_save_on_cpu_under_a_second_derivative():
    x = inputs().requires_grad_()
    for policy in POLICIES.values():
        fun = tr.checkpoint(loss, policy=policy())

        def second(f):
            with torch.autograd.graph.save_on_cpu():
                (g,) = torch.autograd.grad(f(x), x, create_graph=True)
                return torch.autograd.grad((g * g).sum(), x)

        assert_same(second(loss), second(fun))


# --- dispatch modes ------------------------------------------------------------------------------


def test_modes_see_aten_operators():
    x, w = inputs().requires_grad_(), W.clone().requires_grad_()
    fun = tr.checkpoint(layer)
    torch.autograd.grad(fun(x, w).sum(), [x, w])
    with OpCounter() as forward:
        y = fun(x, w)
    assert {k: v for k, v in forward.counts.items() if k != "aten.detach"} == {
        "aten.mm": 1,
        "aten.tanh": 1,
        "aten.mul": 1,
        "aten.sin": 1,
    }
    with OpCounter() as backward:
        torch.autograd.grad(y.sum(), [x, w])
    assert backward.only("mm", "tanh", "tanh_backward", "cos") == {
        "mm": 3,
        "tanh": 1,
        "tanh_backward": 1,
        "cos": 1,
    }


def test_flops():
    x, w = inputs().requires_grad_(), W.clone().requires_grad_()

    def flops(f):
        with FlopCounterMode(display=False) as counter:
            f(x, w).sum().backward()
        return counter.get_total_flops()

    mm = 2 * 3 * 4 * 4
    fun = tr.checkpoint(layer)
    assert flops(layer) == 3 * mm
    assert [flops(fun) for _ in range(3)] == [4 * mm] * 3, "also when the first call is counted"
    assert flops(tr.checkpoint(layer, policy="dots")) == 3 * mm
    assert flops(tr.checkpoint(layer, policy="none")) == 3 * mm


class _Doubled(TorchDispatchMode):
    """Makes each sin twice what it was."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.sin.default else result


def test_a_mode_that_changes_values():
    x = inputs()
    fun = tr.checkpoint(lambda x: x.sin())
    fun(x)
    with _Doubled():
        assert_same(fun(x), x.sin().clone())
    assert_same(fun(x), x.sin())
    fresh = tr.checkpoint(lambda x: x.sin() + 0)
    with _Doubled():
        first = fresh(x)
    assert_same(first, x.sin() * 2)
    assert_same(fresh(x), x.sin()), "the mode is not baked in"


def test_torch_function_modes_see_the_trace_only():
    class Log(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = inputs().requires_grad_()
    fun = tr.checkpoint(loss)
    with Log():
        found = torch.autograd.grad(fun(x), x)
    assert_same(found, torch.autograd.grad(loss(x), x))


def test_default_device_mode():
    fun = tr.checkpoint(lambda x: x * torch.ones(4, dtype=D))
    x = inputs().requires_grad_()
    with torch.device("cpu"):
        assert_same(fun(x), x * 1)


# --- forward mode --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_jvp_runs_each_operator_once(policy):
    fun = tr.checkpoint(layer, policy=POLICIES[policy]())
    x, w = inputs(), W

    def counted(f):
        with OpCounter() as counter:
            Fn.jvp(f, (x, w), (x.sin(), w.cos()))
        return counter.only("mm", "tanh", "sin", "cos", "mul")

    counted(fun)
    plain = counted(layer)
    assert counted(fun) == plain


def test_jvp_of_one_input_computes_no_other_tangent():
    fun = tr.checkpoint(layer)
    x, w = inputs(), W

    def counted(f):
        with OpCounter() as counter:
            Fn.jvp(lambda x: f(x, w), (x,), (x,))
        return counter["mm"]

    counted(fun)
    assert counted(fun) == counted(layer)


def test_dual_numbers_run_each_operator_as_often_as_plain():
    fun = tr.checkpoint(lambda x: layer(x, W))

    def counted(f):
        with forward_ad.dual_level(), OpCounter() as counter:
            f(forward_ad.make_dual(inputs(), inputs()))
        return counter.only("mm", "tanh", "sin", "cos")

    counted(fun)
    plain = counted(lambda x: layer(x, W))
    found = counted(fun)
    assert found == plain


def test_unused_outputs_cost_no_recomputation():
    w = W.clone().requires_grad_()

    def fun(x):
        return x.sin() @ w, x.exp().tanh().cos()

    checked = tr.checkpoint(fun)
    x = inputs().requires_grad_()
    torch.autograd.grad(checked(x)[0].sum(), x)
    first, second = checked(x)
    with OpCounter() as counter:
        torch.autograd.grad(first.sum(), [x], retain_graph=True)
    assert counter.only("exp", "tanh", "mm", "cos", "sin") == {
        "exp": 0,
        "tanh": 0,
        "mm": 1,
        "cos": 1,
        "sin": 0,
    }
    torch.autograd.grad(second.sum(), x, retain_graph=True)
    with OpCounter() as counter:
        torch.autograd.grad(second.sum(), x)
    assert counter["mm"] == 0


def test_unneeded_inputs_cost_no_gradient():
    fun = tr.checkpoint(lambda x, w: (x.sin() @ w).tanh())
    x, w = inputs().requires_grad_(), W.clone().requires_grad_()
    torch.autograd.grad(fun(x, w).sum(), w)
    y = fun(x, w)
    with OpCounter() as counter:
        torch.autograd.grad(y.sum(), w)
    assert counter["mm"] == 2, "the forward product and one of the two of its derivative"


def test_policy_sees_batched_operators():
    seen = []

    def policy(op, *avals, **params):
        seen.append((str(op), [a.shape for a in avals]))
        return False

    fun = tr.checkpoint(lambda x, w: (x @ w).tanh(), policy=policy)
    xs, ws = torch.randn(5, 3, 4, dtype=D, requires_grad=True), torch.randn(5, 4, 2, dtype=D)
    Fn.vmap(fun)(xs, ws)
    assert ("aten.bmm.default", [(5, 3, 4), (5, 4, 2)]) in seen
