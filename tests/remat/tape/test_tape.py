"""What holds for a tape: derivatives of any order, freeing, writes afterwards, notes, nesting."""

import gc
import weakref

import pytest
import torch
from torch import nn

import torchremat as tr
from torchremat.errors import ArgumentValueError, ConcretizationError, EffectError, PolicyError
from torchremat.measure import LiveBytes


def branch(x):
    y = x.sin().exp()
    if y.sum() > 0:
        y = y * x.cos()
    return y.tanh() * x


def leaf(*shape):
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


def test_double_backward():
    x = leaf(5)

    def grads(f):
        (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return first, second, *torch.autograd.grad(second.sin().sum(), x)

    for ours, plain in zip(grads(tr.checkpoint(branch)), grads(branch), strict=True):
        assert torch.equal(ours, plain)


def test_gradgradcheck():
    assert torch.autograd.gradgradcheck(tr.checkpoint(branch), leaf(3))


@pytest.mark.parametrize("transform", [torch.func.grad, tr.grad, torch.func.jacrev])
def test_under_torch_func_the_function_runs_as_it_is(transform):
    def total(x):
        return branch(x).sum()

    x = leaf(4).detach()
    assert torch.equal(transform(tr.checkpoint(total))(x), transform(total)(x))


def test_forward_mode():
    x, tangent = leaf(4).detach(), torch.ones(4, dtype=torch.double)
    ours = torch.func.jvp(tr.checkpoint(branch), (x,), (tangent,))
    assert all(map(torch.equal, ours, torch.func.jvp(branch, (x,), (tangent,))))


def test_the_graph_may_be_used_again():
    x = leaf(4)
    y = tr.checkpoint(branch)(x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, x)[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x)


def test_a_gradient_inside_the_function():
    """A force field: its function differentiates an energy."""
    layer = nn.Linear(3, 8, dtype=torch.double)

    def forces(x):
        energy = layer(x).tanh().square().sum()
        if energy.item() < 0:
            return x
        return torch.autograd.grad(energy, x, create_graph=True)[0].exp()

    def grads(f):
        x = torch.linspace(0, 1, 6, dtype=torch.double).view(2, 3).requires_grad_()
        return torch.autograd.grad(f(x).sum(), [x, *layer.parameters()])

    for ours, plain in zip(grads(tr.checkpoint(forces)), grads(forces), strict=True):
        assert torch.equal(ours, plain)


def test_an_operator_runs_again_once():
    runs = []

    @torch.library.custom_op("tape_test::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin()

    def f(x):
        y = x.exp()
        for _ in range(4):
            y = counted(y.detach()) * y.sum().item() + y * y
        return y

    tr.checkpoint(f)(leaf(3)).sum().backward()
    assert len(runs) == 4 + 3  # nobody reads the last result


def test_python_runs_once_after_the_first_call():
    runs = []

    @tr.checkpoint
    def f(x):
        runs.append(float(x.sum()))
        return x.sin().exp()

    x = leaf(3)
    f(x).sum().backward()
    runs.clear()
    f(x).sum().backward()
    assert len(runs) == 1


def test_everything_is_freed(no_collector):
    x = leaf(1000)
    f = tr.checkpoint(branch)
    f(x).sum().backward()
    with LiveBytes() as live:
        y = f(x)
    assert live.live == 8000
    with live:
        y.sum().backward()
    assert live.live <= 2 * 8000  # y and the gradient
    del y
    assert live.live <= 8000


def test_a_call_that_is_never_differentiated_leaves_nothing(no_collector):
    x = leaf(1000)
    f = tr.checkpoint(branch)
    with LiveBytes() as live:
        f(x)
    assert live.live == 0


def test_an_input_that_is_written_to_afterwards():
    x = leaf(3)
    y = x * 2
    z = tr.checkpoint(branch)(y)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(EffectError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_result_that_is_written_to_afterwards():
    def f(x):
        return x.exp() if x.sum() < 100 else x

    x = leaf(3)
    z = tr.checkpoint(f)(x)
    value = z.detach().clone()
    z.mul_(0)  # plain PyTorch has lost exp(x) then
    z.sum().backward()
    assert torch.equal(x.grad, value * 0)
    z = tr.checkpoint(f, policy="none")(x)
    z.mul_(0)
    with pytest.raises(EffectError, match="modified by an inplace operation"):
        z.sum().backward()


def test_arguments_and_results_of_any_kind():
    class Box:
        def __init__(self, x):
            self.x = x

    @tr.checkpoint
    def f(box, by_key):
        return Box(box.x.sin().exp() * by_key[None])

    x = leaf(3)
    f(Box(x), {None: x}).x.sum().backward()
    expected = torch.autograd.grad((x.sin().exp() * x).sum(), x)[0]
    assert torch.equal(x.grad, expected)


def test_autocast():
    layer = nn.Linear(8, 8)

    def f(x):
        y = layer(x).relu()
        return y @ y.T if y.sum() > -1 else y

    def run(f):
        x = torch.linspace(0, 1, 64).view(8, 8).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = f(x)
        grads = torch.autograd.grad(y.float().sum(), [x, *layer.parameters()])
        return y, *grads

    assert all(map(torch.equal, run(tr.checkpoint(f)), run(f)))


def test_a_checkpoint_inside_is_a_part_of_it():
    inner = tr.checkpoint(torch.sin, policy="none")

    def f(x):
        y = torch.utils.checkpoint.checkpoint(torch.exp, inner(x), use_reentrant=False)
        return y.cos() * y.sum().item()

    x = leaf(100)
    f_ours = tr.checkpoint(f)
    with pytest.warns(tr.errors.OverrideWarning):
        f_ours(x)
    with LiveBytes() as live:
        y = f_ours(x)
    assert live.live == 800
    (ours,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(ours, torch.autograd.grad(f(x).sum(), x)[0])


def test_one_note_says_why_and_where(caplog):
    def with_branch(x):
        return x.sin() if x.sum() > 0 else x.cos()

    f = tr.checkpoint(with_branch)
    with caplog.at_level("WARNING", "torchremat"):
        f(leaf(3))
        f(leaf(4))
        tr.checkpoint(with_branch)(leaf(3))
    (record,) = caplog.records
    assert "with_branch cannot be one graph (ConcretizationError" in record.getMessage()
    assert "test_tape.py:" in record.getMessage()


def test_an_error_of_the_function_reaches_the_user():
    def f(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tr.checkpoint(f)(leaf(3))


def test_a_policy_that_fails_is_an_error():
    with pytest.raises(PolicyError, match="verdict|answered"):
        tr.checkpoint(branch, policy=lambda op, *avals, **params: 3)(leaf(3))


def test_untraceable_as_an_error(monkeypatch):
    monkeypatch.setattr(tr.config, "untraceable", "error")
    with pytest.raises(ConcretizationError, match="test_tape.py"):
        tr.checkpoint(branch)(leaf(3))
    monkeypatch.setattr(tr.config, "untraceable", "graph")
    with pytest.raises(ArgumentValueError, match="'tape' or 'error'"):
        tr.checkpoint(branch)(leaf(3))


class Tower(nn.Module):
    """Layers with a product whose second factor needs no gradient, so that nobody unpacks it."""

    def __init__(self, layers=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x).tanh()
            x = (y.exp() * y.detach().cos()).sin() + x if y.sum() < 1e6 else x
        return x


@pytest.mark.parametrize("policy", ["none", "full", "dots", "ops:aten.exp", "ops:aten.tanh"])
def test_memory_is_freed_as_the_backward_pass_goes_on(no_collector, policy):
    """At its end nothing is alive but gradients, as in plain PyTorch."""

    def at_the_end(model):
        seen = []
        x = torch.randn(64, 32, requires_grad=True)
        x.register_hook(lambda _: seen.append(live.live))
        with LiveBytes() as live:
            model(x).sum().backward()
        return seen

    model = Tower()
    plain = at_the_end(model)
    model.zero_grad()
    tr.nn.wrap(model, policy)
    assert at_the_end(model) == plain


@pytest.mark.parametrize("policy", ["none", "full", "dots"])
def test_a_result_that_is_dropped_is_freed_with_all_that_is_saved(no_collector, policy):
    """Autograd saves results of nodes: they must not keep the nodes alive that save them."""
    model = tr.nn.wrap(Tower(), policy)
    model(torch.randn(64, 32))
    with LiveBytes() as live:
        model(torch.randn(64, 32))
    assert live.live == 0


def test_each_method_has_its_object():
    class Layer:
        def __init__(self, scale):
            self.scale = torch.tensor(scale, requires_grad=True)

        @tr.checkpoint
        def __call__(self, x):
            return x * self.scale if x.sum() > -100 else x

    x = leaf(3)
    for layer in (Layer(1.0), Layer(2.0)):
        for _ in range(2):
            layer(x).sum().backward()
        assert torch.allclose(layer.scale.grad.double(), 2 * x.detach().sum())


def test_collected(no_collector):
    """Neither the function nor its object is kept alive."""

    def make():
        model = nn.Linear(3, 3)
        return tr.checkpoint(lambda x: model(x) if x.sum() < 100 else x), weakref.ref(model)

    f, ref = make()
    f(torch.ones(2, 3)).sum().backward()
    del f
    gc.collect()
    assert ref() is None
