"""State: what a function writes to is written once a step, as in plain PyTorch, or it is refused.

Every case is run for three steps beside plain PyTorch: outputs, gradients, parameters, buffers and
the state of the generator are equal to the bit.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchremat as tr
from tests.helpers import assert_same, nothing_left_behind
from torchremat.errors import ConcretizationError, EffectError

POLICIES = [None, "dots", "none"]
WAYS = {
    "checkpoint": lambda net, policy: tr.checkpoint(net, policy=policy),
    "wrap": lambda net, policy: tr.nn.wrap(net, policy),
}


class Net(nn.Module):
    """A linear layer, buffers and a `forward` of the test's own."""

    def __init__(self, forward: Callable[..., Tensor], buffers: dict[str, Tensor]) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.run = forward
        for name, value in buffers.items():
            self.register_buffer(name, value.clone())

    def forward(self, x):
        return self.run(self, x)


def step(fun: Callable[..., Any], net: nn.Module, number: int) -> dict[str, Any]:
    """One training step, and all that can differ after it."""
    torch.manual_seed(number)
    net.zero_grad()
    x = torch.randn(4, 3, requires_grad=True)
    out = fun(x)
    out.square().sum().backward()
    with torch.no_grad():
        for p in net.parameters():
            p.sub_(0.01 * p.grad)
    return {
        "out": out.detach(),
        "input": x.grad,
        "gradients": [p.grad.clone() for p in net.parameters()],
        "parameters": [p.detach().clone() for p in net.parameters()],
        "buffers": {name: b.clone() for name, b in net.named_buffers()},
        "generator": torch.get_rng_state(),
    }


def check(make: Callable[[], nn.Module], way: str, policy: Any) -> None:
    found = []
    for prepare in (lambda net: net, lambda net: WAYS[way](net, policy)):
        torch.manual_seed(0)
        net = make()
        fun = prepare(net)
        found.append([step(fun, net, number) for number in range(3)])
    assert_same(*found, f"{way} {policy}")


# --- buffers -------------------------------------------------------------------------------------


def counted(net, x):
    net.a += 1
    return net.lin(x) * net.a


def average(net, x):
    y = net.lin(x)
    net.a.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return y - net.a


def average_without_grad(net, x):
    y = net.lin(x)
    with torch.no_grad():
        net.a.lerp_(y.mean(0), 0.1)
    return y * net.a.detach().clone()


def ring(net, x):
    y = net.lin(x)
    net.a.index_copy_(0, net.i.view(1), y.detach().mean(0, keepdim=True))
    net.i.add_(1).remainder_(4)
    return y + net.a.mean(0)


def load_of_experts(net, x):
    y = net.lin(x)
    net.a.scatter_add_(0, y.argmax(-1), torch.ones(4))
    return y


def scratch(net, x):
    net.a.zero_()
    net.a.add_(x.detach())
    return net.lin(net.a.clone()) + x


def written_as_out(net, x):
    torch.add(x.detach(), 1, out=net.a)
    return net.lin(x) + net.a


def through_views(net, x):
    net.a[:, :2].copy_(x.detach()[:, :2])
    net.a.t()[2].fill_(3)
    return net.lin(x) + net.a


def drawn(net, x):
    net.a.uniform_()
    return F.dropout(net.lin(x), 0.5) * net.a


def through_data(net, x):
    net.a.data.mul_(0.5).add_(1)
    return net.lin(x) * net.a


ROW, MATRIX = torch.ones(3), torch.ones(4, 3)
BUFFERS = {
    "counter": (counted, {"a": torch.zeros((), dtype=torch.long)}),
    "moving average": (average, {"a": ROW}),
    "moving average under no_grad": (average_without_grad, {"a": ROW}),
    "ring": (ring, {"a": MATRIX, "i": torch.zeros((), dtype=torch.long)}),
    "load of experts": (load_of_experts, {"a": ROW}),
    "scratch": (scratch, {"a": MATRIX}),
    "out=": (written_as_out, {"a": MATRIX}),
    "through views": (through_views, {"a": MATRIX}),
    "random numbers": (drawn, {"a": ROW}),
    "through data": (through_data, {"a": ROW}),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_is_written_once_a_step(name, way, policy):
    forward, buffers = BUFFERS[name]
    check(lambda: Net(forward, buffers), way, policy)


NORMS = {
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
    "batch norm twice": lambda: (lambda norm: nn.Sequential(norm, nn.Linear(3, 3), norm))(
        nn.BatchNorm1d(3)
    ),
    "instance norm": lambda: nn.Sequential(
        nn.Linear(3, 3), nn.Unflatten(0, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True)
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics(name, way, policy):
    check(NORMS[name], way, policy)


@pytest.mark.usefixtures("no_tapes")
def test_a_cumulative_average_asks_for_a_value():
    """PyTorch reads the count as a Python number, in each of its own traces too."""
    net = nn.BatchNorm1d(3, momentum=None)
    with nothing_left_behind(), pytest.raises(ConcretizationError, match="value of a traced"):
        tr.checkpoint(net)(torch.randn(4, 3, requires_grad=True))
    assert net.num_batches_tracked in (0, 1)


def test_tied_buffers():
    def forward(net, x):
        net.a.add_(1)
        return net.lin(x) * net.b

    def make():
        net = Net(forward, {"a": ROW})
        net.b = net.a
        return net

    for way in WAYS:
        check(make, way, None)


@pytest.mark.parametrize("set_in", ["the forward", "the loop"])
def test_a_buffer_set_anew(set_in):
    """Between calls the new one is read; in the forward pass it is set at each call."""

    def forward(net, x):
        if set_in == "the forward":
            net.a = net.a + 1
        return net.lin(x) * net.a

    net = Net(forward, {"a": ROW})
    fun = tr.checkpoint(net)
    x = torch.ones(2, 3, requires_grad=True)
    if set_in == "the forward":
        for number in range(1, 4):
            assert_same(fun(x), net.lin(x) * (ROW + number))
            assert_same(net.a, ROW + number)
        return
    for number in range(3):
        net.a = torch.full((3,), float(number))
        assert_same(fun(x), net(x))


REFUSED = {
    "resize_": lambda net, x: net.lin(net.a.resize_(4, 3).copy_(x.detach())),
    "t_": lambda net, x: net.lin(x) * net.a.t_().sum(),
    "data set": lambda net, x: setattr(net.a, "data", net.a * 2) or net.lin(x) * net.a.sum(),
}


def net_that_changes_a_layout(name):
    return Net(REFUSED[name], {"a": torch.zeros(0) if name == "resize_" else torch.ones(3, 3)})


@pytest.mark.usefixtures("no_tapes")
@pytest.mark.parametrize("name", REFUSED)
def test_another_layout_in_place_is_refused(name):
    fun = tr.checkpoint(net_that_changes_a_layout(name))
    with pytest.raises(EffectError, match="in place|other memory"):
        fun(torch.randn(4, 3, requires_grad=True))


def clamp_weight(net, x):
    with torch.no_grad():
        net.lin.weight.clamp_(-0.1, 0.1)
    return net.lin(x).exp().sin()


ON_A_TAPE = {
    **{name: lambda name=name: net_that_changes_a_layout(name) for name in REFUSED},
    "clamped": lambda: Net(clamp_weight, {}),
    "average": lambda: nn.Sequential(nn.BatchNorm1d(3, momentum=None), nn.Tanh(), nn.Linear(3, 3)),
}


@pytest.mark.parametrize("policy", ["full", "dots"])
@pytest.mark.parametrize("name", ON_A_TAPE)
def test_on_a_tape_it_is_as_in_plain_pytorch(name, policy):
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        net = ON_A_TAPE[name]()
        fun = tr.checkpoint(net, policy=policy) if ours else net
        x = torch.randn(4, 3, requires_grad=True)
        for _ in range(3):
            fun(x).square().sum().backward()
        grads = [x.grad, *(p.grad for p in net.parameters())]
        results.append([*grads, *net.state_dict().values()])
    assert_same(*results)


@pytest.mark.usefixtures("no_tapes")
def test_a_parameter_changed_under_no_grad_in_the_forward_is_refused():
    net = Net(clamp_weight, {})
    before = net.lin.weight.detach().clone()
    with nothing_left_behind(), pytest.raises(EffectError, match="writes in place.*test_state.py"):
        tr.checkpoint(net)(torch.randn(4, 3, requires_grad=True))
    assert_same(net.lin.weight.detach(), before)


# --- caches --------------------------------------------------------------------------------------


class Cached(nn.Module):
    """Attention over a preallocated cache, written at positions that are an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x, keys, values, position):
        q, k, v = self.qkv(x).chunk(3, -1)
        keys.index_copy_(1, position, k.detach())
        values.index_copy_(1, position, v.detach())
        mask = torch.arange(keys.shape[1]) <= position[:, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask) + v


def generate(fun: Callable[..., Tensor], net: nn.Module, cache: list[Tensor]) -> list[Any]:
    found: list[Any] = []
    for number in range(3):
        net.zero_grad()
        position = torch.tensor([2 * number, 2 * number + 1])
        torch.manual_seed(number)
        out = fun(torch.randn(2, 2, 4), *cache, position)
        # plain autograd keeps the cache itself: backward before the next write
        out.square().sum().backward()
        grads = [p.grad.clone() for p in net.parameters()]
        found.append((out.detach(), grads, [c.clone() for c in cache]))
    return found


CACHES = {
    "apart": lambda: [torch.zeros(2, 8, 4), torch.zeros(2, 8, 4)],
    "halves of one": lambda: list(torch.zeros(2, 2, 8, 4)),
    "interleaved in one": lambda: list(torch.zeros(2, 2, 8, 4).unbind(1)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_of_keys_and_values(name, policy):
    torch.manual_seed(0)
    net = Cached()
    expected = generate(net, net, CACHES[name]())
    found = generate(tr.checkpoint(net, policy=policy), net, CACHES[name]())
    assert_same(expected, found)


def test_a_cache_that_is_closed_over_and_one_in_a_list():
    results = []
    for wrap in (lambda f: f, tr.checkpoint):
        torch.manual_seed(0)
        w = torch.randn(3, 3, requires_grad=True)
        closed, caches, steps = torch.zeros(4, 3), [torch.zeros(4, 3)], []

        def forward(x, at, w=w, closed=closed, caches=caches):
            y = x @ w
            closed.index_copy_(0, at, y.detach())
            caches[0].index_add_(0, at, y.detach())
            return (y + closed[:1] + caches[0].sum(0)).sin()

        fun = wrap(forward)
        for number in range(3):
            out = fun(torch.ones(1, 3), torch.tensor([number]))
            steps.append((out.detach(), torch.autograd.grad(out.sum(), w)))
            steps.append((closed.clone(), caches[0].clone()))
        results.append(steps)
    assert_same(*results)


@pytest.mark.parametrize("policy", ["plain", *POLICIES])
def test_a_cache_written_again_before_backward_raises_or_does_not_matter(policy):
    """A derivative that reads the cache reads the cache itself, as in plain PyTorch."""

    def read_by_derivative(x, cache):
        cache.add_(1)
        return (x * cache).sin()

    def read_before(x, cache):
        cache.add_(1)
        return (x * cache.exp()).sin()

    def run(forward):
        x, cache = torch.ones(3, requires_grad=True), torch.zeros(3)
        fun = forward if policy == "plain" else tr.checkpoint(forward, policy=policy)
        out = fun(x, cache)
        cache.add_(1)
        return torch.autograd.grad(out.sum(), x)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(read_by_derivative)
    e = torch.ones(3).exp()
    assert_same(run(read_before), (e.cos() * e,))


@pytest.mark.parametrize("write_to_result", [False, True])
def test_a_written_argument_that_is_returned_is_the_argument(write_to_result):
    def forward(x, cache):
        cache.add_(x.detach())
        return x * 2, cache

    cache = torch.zeros(3, 3)
    _, result = tr.checkpoint(forward)(torch.ones(3, 3, requires_grad=True), cache)
    written, other = (result, cache) if write_to_result else (cache, result)
    written.fill_(7)
    assert_same(other, torch.full((3, 3), 7.0))


VIEWS = {
    "a part": lambda c: c[0],
    "a transpose": lambda c: c.t(),
    "all in a row": lambda c: c.view(-1),
    "a part of a split": lambda c: c.split(1)[2],
    "twice a view": lambda c: c[1:].t()[0],
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_written_argument(name, inside):
    def forward(x, cache):
        cache.add_(x.detach())
        return x * 2, VIEWS[name](cache)

    fun = tr.checkpoint(forward)
    if inside:
        fun = tr.checkpoint(lambda x, cache, inner=fun: inner(x.sin(), cache))
    for size in (3, 3, 4, 5):  # of fixed sizes, and of such that vary
        x, cache = torch.ones(3, size, requires_grad=True), torch.zeros(3, size)
        value, part = fun(x, cache)
        value.sum().backward()
        assert_same(part, VIEWS[name](cache))
        cache.zero_()
        assert_same(part, VIEWS[name](torch.zeros(3, size)))
        part.fill_(1)
        assert_same(VIEWS[name](cache), part)


# --- memory that is shared -----------------------------------------------------------------------


def write_first(x, y, w):
    x.add_(1)
    return y * 2 * w


SHARED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "the same tensor": lambda t: (t, t),
    "views of the same": lambda t: (t[:], t[:]),
    "a part and the whole": lambda t: (t[0], t),
    "parts that overlap": lambda t: (t[:2], t[1:]),
    "a transpose": lambda t: (t, t.t()),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SHARED)
def test_a_write_that_another_input_shows_is_right_or_refused(name, policy):
    results = []
    for fun in (write_first, tr.checkpoint(write_first, policy=policy)):
        base, w = torch.arange(9.0).view(3, 3), torch.ones(3, requires_grad=True)
        try:
            out = fun(*SHARED[name](base), w)
        except EffectError as error:
            assert "shares memory" in str(error)
            assert_same(base, torch.arange(9.0).view(3, 3))
            return
        results.append((out.detach(), torch.autograd.grad(out.sum(), w), base))
    assert_same(*results)


def test_a_write_to_a_closed_over_tensor_that_an_argument_shows_is_right_or_refused():
    results = []
    for wrap in (lambda f: f, tr.checkpoint):
        buffer, w = torch.zeros(3), torch.ones(2, requires_grad=True)

        def forward(x, w, buffer=buffer):
            buffer.add_(1)
            return x * w

        try:
            results.append(wrap(forward)(buffer[:2], w).detach())
        except EffectError as error:
            assert "shares memory" in str(error)
            return
    assert_same(*results)


def test_a_write_to_a_buffer_that_another_buffer_is_a_view_of_is_right_or_refused():
    def forward(net, x):
        net.a.add_(1)
        return net.lin(x) * net.b

    def make():
        net = Net(forward, {"a": ROW})
        net.register_buffer("b", net.a.view(3))
        return net

    try:
        check(make, "checkpoint", None)
    except EffectError as error:
        assert "shares memory" in str(error)


PARTS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "rows": lambda t: (t[:2], t[2:]),
    "columns": lambda t: (t[:, :1], t[:, 1:2]),
    "interleaved": lambda t: (t.view(-1)[::2], t.view(-1)[1::2]),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_do_not_overlap_may_be_written(name):
    def forward(x, y, w):
        return write_first(x, y, w)

    results = []
    for fun in (forward, tr.checkpoint(forward)):
        base, w = torch.arange(12.0).view(4, 3), torch.ones((), requires_grad=True)
        out = fun(*PARTS[name](base), w)
        results.append((out.detach(), torch.autograd.grad(out.sum(), w), base))
    assert_same(*results)


def test_a_write_to_a_transposed_argument_of_several_sizes():
    def forward(x, w):
        x.add_(1)
        return x * w

    fun = tr.checkpoint(forward)
    w = torch.ones((), requires_grad=True)
    for size in (4, 5, 6):
        results = []
        for f in (forward, fun):
            base = torch.arange(3.0 * size).view(size, 3)
            out = f(base.t(), w)
            results.append((out.detach(), torch.autograd.grad(out.sum(), w), base))
        assert_same(*results)


# --- changed between forward and backward --------------------------------------------------------


@pytest.mark.parametrize("policy", [None, "none"])
@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_an_optimizer_changed_before_backward_raises(way, policy):
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    fun = WAYS[way](net, policy)
    x = torch.randn(2, 3)
    fun(x).sum().backward()
    out = fun(x)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    with nothing_left_behind(), pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()
    net.zero_grad()
    fun(x).sum().backward()  # usable again


@pytest.mark.parametrize("policy", [None, "none"])
def test_a_buffer_changed_before_backward_raises(policy):
    net = Net(lambda net, x: net.lin(x) * net.a, {"a": ROW})
    out = tr.checkpoint(net, policy=policy)(torch.ones(2, 3))
    net.a.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_weight_changed_and_changed_back_raises_all_the_same():
    w = torch.ones(3, requires_grad=True)
    out = tr.checkpoint(lambda x: (x * w).sin())(torch.ones(3, requires_grad=True))
    with torch.no_grad():
        w.mul_(2).div_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_weights_loaded_between_steps():
    results = []
    for wrap in (lambda net: net, tr.checkpoint, tr.nn.wrap):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        fun, steps = wrap(net), []
        for number in range(4):
            state = net.state_dict()
            halved = {k: v * 0.5 if v.is_floating_point() else v for k, v in state.items()}
            if number:
                net.load_state_dict(halved, assign=number == 2)
            if number == 3:
                net[0].weight.data = torch.eye(3)
            steps.append(step(fun, net, number))
        results.append(steps)
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])
