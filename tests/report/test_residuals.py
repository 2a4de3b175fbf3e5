import functools
import logging
import runpy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

import torchremat as tr
from torchremat.report.residuals import Residual

policies = tr.checkpoint_policies


def listed(f, *args, **kwargs):
    """The residuals as text, without the lines of this file."""
    lines = [str(r) for r in tr.saved_residuals(f, *args, **kwargs)]
    return [line.partition(" from test_residuals.py")[0] for line in lines]


# --- the examples in JAX's documentation of jax.checkpoint ----------------------------------------


def layer(W, x):
    return torch.sin(W @ x)


def three_layers(W1, W2, W3, x):
    x = layer(W1, x)
    x = layer(W2, x)
    return layer(W3, x)


def weights():
    return torch.ones(5, 4), torch.ones(6, 5), torch.ones(7, 6), torch.ones(4)


ARGUMENTS = [
    "f32[5,4] from the argument W1",
    "f32[6,5] from the argument W2",
    "f32[7,6] from the argument W3",
    "f32[4] from the argument x",
]


class TestJaxDocumentation:
    """https://docs.jax.dev/en/latest/gradient-checkpointing.html, with PyTorch's formulas."""

    def test_plain(self):
        assert listed(three_layers, *weights()) == [
            *ARGUMENTS,
            "f32[5] output of mv",  # sin keeps what it reads, where JAX's keeps its cosine
            "f32[5] output of sin",
            "f32[6] output of mv",
            "f32[6] output of sin",
            "f32[7] output of mv",
        ]

    def test_a_checkpoint_around_each_layer(self):
        inner = tr.checkpoint(layer)

        def f(W1, W2, W3, x):
            return inner(W3, inner(W2, inner(W1, x)))

        assert listed(f, *weights()) == [
            *ARGUMENTS,
            "f32[5] output of sin",
            "f32[6] output of sin",
        ]

    def test_a_checkpoint_around_all(self):
        assert listed(tr.checkpoint(three_layers), *weights()) == ARGUMENTS

    @pytest.mark.parametrize(
        "policy", [policies.dots_saveable, policies.dots_with_no_batch_dims_saveable]
    )
    def test_dots(self, policy):
        assert listed(tr.checkpoint(three_layers, policy=policy), *weights()) == [
            *ARGUMENTS,
            "f32[5] output of mv",
            "f32[6] output of mv",
            "f32[7] output of mv",
        ]

    def test_everything_is_what_plain_autograd_holds(self):
        f = tr.checkpoint(three_layers, policy=policies.everything_saveable)
        assert listed(f, *weights()) == listed(three_layers, *weights())

    def predict(self, params, x):
        *Ws, last = params
        for i, W in enumerate(Ws):
            x = tr.checkpoint_name(layer(W, x), f"layer{i}_output")
        return last @ x

    def loss(self, params, x, y):
        return torch.mean((self.predict(params, x) - y) ** 2)

    @pytest.mark.parametrize(
        ("policy", "kept"),
        [
            (
                policies.save_any_names_but_these("layer1_output"),
                ["f32[5] named 'layer0_output'", "f32[7] named 'layer2_output'"],
            ),
            (policies.save_only_these_names("layer1_output"), ["f32[6] named 'layer1_output'"]),
        ],
    )
    def test_names(self, policy, kept):
        W1, W2, W3, x = weights()
        f = tr.checkpoint(self.loss, policy=policy)
        assert listed(f, [W1, W2, W3, torch.ones(2, 7)], x, torch.ones(2)) == [
            "f32[5,4] from the argument params[0]",
            "f32[6,5] from the argument params[1]",
            "f32[7,6] from the argument params[2]",
            "f32[2,7] from the argument params[3]",
            "f32[4] from the argument x",
            "f32[2] from the argument y",
            *kept,
        ]


def named_layers(W1, W2, W3, x):
    x = tr.checkpoint_name(layer(W1, x), "a")
    x = tr.checkpoint_name(layer(W2, x), "b")
    return layer(W3, x)


A, B = "f32[5] named 'a'", "f32[6] named 'b'"
DOTS = ["f32[5] output of mv", "f32[6] output of mv", "f32[7] output of mv"]


def sin_of_sin(x):
    return torch.sin(torch.sin(x))


def composed(functions):
    def apply_all(x):
        for function in functions:
            x = function(x)
        return x

    return apply_all


def recursively_checkpointed(functions):
    """Halves, the first of each under a checkpoint: memory of the logarithm of the length."""
    if len(functions) == 1:
        return functions[0]
    middle = len(functions) // 2
    first = recursively_checkpointed(functions[:middle])
    return composed([tr.checkpoint(first), recursively_checkpointed(functions[middle:])])


class TestJaxExamples:
    """Those of jax.checkpoint's docstring, of its policies, and of `saved_residuals` in its tests.

    JAX keeps `cos x` for `sin x`; PyTorch keeps `x`, which is the result of what came before.
    """

    @pytest.mark.parametrize(
        ("policy", "kept"),
        [
            (policies.nothing_saveable, []),
            (policies.save_only_these_names("a"), [A]),
            (policies.save_only_these_names("a", "b"), [A, B]),
            (policies.save_any_names_but_these("a"), [B]),
            (policies.save_any_names_but_these("a", "b"), []),
            # sin computes what is named: neither it nor the name may keep the value
            (policies.save_anything_except_these_names("a"), [*DOTS[:2], B, DOTS[2]]),
            (policies.save_anything_except_these_names("a", "b"), DOTS),
            (~policies.save_only_these_names("a"), [*DOTS[:2], B, DOTS[2]]),
            (policies.everything_saveable, [DOTS[0], A, DOTS[1], B, DOTS[2]]),
            (
                policies.save_from_both_policies(
                    policies.dots_saveable, policies.save_only_these_names("b")
                ),
                [*DOTS[:2], B, DOTS[2]],
            ),
            (policies.dots_saveable & policies.save_only_these_names("b"), []),
        ],
        ids=str,
    )
    def test_names(self, policy, kept):
        f = tr.checkpoint(named_layers, policy=policy)
        assert listed(f, *weights()) == [*ARGUMENTS, *kept]

    def test_names_mean_nothing_outside_checkpoints(self):
        kept = [DOTS[0], A, DOTS[1], B, DOTS[2]]
        assert listed(named_layers, *weights()) == [*ARGUMENTS, *kept]

    def test_sin_of_sin(self):
        x = torch.ones(3)
        assert listed(sin_of_sin, x) == ["f32[3] from the argument x", "f32[3] output of sin"]
        assert listed(tr.checkpoint(sin_of_sin), x) == ["f32[3] from the argument x"]

    def test_two_checkpoints_in_a_row(self):
        inner = tr.checkpoint(sin_of_sin)
        x = torch.ones(3)
        # what lies between the two, where plain autograd holds three values
        assert listed(lambda x: inner(inner(x)), x) == [
            "f32[3] from the argument x",
            "f32[3] output of sin",
        ]

    @pytest.mark.parametrize(
        ("policy", "count"), [(policies.nothing_saveable, 0), (policies.everything_saveable, 7)]
    )
    def test_a_chain(self, policy, count):
        f = tr.checkpoint(composed([torch.sin] * 8), policy=policy)
        assert listed(f, torch.tensor(3.0)) == [
            "f32[] from the argument x",
            *["f32[] output of sin"] * count,
        ]

    def test_recursive_checkpoints(self):
        f = recursively_checkpointed([torch.sin] * 8)
        # the inputs of the second half, of its second half, and of the last
        assert listed(f, torch.tensor(3.0)) == [
            "f32[] from the argument x",
            *["f32[] output of sin"] * 3,
        ]

    @pytest.mark.parametrize(
        ("policy", "kept"),
        [
            (policies.dots_saveable, ["f32[2,3,5] output of bmm"]),
            (policies.dots_with_no_batch_dims_saveable, []),
        ],
    )
    def test_dots_with_batch_dims(self, policy, kept):
        f = tr.checkpoint(lambda W, x: torch.sin(torch.sin(W @ x)), policy=policy)
        assert listed(f, torch.ones(2, 3, 4), torch.ones(2, 4, 5)) == [
            "f32[2,3,4] from the argument W",
            "f32[2,4,5] from the argument x",
            *kept,
        ]

    def utility(self, x, y):
        x1, x2 = x
        z = torch.sin(torch.tensor(3.0))
        return z * ((x1 * x2) * y) * torch.tensor([1.0, 2.0, 3.0])

    def test_saved_residuals_utility(self):
        x, y = (torch.tensor(2.0), torch.tensor(3.0)), torch.tensor(4.0)
        arguments = [f"f32[] from the argument {name}" for name in ("x[0]", "x[1]", "y")]
        assert listed(self.utility, x, y=y) == [
            "f32[3] from a constant",
            *arguments,
            "f32[] output of sin",
            "f32[] output of mul",
        ]
        # values that depend on no argument are computed again too
        assert listed(tr.checkpoint(self.utility), x, y=y) == arguments

    def test_printed(self, capsys):
        policy = policies.save_only_these_names("a", "b")
        tr.print_saved_residuals(tr.checkpoint(named_layers, policy=policy), *weights())
        line = named_layers.__code__.co_firstlineno
        assert capsys.readouterr().out == (
            "f32[5,4] from the argument W1\n"
            "f32[6,5] from the argument W2\n"
            "f32[7,6] from the argument W3\n"
            "f32[4] from the argument x\n"
            f"f32[5] named 'a' from test_residuals.py:{line + 1} (named_layers)\n"
            f"f32[6] named 'b' from test_residuals.py:{line + 2} (named_layers)\n"
        )


# --- where a value comes from ---------------------------------------------------------------------


def test_a_residual_unpacks_and_prints():
    residual = tr.saved_residuals(torch.sin, torch.ones(2, 3, dtype=torch.float64))[0]
    assert isinstance(residual, Residual)
    aval, source = residual
    assert (str(aval), source) == ("f64[2,3]", "from the argument args[0]")
    assert residual.nbytes == 48
    assert residual.node is None
    assert str(residual) == f"{aval} {source}"


def test_a_computed_residual_has_its_node_and_line():
    def f(x):
        return torch.tanh(x)

    (residual,) = tr.saved_residuals(f, torch.ones(3))
    line = f.__code__.co_firstlineno + 1
    assert residual.source == f"output of tanh from test_residuals.py:{line} (f)"
    assert residual.node.target is torch.ops.aten.tanh.default


def test_a_name_is_told_with_the_line_that_gives_it():
    def f(x):
        y = torch.exp(x)
        y = tr.checkpoint_name(y, "y")
        return torch.sin(y)

    (residual,) = tr.saved_residuals(tr.checkpoint(f, policy="names:y"), torch.ones(3))
    line = f.__code__.co_firstlineno + 2
    assert residual.source == f"named 'y' from test_residuals.py:{line} (f)"


def test_arguments_go_by_parameter_and_path():
    def f(x, *rest, scale, **more):
        return x["w"][0].sin() * rest[1].sin() * scale.sin() * more["b"].sin()

    t = torch.ones
    args = ({"w": [t(1)], "unused": t(9)}, t(2, 1), t(3, 1, 1))
    found = listed(f, *args, scale=t(4, 1, 1, 1), b=t(5, 1, 1, 1, 1))
    arguments = [line for line in found if "argument" in line]
    assert arguments == [
        "f32[1] from the argument x['w'][0]",
        "f32[3,1,1] from the argument rest[1]",
        "f32[4,1,1,1] from the argument scale",
        "f32[5,1,1,1,1] from the argument more['b']",
    ]


def test_a_method_and_a_partial():
    class Model:
        def f(self, x, y):
            return x * y

    t = torch.ones(2)
    expected = ["f32[2] from the argument x", "f32[2] from the argument y"]
    assert listed(Model().f, t, torch.ones(2)) == expected
    assert listed(functools.partial(Model().f, y=torch.ones(2)), t) == [
        "f32[2] from the closed-over y"
    ]


def test_order_is_constants_arguments_closed_over_program():
    w = torch.ones(3, requires_grad=True)

    def f(x):
        return (torch.tanh(x * w) * torch.tensor([1.0, 2.0, 3.0])).exp()

    assert listed(f, torch.ones(3, requires_grad=True)) == [
        "f32[3] from a constant",
        "f32[3] from the argument x",
        "f32[3] from the closed-over w",
        "f32[3] output of tanh",
        "f32[3] output of exp",
    ]


def test_literals_come_first():
    def f(x):
        return torch.func.grad(lambda y: (y * 2.5).sin().sum())(x) * x * torch.tensor([1.0, 2, 3])

    found = listed(f, torch.ones(3))
    assert found[:3] == [
        "f64[] from a literal",
        "f32[3] from a constant",
        "f32[3] from the argument x",
    ]
    assert not any("literal" in line or "constant" in line for line in found[3:])
    (row,) = [row for row in tr.explain(f, torch.ones(3)) if row.name == "literal"]
    assert (row.decision, row.reason, row.nbytes) == ("constant", "a number", 8)


def test_closed_over_tensors_in_containers_and_called_functions():
    layers = [torch.ones(2, requires_grad=True), {"w": torch.ones(2, requires_grad=True)}]

    def inner(x):
        return x * layers[0] * layers[1]["w"]

    def f(x):
        return inner(x)

    found = [line for line in listed(f, torch.ones(2)) if "closed-over" in line]
    # x needs no gradient, so that nothing needs the first weight
    assert found == ["f32[2] from the closed-over layers[1]['w']"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        for linear in self.layers:
            x = torch.tanh(linear(x))
        return self.norm(x)


@pytest.mark.parametrize("wrap", [lambda f: f, tr.checkpoint])
def test_parameters_go_by_their_qualified_names(wrap):
    found = listed(wrap(Net().eval()), torch.ones(2, 4, requires_grad=True))
    state = [line for line in found if "parameter" in line or "closed" in line]
    assert {line for line in state if "bias" not in line} == {
        "f32[4,4] from the parameter layers.0.weight",
        "f32[4,4] from the parameter layers.1.weight",
        "f32[4] from the parameter norm.weight",
        "f32[4] from the closed-over norm.running_mean",
        "f32[4] from the closed-over norm.running_var",
    }


def test_parameters_of_a_closed_over_module():
    net = Net()

    def loss(x):
        return net(x).sum()

    assert "f32[4,4] from the parameter net.layers.1.weight" in listed(loss, torch.ones(2, 4))


def test_what_a_jitted_function_computes():
    @functools.partial(tr.jit, backend="eager")
    def g(x):
        return tr.checkpoint_name(x.sin(), "sin").cos().tanh()

    found = ["f32[3] from the argument x", "f32[3] named 'sin'"]
    assert listed(g, torch.ones(3)) == [*found, "f32[3] output of jitted function 'g'"]
    assert listed(lambda x: g(x).sin() * x, torch.ones(3)) == [
        *found,
        "f32[3] output of jitted function 'g'",
        "f32[3] output of sin",
    ]
    assert listed(
        tr.checkpoint(lambda x: g(x).sin() * x, policy="ops:aten.tanh"), torch.ones(3)
    ) == [
        "f32[3] from the argument x",
        "f32[3] output of tanh",  # which is part of the checkpoint's own graph
    ]


def test_a_tensor_passed_twice_is_one():
    def f(a, b):
        return a * b

    x = torch.ones(3)
    assert listed(f, x, x) == ["f32[3] from the argument a"]


def test_a_view_counts_as_its_base_once():
    def f(x, w):
        y = x @ w.T
        return (y.view(-1) * y.T.reshape(-1)).sum() + (y[0] * y[1]).sum()

    found = tr.saved_residuals(f, torch.ones(2, 3), torch.ones(4, 3))
    assert [str(r.aval) for r in found] == ["f32[2,3]", "f32[4,3]", "f32[2,4]", "f32[4,2]"]
    assert found[1].source == "from the argument w"
    assert [r.nbytes for r in found] == [24, 48, 32, 32]


def test_an_expanded_value_has_the_bytes_of_its_storage():
    def f(x):
        y = x.exp().expand(1000, 3)
        return y * y

    (residual,) = tr.saved_residuals(f, torch.ones(3))
    assert (str(residual.aval), residual.nbytes) == ("f32[3]", 12)


def test_what_is_changed_in_place_is_told_by_the_last_change():
    def f(x):
        return x.mul(2).exp_()

    assert listed(f, torch.ones(3)) == ["f32[3] output of exp_"]


def test_an_argument_that_is_written_to():
    def f(x):
        x.mul_(2)
        return x * x

    x = torch.ones(3)
    assert listed(f, x) == ["f32[3] from the argument x"]
    assert torch.equal(x, torch.ones(3))


def test_an_output_that_is_saved_counts():
    assert listed(lambda x: x.exp(), torch.ones(3)) == ["f32[3] output of exp"]


def test_what_nobody_needs_any_more_does_not_count():
    def f(x):
        x.exp().sin()
        return x.cos()

    assert listed(f, torch.ones(3)) == ["f32[3] from the argument x"]


def test_nothing_is_kept_under_no_grad_and_detach():
    def f(x):
        with torch.no_grad():
            y = x.exp().sin()
        return y + x.exp().detach() + x

    assert listed(f, torch.ones(3)) == []


def test_differentiated_are_inputs_that_require_a_gradient():
    def f(x, w):
        return x * w

    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    assert listed(f, x, w) == ["f32[3] from the argument x"]
    assert listed(f, x, w.detach()) == [
        "f32[3] from the argument x",
        "f32[3] from the argument w",
    ]


def test_a_closed_over_tensor_that_requires_a_gradient_is_enough():
    holder = type("Holder", (), {"w": torch.ones(3, requires_grad=True)})()

    def f(x):
        return x * holder.w

    assert listed(f, torch.ones(3)) == ["f32[3] from the argument x"]


# --- checkpoints ----------------------------------------------------------------------------------


def test_each_checkpoint_is_looked_into():
    @functools.partial(tr.checkpoint, policy="dots")
    def inner(x, w):
        return torch.sin(torch.sin(x @ w) @ w)

    def f(x, w):
        return inner(torch.tanh(inner(x, w)), w).exp()

    assert listed(f, torch.ones(2, 3), torch.ones(3, 3)) == [
        "f32[2,3] from the argument x",
        "f32[3,3] from the argument w",
        "f32[2,3] output of mm",
        "f32[2,3] output of mm",
        "f32[2,3] output of tanh",
        "f32[2,3] output of mm",
        "f32[2,3] output of mm",
        "f32[2,3] output of exp",
    ]


def test_the_outer_policy_decides():
    @functools.partial(tr.checkpoint, policy="none")
    def inner(x):
        return torch.sin(tr.checkpoint_name(torch.sin(torch.sin(x)), "s"))

    x = torch.ones(3)
    assert listed(tr.checkpoint(inner), x) == ["f32[3] from the argument x"]
    assert listed(tr.checkpoint(inner, policy="names:s"), x) == [
        "f32[3] from the argument x",
        "f32[3] named 's'",
    ]


def test_a_value_that_is_named_outside_its_checkpoint():
    inner = tr.checkpoint(torch.exp)

    def f(x):
        return torch.sin(tr.checkpoint_name(inner(x), "e"))

    assert listed(f, torch.ones(3)) == ["f32[3] from the argument x", "f32[3] named 'e'"]


def test_an_output_of_a_checkpoint_that_is_its_input():
    inner = tr.checkpoint(lambda x: (x, x.view(-1), x.sin()))

    def f(x):
        a, b, c = inner(x.exp())
        return a.sum() + (b * b).sum() + c.sum()

    assert listed(f, torch.ones(3)) == ["f32[3] output of exp"]


def test_a_checkpoint_that_nobody_differentiates():
    inner = tr.checkpoint(torch.sin, policy="none")

    def f(x):
        with torch.no_grad():
            inner(x)
        return inner(x.detach()) + x.exp()

    assert listed(f, torch.ones(3)) == ["f32[3] output of exp"]


# --- nothing is disturbed -------------------------------------------------------------------------


def test_nothing_runs():
    net = Net()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    rng = torch.get_rng_state()
    x = torch.ones(2, 4, requires_grad=True)

    tr.saved_residuals(lambda x: F.dropout(net(x), 0.5), x)

    assert all(torch.equal(net.state_dict()[name], value) for name, value in state.items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert x.grad is None
    assert net.norm.num_batches_tracked == 0


@pytest.mark.parametrize("wrap", [lambda f: f, tr.checkpoint])
def test_a_module_keeps_its_tensors(wrap):
    class Storing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.ones(3))

        def forward(self, x):
            self.mean, self.last = self.mean * 2, x.exp()
            return self.last * self.mean

    for module in (Storing(), nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))):
        before = {**dict(module.named_buffers()), **vars(module)}
        tr.saved_residuals(wrap(module), torch.ones(2, 3))
        after = {**dict(module.named_buffers()), **vars(module)}
        assert after.keys() == before.keys()
        assert all(after[name] is before[name] for name in before)


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_grad_mode_outside_does_not_matter(grad_enabled):
    with torch.set_grad_enabled(grad_enabled):
        assert listed(torch.exp, torch.ones(3)) == ["f32[3] output of exp"]


def test_hooks_of_the_user_do_not_see_it():
    def refuse(_):
        raise AssertionError

    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        assert listed(torch.exp, torch.ones(3)) == ["f32[3] output of exp"]


def test_fake_and_meta_tensors():
    huge = torch.empty(1 << 40, device="meta")
    (residual,) = tr.saved_residuals(torch.exp, huge)
    assert residual.nbytes == 1 << 42
    with FakeTensorMode():
        fake = torch.ones(3)
    assert listed(torch.exp, fake) == ["f32[3] output of exp"]


def test_an_error_in_the_function_leaves_nothing_behind():
    def f(x):
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            tr.saved_residuals(f, torch.ones(3))
    assert listed(torch.exp, torch.ones(3)) == ["f32[3] output of exp"]


# --- bad input ------------------------------------------------------------------------------------


def test_no_function():
    with pytest.raises(TypeError, match=r"a tensor of shape \(3,\).*saved_residuals\(f, x\)"):
        tr.saved_residuals(torch.ones(3).sin())
    with pytest.raises(TypeError, match="3 \\(int\\)"):
        tr.saved_residuals(3, torch.ones(3))


@pytest.mark.parametrize("args", [(), (3,), (torch.ones(3, dtype=torch.int64),)])
def test_nothing_to_differentiate(args):
    def f(*args):
        return args

    with pytest.raises(TypeError, match=r"f has nothing to differentiate.*requires_grad_"):
        tr.saved_residuals(f, *args)


def test_wrong_arguments_are_the_functions_own_error():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'w'"):
        tr.saved_residuals(lambda x, w: x, torch.ones(3))


def test_a_value_that_python_asks_for():
    def f(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(tr.ConcretizationError, match=r"test_residuals\.py"):
        tr.saved_residuals(f, torch.ones(3))


# --- printing and logging -------------------------------------------------------------------------


def test_print(capsys):
    tr.print_saved_residuals(three_layers, *weights())
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ARGUMENTS
    assert lines[4].startswith("f32[5] output of mv from test_residuals.py:")
    assert len(lines) == 9


def logged_by(caplog, f, *args):
    caplog.clear()
    f(*args)
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "torchremat"]


class TestLog:
    def f(self):
        w = torch.ones(3, 3, requires_grad=True)

        @functools.partial(tr.checkpoint, policy="dots")
        def block(x):
            return torch.sin(x @ w)

        return block

    def test_debug_by_default(self, caplog):
        caplog.set_level(logging.DEBUG, "torchremat")
        x = torch.ones(2, 3, requires_grad=True)
        block = self.f()
        ((level, text),) = logged_by(caplog, block, x)
        assert level == "DEBUG"
        first, *lines = text.splitlines()
        assert first.endswith(".block saving inputs with shapes:")
        assert lines[:-1] == [
            "  f32[2,3] from the argument x",
            "  f32[3,3] from the closed-over w",
            "and saving these intermediates:",
        ]
        assert lines[-1].startswith("  f32[2,3] output of mm from test_residuals.py:")
        assert logged_by(caplog, block, x) == []  # once for each program

    def test_warning_if_asked(self, caplog, monkeypatch):
        monkeypatch.setattr(tr.config, "log_checkpoint_residuals", True)
        ((level, _),) = logged_by(caplog, self.f(), torch.ones(2, 3))
        assert level == "WARNING"

    def test_silent_by_default(self, caplog):
        caplog.set_level(logging.WARNING, "torchremat")
        assert logged_by(caplog, self.f(), torch.ones(2, 3)) == []

    @pytest.mark.parametrize(
        ("value", "asked"),
        [(None, False), ("0", False), ("", False), ("1", True), ("TRUE", True), ("on", True)],
    )
    def test_the_environment_asks(self, monkeypatch, value, asked):
        name = "TORCHREMAT_LOG_CHECKPOINT_RESIDUALS"
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
        assert runpy.run_path(tr.config.__file__)["log_checkpoint_residuals"] is asked

    def test_modules_and_names(self, caplog):
        caplog.set_level(logging.DEBUG, "torchremat")

        class Named(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(3, 3, bias=False)

            def forward(self, x):
                return tr.checkpoint_name(torch.tanh(self.fc(x)), "t").sin()

        x = torch.ones(2, 3, requires_grad=True)
        block = tr.checkpoint(Named(), policy="names:t")
        ((_, text),) = logged_by(caplog, block, x)
        line = Named.forward.__code__.co_firstlineno + 1
        assert text.splitlines() == [
            "remat-decorated function Named saving inputs with shapes:",
            "  f32[2,3] from the argument x",
            "  f32[3,3] from the parameter fc.weight",
            "and saving these intermediates:",
            f"  f32[2,3] named 't' from test_residuals.py:{line} (forward)",
        ]

    def test_silent_without_derivative(self, caplog):
        caplog.set_level(logging.DEBUG, "torchremat")
        with torch.no_grad():
            assert logged_by(caplog, self.f(), torch.ones(2, 3)) == []
        assert logged_by(caplog, tr.checkpoint(torch.sin), torch.ones(2, 3)) == []

    def test_either_half_is_left_out_if_empty(self, caplog):
        caplog.set_level(logging.DEBUG, "torchremat")
        x = torch.ones(3, requires_grad=True)
        ((_, inputs),) = logged_by(caplog, tr.checkpoint(lambda x: x.sin()), x)
        assert inputs.splitlines()[1:] == ["  f32[3] from the argument x"]
        ((_, values),) = logged_by(caplog, tr.checkpoint(lambda x: x.exp(), policy="none"), x)
        assert "inputs" not in values
        assert "saving these intermediates:\n  f32[3] output of exp" in values
        ((_, nothing),) = logged_by(caplog, tr.checkpoint(lambda x: x + 1), x)
        assert nothing.endswith("saving nothing")
