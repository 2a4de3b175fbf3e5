"""Every error and warning of `checkpoint`: its class, its words, and that calling again works."""

import enum
import inspect
import re
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same, nothing_left_behind
from torchremat.errors import (
    ConcretizationError,
    EffectError,
    PolicyError,
    TorchrematError,
    TraceError,
    UnmatchedWarning,
)

cp = tr.checkpoint_policies


def leaf(*shape):
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


def refuse(fun, *args, error, match, **kwargs):
    """`fun(*args)` raises, twice, and leaves nothing behind."""
    for _ in range(2):
        with nothing_left_behind(), pytest.raises(error, match=match) as caught:
            fun(*args, **kwargs)
    return caught.value


# --- arguments of checkpoint ---------------------------------------------------------------------


@pytest.mark.parametrize("value", [[0], 1.0, "0", {0}, (0, 1.0), (True,), True, None])
def test_static_argnums_of_another_type(value):
    with pytest.raises(
        TypeError, match=r"static_argnums must be an int or a tuple of ints, but it is"
    ):
        tr.checkpoint(torch.sin, static_argnums=value)
    with pytest.raises(TypeError, match=r"static_argnums must be an int"):
        tr.checkpoint(static_argnums=value)


@pytest.mark.parametrize("value", [1, (0, 3), -2, (-3,)])
def test_static_argnums_out_of_range(value):
    fun = tr.checkpoint(lambda x: x.sin(), static_argnums=value)
    with (
        nothing_left_behind(),
        pytest.raises(
            ValueError,
            match=r"static_argnums contains -?\d, but the call has 1 positional argument",
        ),
    ):
        fun(leaf(2))


@pytest.mark.parametrize("value", [1, ("a", 2), [None], 2.5])
def test_static_argnames_of_another_type(value):
    with pytest.raises(
        TypeError, match=r"static_argnames must be a string or an iterable of strings"
    ):
        tr.checkpoint(lambda x, a: x, static_argnames=value)


def test_static_argnames_unknown():
    with pytest.raises(ValueError, match=r"static_argnames contains \['flags'\].*\['x', 'flag'\]"):
        tr.checkpoint(lambda x, flag: x, static_argnames="flags")


def test_concrete():
    with pytest.raises(NotImplementedError, match=r"static_argnums=\(1,\)"):
        tr.checkpoint(torch.sin, concrete=True)


@pytest.mark.parametrize("value", [3, "sin", torch.ones(2), [torch.sin]])
def test_a_fun_that_is_none(value):
    with pytest.raises(TypeError, match=r"checkpoint takes a function or an nn.Module"):
        tr.checkpoint(value)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"use_reentrant": False}, r"checkpoint: leave out use_reentrant"),
        ({"context_fn": min}, r"context_fn as policy=checkpoint_policies.from_selective"),
        ({"preserve_rng_state": False}, r"leave out preserve_rng_state: random numbers are always"),
        ({"determinism_check": "none"}, r"config.verify_recomputation compares"),
        ({"budget": "50%"}, r"write budget='50%' as policy='budget:50%'"),
        ({"polcy": "dots"}, r"there is no option 'polcy', nearest: 'policy'"),
    ],
)
def test_options_of_others(options, match):
    with pytest.raises(TypeError, match=match):
        tr.checkpoint(torch.sin, **options)
    with pytest.raises(TypeError, match=match):
        tr.checkpoint(**options)


def test_a_call_as_of_torch_utils_checkpoint():
    match = r"checkpoint: positional arguments go to .*, checkpoint\(f\)\(x\); leave out use_r"
    with pytest.raises(TypeError, match=match):
        tr.checkpoint(torch.sin, torch.ones(2), use_reentrant=False)


def test_options_by_position():
    with pytest.raises(TypeError, match=r"positional"):
        tr.checkpoint(torch.sin, "dots")


@pytest.mark.parametrize("value", [1, "yes", (True, 1), {"a": None}, None])
def test_prevent_cse_of_another_type(value):
    with pytest.raises(TypeError, match=r"prevent_cse must be a bool, or a tuple or tree of bools"):
        tr.checkpoint(torch.sin, prevent_cse=value)


def test_prevent_cse_as_a_tree_is_accepted():
    x = leaf(2)
    for value in (False, (True,)):
        assert_same(tr.checkpoint(torch.sin, prevent_cse=value)(x), x.sin())
    tree = tr.checkpoint(lambda tree: tree["a"].sin(), prevent_cse=({"a": True},))
    assert_same(tree({"a": x}), x.sin())
    with pytest.raises(ValueError, match="prevent_cse specification must be a tree prefix"):
        tr.checkpoint(torch.sin, prevent_cse=({"a": True},))(x)


@pytest.mark.parametrize("value", [3, [torch.sin], torch.ones(2), 2.5])
def test_a_policy_that_is_none(value):
    with pytest.raises(PolicyError, match=r"policy"):
        tr.checkpoint(torch.sin, policy=value)


def test_a_policy_spelled_wrongly():
    with pytest.raises(ValueError, match=r"dots"):
        tr.checkpoint(torch.sin, policy="dotz")


@pytest.mark.parametrize("answer", [None, 1, "yes", torch.tensor(True), tr.Offloadable], ids=repr)
def test_a_policy_that_answers_nonsense(answer):
    def policy(op, *avals, **params):
        return answer

    fun = tr.checkpoint(lambda x: x.sin().exp(), policy=policy)
    refuse(fun, leaf(2), error=TypeError, match=r"policy")
    x = leaf(2)
    assert_same(tr.checkpoint(fun.fun)(x), x.sin().exp())


def test_a_policy_that_takes_other_arguments():
    fun = tr.checkpoint(lambda x: x.sin().exp(), policy=lambda: True)
    with pytest.raises(TypeError):
        fun(leaf(2))


@pytest.mark.parametrize("name", [1, None, b"a", "", torch.ones(2)])
def test_a_name_that_is_none(name):
    with pytest.raises(TypeError, match=r"checkpoint_name takes a name that is a non-empty string"):
        tr.checkpoint_name(torch.ones(2), name)
    fun = tr.checkpoint(lambda x: tr.checkpoint_name(x.sin(), name))
    refuse(fun, leaf(2), error=TypeError, match=r"non-empty string")


# --- values of tensors ---------------------------------------------------------------------------


def branch(x):
    if x.sum() > 0:  # here
        return x.sin()
    return x.cos()


def item(x):
    return x * x.sum().item()  # here


def as_float(x):
    return x * float(x.sum())  # here


def as_int(x):
    return x * int(x.sum())  # here


def as_index(x):
    return [x, x][x.argmax()]  # here


def as_list(x):
    return x * x.tolist()[0]  # here


def as_bool(x):
    return x.sin() if bool((x > 0).any()) else x  # here


def as_numpy(x):
    return x * x.detach().numpy()[0]  # here


def nonzero(x):
    return x[x.nonzero()[0]]  # here


def mask(x):
    return x[x > 0].sin()  # here


def masked_select(x):
    return torch.masked_select(x, x > 0)  # here


def unique(x):
    return x.unique()  # here


def loop(x):
    while (x > 1).all():  # here
        x = x / 2
    return x


def repeat_by_tensor(x):
    return x.repeat_interleave((x > 0).long())  # here


def inside_a_module(x):
    class Branching(nn.Module):
        def forward(self, x):
            return x.sin() if x.sum() > 0 else x.cos()  # here

    return Branching()(x)


DATA_DEPENDENT = [
    branch, item, as_float, as_int, as_index, as_list, as_bool, as_numpy, nonzero, mask,
    masked_select, unique, loop, repeat_by_tensor, inside_a_module,
]  # fmt: skip


def line_of(fun):
    lines, start = inspect.getsourcelines(fun)
    return start + next(i for i, line in enumerate(lines) if line.rstrip().endswith("# here"))


@pytest.mark.parametrize("body", DATA_DEPENDENT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", ["grad", "no_grad", "func.grad", "vmap"])
def test_the_value_of_a_tensor(body, mode):
    fun = tr.checkpoint(body)
    x = leaf(3)
    where = re.escape(f"test_errors.py:{line_of(body)}")
    with torch.set_grad_enabled(mode == "grad"):
        call = {
            "func.grad": torch.func.grad(lambda x: fun(x).sum()),
            "vmap": lambda x: torch.vmap(fun)(x.expand(2, 3)),
        }.get(mode, fun)
        error = refuse(call, x, error=ConcretizationError, match=where)
    for advice in ("static_argnums", "torch.where", "torch.cond"):
        assert advice in str(error)
    assert isinstance(error, TypeError) and isinstance(error, TorchrematError)


def test_a_value_that_is_static_may_be_asked_for():
    fun = tr.checkpoint(lambda x, n: x.sin() if n > 0 else x.cos(), static_argnums=1)
    x = leaf(2)
    assert_same([fun(x, 1), fun(x, -1)], [x.sin(), x.cos()])


def test_shapes_may_be_asked_for():
    fun = tr.checkpoint(lambda x: x * len(x) if x.shape[0] > 2 and x.ndim == 1 else x)
    assert_same(fun(x := leaf(3)), x * 3)


# --- arguments and results -----------------------------------------------------------------------


class Box:
    def __init__(self, value):
        self.value = value


class Color(enum.Enum):
    RED = 1


def test_an_argument_of_another_type():
    fun = tr.checkpoint(lambda x, other: x.sin())
    for value in (Box(1), {1, 2}, object(), b"bytes", range(3)):
        error = refuse(fun, leaf(2), value, error=TraceError, match=r"positional argument 1 holds")
        assert type(value).__name__ in str(error) and "static_argnums" in str(error)
        assert isinstance(error, TypeError)
        refuse(fun, leaf(2), [value], error=TraceError, match=r"positional argument 1 holds")
        refuse(fun, leaf(2), other=value, error=TraceError, match=r"argument 'other' holds")


class Own:
    def __init__(self, x):
        self.x = x


def test_an_argument_that_holds_tensors():
    fun = tr.checkpoint(lambda x, other: x * other.x if isinstance(other, Own) else x)
    refuse(
        fun,
        leaf(2),
        Own(leaf(2)),
        error=TraceError,
        match=r"positional argument 1 holds .* of type Own",
    )


def test_a_static_argument_that_is_a_tensor():
    fun = tr.checkpoint(lambda x, w: x * w, static_argnums=1)
    refuse(fun, leaf(2), leaf(2), error=TypeError, match=r"static")


def test_a_static_argument_that_holds_a_tensor():
    fun = tr.checkpoint(lambda x, w: x * w[0], static_argnums=1)
    refuse(fun, leaf(2), [leaf(2)], error=TypeError, match=r"static")


def test_constants_among_the_arguments():
    fun = tr.checkpoint(lambda x, dtype, s, c, e: x.to(dtype)[s] * (c.imag + e.value))
    x = leaf(4)
    found = fun(x, torch.float32, slice(0, 2), 1 + 2j, Color.RED)
    assert_same(found, x.float()[:2] * 3)


@pytest.mark.parametrize("kind, args", [(Box, [1]), (object, []), (set, []), (range, [2])])
def test_a_result_of_another_type(kind, args):
    fun = tr.checkpoint(lambda x: (x.sin(), kind(*args)))
    error = refuse(fun, leaf(2), error=TraceError, match=r"lambda.* returned a value of type")
    assert kind.__name__ in str(error) and "outside the checkpoint" in str(error)


def test_results_in_registered_trees():
    fun = tr.checkpoint(lambda x: OrderedDict(a=x.sin(), b=[x.cos()]))
    x = leaf(2)
    found = fun(x)
    assert type(found) is OrderedDict
    assert_same(found, OrderedDict(a=x.sin(), b=[x.cos()]))


def test_sparse_arguments():
    x = torch.eye(3).to_sparse()
    fun = tr.checkpoint(lambda x, y: x @ y)
    refuse(fun, x, leaf(3, 3).float(), error=TraceError, match=r"layout torch.sparse_coo.*to_dense")
    y = leaf(3, 3).float()
    assert_same(fun(x.to_dense(), y), x.to_dense() @ y)


def test_a_sparse_tensor_closed_over():
    x = torch.eye(3).to_sparse()
    refuse(
        tr.checkpoint(lambda y: x @ y),
        leaf(3, 3).float(),
        error=TraceError,
        match=r"layout torch.sparse",
    )


def test_nested_tensors():
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    refuse(tr.checkpoint(lambda x: x.sin()), x, error=TraceError, match=r"layout torch.jagged")


def test_tensors_made_in_inference_mode():
    """Autograd cannot save one; plain PyTorch says so, and so do we."""
    with torch.inference_mode():
        w = torch.ones(2, dtype=torch.double)
    x = leaf(2)
    with pytest.raises(RuntimeError, match="[Ii]nference tensors cannot be saved"):
        (x * w).sum().backward()
    with nothing_left_behind(), pytest.raises(RuntimeError, match="[Ii]nference tensor"):
        tr.checkpoint(lambda x, w: x * w)(x, w).sum().backward()


# --- effects -------------------------------------------------------------------------------------


def test_a_write_to_a_differentiated_input():
    fun = tr.checkpoint(lambda x: x.mul_(2).sin())
    x = leaf(2) * 1
    before = x.detach().clone()
    error = refuse(fun, x, error=EffectError, match=r"writes in place.*test_errors.py")
    assert "clone" in str(error) and isinstance(error, RuntimeError)
    assert_same(x.detach(), before)


def test_a_write_to_a_leaf_is_refused_as_autograd_does():
    refuse(
        tr.checkpoint(lambda x: x.mul_(2).sin()),
        leaf(2),
        error=RuntimeError,
        match=r"a leaf Variable that requires grad|writes in place",
    )


def test_a_write_to_a_closed_over_tensor_that_is_differentiated():
    w = leaf(2) * 1
    before = w.detach().clone()
    refuse(
        tr.checkpoint(lambda x: x * w.add_(1)), leaf(2), error=EffectError, match=r"writes in place"
    )
    assert_same(w.detach(), before)


def test_a_write_of_a_differentiable_value_to_a_buffer():
    """Plain PyTorch makes the buffer part of the graph; a checkpoint cannot, and must say so."""
    buffer = torch.zeros(2, dtype=torch.double)
    fun = tr.checkpoint(lambda x: x * buffer.add_(x.sin()))
    refuse(fun, leaf(2), error=EffectError, match=r"writes in place|buffer|input")


def test_a_tensor_that_a_forward_pass_puts_into_a_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.ones(2, dtype=torch.double))

        def forward(self, x):
            self.mean, self.last = self.mean * 2, x.sin()
            return self.last * self.mean

    net = Net()
    fun = tr.checkpoint(net)
    for number in (1, 2, 3):
        x = leaf(2)
        (fun(x) + net.last).sum().backward()
        assert_same(net.last.detach(), x.detach().sin())
        assert_same(net.mean, torch.full((2,), 2.0**number, dtype=torch.double))
        assert_same(x.grad, x.detach().cos() * (2**number + 1))


def test_a_second_trace_leaves_no_traced_tensor_in_a_module():
    class Net(nn.Module):
        def forward(self, x):
            self.last = x.exp()
            return x.sin(), x.cos()

    net = tr.nn.wrap(Net())  # runs by its forward, which hooks on calls do not see
    x = leaf(2)
    first, _ = net(x)
    last = net.last
    (g,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    g.sum().backward()
    assert net.last is last
    assert_same(last.detach(), x.detach().exp())


def test_spectral_norm_updates_its_buffers():
    nets = []
    for _ in range(2):
        torch.manual_seed(2)
        nets.append(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).double())
    plain, net = nets
    fun = tr.checkpoint(net)
    x = leaf(3, 4)
    for _ in range(3):
        plain(x).sum().backward()
        fun(x).sum().backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), net.named_parameters(), strict=True):
        assert_same(a.grad, b.grad, name)
    assert_same(dict(plain.named_buffers()), dict(net.named_buffers()))


def test_a_draw_into_a_tensor_that_is_not_contiguous():
    """PyTorch fills it in an order, or with numbers, that the functional operator does not."""
    fun = tr.checkpoint(lambda x: x * torch.empty_like(x).normal_())
    refuse(
        fun, leaf(4, 5).t(), error=EffectError, match=r"normal_\(\) at test_errors.py.*contiguous"
    )
    x = leaf(4, 5).t()
    for f in (
        lambda x: torch.nn.functional.dropout(x),
        lambda x: x * torch.empty_like(x).uniform_(),
    ):
        torch.manual_seed(1)
        expected = f(x)
        torch.manual_seed(1)
        assert_same(expected, tr.checkpoint(f)(x))


VIEWS = {
    "of an input": lambda y: (y.view(3, 1),),
    "a part of an input": lambda y: (y[1:],),
    "of one another": lambda y: (lambda h: (h, h.view(3, 1)))(y * 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_to_an_output_that_shares_memory(name):
    """Plain autograd follows such writes; here they are refused, as for any `autograd.Function`."""
    fun = tr.checkpoint(VIEWS[name])
    for i in range(len(fun(leaf(3) * 1))):
        out = fun(leaf(3) * 1)[i]
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            out.mul_(2)
    x = leaf(3)
    y = x.clone()
    z = y.sin()
    if name != "of one another":
        with torch.no_grad():
            fun(y)[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_outputs_that_share_no_memory_may_be_written_to():
    def fun(x):
        return (x * 2).t(), x.sin()

    x = leaf(3, 3)
    found = [o.mul_(3) for o in tr.checkpoint(fun)(x)]
    expected = [o.mul_(3) for o in fun(x)]
    assert_same(found, expected)
    assert_same(*(torch.autograd.grad(sum(o.sum() for o in os), x) for os in (found, expected)))


def test_formatting_a_traced_number():
    fun = tr.checkpoint(lambda x: f"{x.sum():.2f}" and x)
    refuse(fun, leaf(2), error=ConcretizationError, match=r"test_errors.py")


def test_a_traced_tensor_that_escapes_in_a_list():
    kept = []
    fun = tr.checkpoint(lambda x: kept.append(x.sin()) or x.cos())
    x = leaf(2)
    fun(x).sum().backward()
    assert_same(kept[0].detach(), x.detach().sin())


def test_a_random_number_asked_again_by_a_second_derivative():
    fun = tr.checkpoint(lambda x: torch.nn.functional.dropout(x.sin(), 0.5).exp())
    x = leaf(20)
    try:
        (g,) = torch.autograd.grad(fun(x).sum(), x, create_graph=True)
        torch.autograd.grad(g.sum(), x)
    except EffectError as error:
        assert "random numbers" in str(error) and "test_errors.py" in str(error)


# --- classes ------------------------------------------------------------------------------------


def sine(x):
    return x.sin()


@pytest.mark.parametrize(
    ("wrong", "standard"),
    [
        (lambda: tr.checkpoint(3), TypeError),
        (lambda: tr.checkpoint(sine, static_argnums="0"), TypeError),
        (lambda: tr.checkpoint(sine, static_argnames="y"), ValueError),
        (lambda: tr.checkpoint(sine, static_argnums=2)(leaf(2)), ValueError),
        (lambda: tr.checkpoint(sine, concrete=True), NotImplementedError),
        (lambda: tr.checkpoint(sine, prevent_cse="yes")(leaf(2)), TypeError),
        (lambda: tr.checkpoint(sine, prevent_cse=(True, True))(leaf(2)), ValueError),
        (lambda: tr.checkpoint(sine, policy=3), TypeError),
        (lambda: tr.checkpoint_name(leaf(2), 3), TypeError),
        (lambda: tr.saved_residuals(3), TypeError),
        (lambda: tr.explain(sine, leaf(2)).diff(3), TypeError),
        (lambda: tr.compare(sine, leaf(2), policies="dots"), TypeError),
        (lambda: tr.plan(sine, leaf(2), budget=0.5, optimizer="adam"), TypeError),
        (lambda: tr.plan(sine, leaf(2), budget=0.5, device="h1000"), ValueError),
        (lambda: tr.estimate(sine, leaf(2)).fits("50%"), TypeError),
        (lambda: tr.planning.simulate(sine), TypeError),
        (lambda: tr.nn.wrap(sine), TypeError),
        (lambda: tr.nn.wrap(nn.Sequential(nn.ReLU()), select="first:2"), ValueError),
        (lambda: tr.nn.report(tr.nn.wrap(nn.ReLU())), RuntimeError),
        (lambda: tr.make_graph(3), TypeError),
        (lambda: tr.vmap(3), TypeError),
    ],
)
def test_each_error_is_of_our_own_and_a_standard_one(wrong, standard):
    with pytest.raises(standard) as caught:
        wrong()
    assert isinstance(caught.value, TorchrematError)
    assert type(caught.value) is getattr(tr.errors, type(caught.value).__name__)


# --- warnings ------------------------------------------------------------------------------------


def unmatched(policy, body=None):
    def default(x):
        return tr.checkpoint_name(torch.mm(x, x), "attention").sin()

    fun = tr.checkpoint(body or default, policy=policy)
    with pytest.warns(UnmatchedWarning) as caught:
        fun(leaf(2, 2))
    assert {w.filename for w in caught} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fun(leaf(2, 2)).sum().backward()  # once a trace
    return [str(w.message) for w in caught]


def test_a_name_that_matches_nothing():
    (message,) = unmatched(cp.save_only_these_names("attn"))
    assert "'attn'" in message and "'attention'" in message
    (message,) = unmatched(cp.save_only_these_names("attention", "mlp"))
    assert "'mlp'" in message
    (message,) = unmatched("names:atention")
    assert "nearest: 'attention'" in message


def test_an_operator_that_matches_nothing():
    (message,) = unmatched(cp.save_ops("aten.bmm"))
    assert "aten.bmm" in message and "aten.mm" in message


@pytest.mark.parametrize("make", [cp.save_ops, cp.recompute_ops, lambda op: tr.policy(f"ops:{op}")])
def test_an_operator_that_there_is_not_matches_nothing(make):
    (message,) = unmatched(make("aten.mmm"))
    assert re.search(
        r"'aten.mmm' matches nothing.* nearest: 'aten.mm'.*\(PyTorch .* knows no", message
    )
    (message,) = unmatched(make("no_such_library.op"))
    assert "'no_such_library.op' matches nothing" in message


def test_each_checkpoint_is_told_what_matches_nothing():
    def fun(x):
        return torch.mm(x, x).sin()

    for policy in ("names:atention", cp.save_only_these_names("atention"), "names:atention"):
        with pytest.warns(UnmatchedWarning, match="'atention'"):
            tr.checkpoint(fun, policy=policy)(leaf(2, 2))
        with pytest.warns(UnmatchedWarning, match="'atention'"):
            tr.explain(fun, leaf(2, 2), policy=policy)


def test_a_module_that_matches_nothing():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.Linear(2, 2).double()

        def forward(self, x):
            return self.attention(x).sin()

    (message,) = unmatched(cp.save_modules("atention"), Net())
    assert "'atention'" in message and "'attention'" in message


def test_what_matches_does_not_warn():
    x = leaf(2, 2)
    for policy in (
        cp.save_only_these_names("a"),
        cp.save_any_names_but_these("a"),
        cp.save_anything_except_these_names("a"),
        cp.save_ops("aten.mm"),
        cp.dots_saveable,
    ):
        tr.checkpoint(lambda x: tr.checkpoint_name(torch.mm(x, x), "a").sin(), policy=policy)(x)


def test_a_name_inside_an_inner_checkpoint_matches():
    inner = tr.checkpoint(lambda x: tr.checkpoint_name(x.sin(), "inside").exp())
    fun = tr.checkpoint(lambda x: inner(x.cos()), policy=cp.save_only_these_names("inside"))
    fun(leaf(2)).sum().backward()


def test_a_name_inside_a_cond_cannot_be_saved():
    def body(x):
        return torch.cond(
            x.sum() > 0,
            lambda x: tr.checkpoint_name(x.sin(), "branch").exp(),
            lambda x: x.cos(),
            (x,),
        )

    (message,) = unmatched("names:branch", body)
    assert "'branch' matches only values inside a torch.cond" in message
    (message,) = unmatched("names:brunch", body)
    assert "'brunch' matches nothing" in message and "nearest: 'branch'" in message


@pytest.mark.parametrize(
    "draw",
    [lambda x: torch.dropout(x, 0.5, train=True), lambda x: x.sin() + x.exp() * torch.randn(3)],
)
def test_a_second_derivative_of_what_a_checkpoint_inside_draws(draw):
    """Its numbers are not saved for that; the first derivative has them."""
    function = tr.checkpoint(tr.checkpoint(draw))
    outcomes = []
    for f in (draw, function):
        x = torch.linspace(0.1, 0.9, 3).requires_grad_()
        torch.manual_seed(0)
        outcomes.append(torch.autograd.grad((f(x) ** 2).sum(), x))
    assert_same(*outcomes)
    with pytest.raises(EffectError, match=r"test_errors\.py:\d+ \(<lambda>\).*draws random"):
        (first,) = torch.autograd.grad((function(x) ** 2).sum(), x, create_graph=True)
        torch.autograd.grad(first.sum(), x)


def test_random_numbers_in_a_branch_name_the_branch():
    """PyTorch's derivative of `torch.cond` runs the branch again, with other numbers."""

    def f(x):
        branches = (lambda x: torch.nn.functional.dropout(x.sin()), torch.cos)
        return torch.cond(x.sum() > 0, *branches, (x,)).sum()

    x = torch.ones(4, requires_grad=True)
    with pytest.raises(EffectError, match=r"derivative of cond, at test_errors.py:.* aten.bern"):
        tr.checkpoint(f)(x).backward()
