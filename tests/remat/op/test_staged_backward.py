"""A model wrapped as a whole hands out each parameter's gradient when it is made."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchremat as tr
from tests.helpers import one_in

WIDTH, LAYERS = 16, 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(self.drop(nn.functional.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_models(policy, **options):
    torch.manual_seed(0)
    plain = Model(**options)
    wrapped = tr.nn.wrap(copy.deepcopy(plain), policy)
    return plain, wrapped


def run_step(model, x):
    """The names of parameters in the order in which they get their gradients, and these."""
    order = []
    hooks = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        for name, p in model.named_parameters()
    ]
    model.zero_grad()
    torch.manual_seed(1)
    model(x).square().sum().backward()
    for hook in hooks:
        hook.remove()
    return order, {name: p.grad for name, p in model.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def inputs(rows=3, *, needs_gradient=False):
    torch.manual_seed(2)
    return torch.randn(rows, 6, WIDTH, requires_grad=needs_gradient)


@pytest.mark.parametrize(
    ("policy", "tied"),
    one_in(3, ["full", "dots", "none", "budget:90%", "budget:least"], [False, True]),
)
@pytest.mark.sampled(2)
def test_hooks_run_in_the_order_of_plain_autograd(policy, tied):
    plain, wrapped = make_models(policy, tied=tied)
    for rows in (3, 3, 2):
        expected_order, expected = run_step(plain, inputs(rows))
        order, found = run_step(wrapped, inputs(rows))
        assert_same(found, expected)
        if not policy.startswith("budget"):  # a plan has an order of its own
            assert order == expected_order


class _Operators(TorchDispatchMode):
    """How many products of matrices without an addition ran: those of the backward pass."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", ["full", "dots", "budget:90%"])
def test_a_gradient_is_there_before_the_layers_below_run(policy):
    _, wrapped = make_models(policy)
    run_step(wrapped, inputs())
    seen = {}
    with _Operators() as operators:
        for name, p in wrapped.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda _, name=name: seen.update({name: operators.count})
            )
        out = wrapped(inputs()).square().sum()
        begin = operators.count
        out.backward()
        total = operators.count - begin
    share = {name: (count - begin) / total for name, count in seen.items()}
    assert share["head.weight"] < 0.2
    for i in range(LAYERS):
        assert share[f"layers.{i}.norm.weight"] <= (LAYERS - i) / LAYERS + 0.15


def test_an_optimizer_steps_inside_the_backward_pass_and_frees_gradients():
    plain, wrapped = make_models("full")
    alive = []

    def step_inside(model):
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=1e-3)

            def step(p, optimizer=optimizer):
                alive.append(sum(q.grad is not None for q in model.parameters()))
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)

    for model in (plain, wrapped):
        step_inside(model)
        for rows in (3, 2, 3):
            torch.manual_seed(1)
            model(inputs(rows)).square().sum().backward()
    assert max(alive) == 1
    assert_same(dict(wrapped.named_parameters()), dict(plain.named_parameters()))


def test_a_gradient_is_autograds_own_and_not_a_copy():
    _, wrapped = make_models("full")
    run_step(wrapped, inputs())
    storages = []
    for p in wrapped.parameters():
        p.grad = None
        p.register_hook(lambda g: storages.append(g.untyped_storage().data_ptr()))
    wrapped(inputs()).square().sum().backward()
    found = {p.grad.untyped_storage().data_ptr() for p in wrapped.parameters()}
    assert len(found.intersection(storages)) > 0.9 * len(storages)


def test_saved_values_are_freed_while_the_pass_runs():
    _, wrapped = make_models("none")
    run_step(wrapped, inputs())
    reference = None

    def hold(module, args, out):
        nonlocal reference
        reference = weakref.ref(out)

    out = wrapped(inputs())
    out.register_hook(lambda g: hold(None, None, g))
    freed = []
    wrapped.embed.weight.register_post_accumulate_grad_hook(
        lambda _: freed.append(reference() is None)
    )
    out.sum().backward()
    del out
    gc.collect()
    assert freed == [True] and reference() is None


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_some_gradients_alone(policy):
    plain, wrapped = make_models(policy)
    x, y = inputs(needs_gradient=True), inputs(needs_gradient=True)
    names = ["layers.4.up.weight", "layers.0.norm.bias"]
    for model, data in ((wrapped, x), (plain, y)):
        model.eval()
        parameters = dict(model.named_parameters())
        out = model(data).square().sum()
        chosen = [parameters[name] for name in names]
        model.kept = torch.autograd.grad(out, chosen, retain_graph=True)
        model.of_input = torch.autograd.grad(out, data, retain_graph=True)
        out.backward(inputs=chosen)
        assert parameters["head.weight"].grad is None
    for a, b in zip(
        (*wrapped.kept, *wrapped.of_input), (*plain.kept, *plain.of_input), strict=True
    ):
        assert torch.equal(a, b)
    for name in names:
        assert torch.equal(wrapped.get_parameter(name).grad, plain.get_parameter(name).grad)


def test_again_with_a_retained_graph_and_frozen_parameters():
    plain, wrapped = make_models("full")
    for model in (plain, wrapped):
        model.embed.requires_grad_(False)
        model.layers[2].requires_grad_(False)
        torch.manual_seed(1)
        out = model(inputs()).square().sum()
        out.backward(retain_graph=True)
        out.backward()
    for a, b in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)


def test_second_derivatives():
    plain, wrapped = make_models("full")
    found = []
    for model in (plain, wrapped):
        torch.manual_seed(1)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = model(inputs()).square().mean()
            grads = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
            penalty = sum(g.square().sum() for g in grads)
            found.append((grads, torch.autograd.grad(penalty, list(model.parameters()))))
    (grads, second), (our_grads, our_second) = found
    assert all(map(torch.equal, our_grads, grads))
    for a, b in zip(our_second, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_an_error_in_a_hook_leaves_nothing_behind():
    _, wrapped = make_models("full")
    _, expected = run_step(wrapped, inputs())
    expected = {name: g.clone() for name, g in expected.items()}

    def fail(_):
        raise ZeroDivisionError

    handle = wrapped.layers[3].up.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run_step(wrapped, inputs())
    handle.remove()
    assert_same(run_step(wrapped, inputs())[1], expected)


def test_passes_in_threads_over_one_graph():
    import threading

    _, wrapped = make_models("full")
    wrapped.eval()
    out = wrapped(inputs()).square().sum()
    parameters = list(wrapped.parameters())
    expected = torch.autograd.grad(out, parameters, retain_graph=True)
    found = [None] * 4

    def differentiate(i):
        found[i] = torch.autograd.grad(out, parameters, retain_graph=True)

    threads = [threading.Thread(target=differentiate, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(all(map(torch.equal, grads, expected)) for grads in found)


def test_batched_cotangents():
    plain, wrapped = make_models("full")
    found = []
    for model in (plain, wrapped):
        model.eval()
        out = model(inputs())
        cotangents = torch.stack([torch.ones_like(out), torch.zeros_like(out)])
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            found.append(
                torch.autograd.grad(
                    out, list(model.parameters()), cotangents, is_grads_batched=True
                )
            )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def kinds_of_edges(node):
    return [type(following).__name__ for following, _ in node.next_functions if following]


def test_short_checkpoints_are_one_node_unless_a_hook_waits():
    layers = [nn.Linear(4, 4) if i % 2 else nn.Tanh() for i in range(12)]
    layer = tr.nn.wrap(nn.Sequential(*layers), "full")
    x = torch.randn(2, 4)
    assert kinds_of_edges(layer(x).grad_fn) == ["AccumulateGrad"] * 12
    handle = layer[5].weight.register_hook(lambda gradient: 2 * gradient)
    assert "StageBackward" in kinds_of_edges(layer(x).grad_fn)
    handle.remove()
    assert kinds_of_edges(layer(x).grad_fn) == ["AccumulateGrad"] * 12


def test_a_parameter_is_read_before_its_gradient_is_handed_out():
    """An optimizer that steps inside the backward pass writes to it."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.randn(4))
            self.weights = nn.ParameterList(torch.randn(4) for _ in range(12))

        def forward(self, x):
            x = x * self.first
            for weight in self.weights:
                x = x + torch.sin(x * weight)  # its derivative by x reads the weight after all
            return x

    torch.manual_seed(0)
    plain = Late()
    wrapped = tr.nn.wrap(copy.deepcopy(plain), "full")
    for model in (plain, wrapped):

        def step(p):
            p.data.sub_(p.grad)

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
        model(x).sum().backward()
    assert_same(dict(wrapped.named_parameters()), dict(plain.named_parameters()))
