"""What is alive during a step and after it, without a run of the garbage collector."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import torchremat as tr
from tests.helpers import assert_same, leaves_of
from torchremat.measure import LiveBytes
from torchremat.nn import wrap

DEPTH, WIDTH = 6, 64
SIZE = WIDTH * WIDTH * 8
"""The bytes of one value."""

D = torch.double
POLICIES = ["full", "none"]

pytestmark = pytest.mark.usefixtures("no_collector")


class Timeline(LiveBytes):
    """Notes how many values are alive after each operator, in sizes."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.counts.append(self.live // SIZE)
        return out


def matrix():
    return torch.randn(WIDTH, WIDTH, dtype=D, requires_grad=True)


def chain(x):
    for _ in range(DEPTH):
        x = x.sin()
    return x


def counts_of(fun, x):
    """How many values are alive after the forward, and after each operator of the backward."""
    fun(x).sum().backward()  # what is traced is not counted
    x.grad = None
    with Timeline() as memory:
        loss = fun(x).sum()
        held = memory.live // SIZE
        memory.counts.clear()
        loss.backward()
    return held, memory.counts


# --- during the backward -------------------------------------------------------------------------


def test_saved_values_are_freed_one_by_one():
    """As in plain PyTorch, where each value has an operator of its own that frees it."""
    held, counts = counts_of(tr.checkpoint(chain, policy="none"), matrix())
    plain_held, plain_counts = counts_of(chain, matrix())
    assert held == plain_held == DEPTH - 1  # and the input, which was there before
    assert max(counts) <= max(plain_counts)
    # each sine has two operators in the backward: the cosine, and the product with the cotangent
    products = counts[-1 : -2 * DEPTH : -2]
    assert products == sorted(products)
    assert products[0] == 1  # the gradient
    assert len(set(products)) >= DEPTH - 1


def test_recomputed_values_are_freed_one_by_one():
    held, counts = counts_of(tr.checkpoint(chain), matrix())
    assert held == 0
    most = max(counts)
    assert most <= DEPTH + 2
    after = counts[counts.index(most) :]
    assert after[-1] == 1
    assert len(set(after)) >= DEPTH - 1


def test_values_of_one_layer_are_alive_at_a_time():
    layers = 5

    def model(x):
        for _ in range(layers):
            x = tr.checkpoint(chain)(x)
        return x

    held, counts = counts_of(model, matrix())
    assert held == layers - 1
    assert max(counts) <= layers - 1 + DEPTH + 2
    assert counts[-1] == 1
    # a layer whose backward has run holds nothing any more
    share = len(counts) // layers
    peaks = [max(counts[i * share : (i + 1) * share]) for i in range(layers)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] - peaks[-1] >= layers - 2


def test_a_value_kept_by_name_is_freed_before_the_end():
    def body(x):
        for i in range(4):
            x = tr.checkpoint_name(chain(x), f"part{i}")
        return x

    held, counts = counts_of(tr.checkpoint(body, policy="names:part0,part1,part2"), matrix())
    assert held == 3
    assert max(counts) <= 3 + DEPTH + 2
    assert counts[-1] == 1


def test_the_cotangent_is_freed():
    """That of the output is not needed once the last operator's backward has read it."""
    _, counts = counts_of(tr.checkpoint(lambda x: (x * 2).sin() * 3), matrix())
    _, plain = counts_of(lambda x: (x * 2).sin() * 3, matrix())
    assert max(counts) <= max(plain) + 1  # x * 2, which plain PyTorch has kept


# --- after the backward --------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

    def forward(self, x):
        return self.fc2(self.dropout(F.gelu(self.fc1(self.norm(x)))))


def net(policy):
    return wrap(Net().double(), policy)


def nested(policy):
    inner = tr.checkpoint(lambda x: x.sin().exp().cos(), policy=policy)
    return tr.checkpoint(lambda x: inner(inner(x).tanh()) * 2, policy=policy)


FUNCTIONS = {
    "chain": lambda policy: tr.checkpoint(chain, policy=policy),
    "net": net,
    "nested": nested,
    "views": lambda policy: tr.checkpoint(lambda x: x.sin().t().chunk(2)[0].exp(), policy=policy),
}


def first(fun, x):
    return torch.autograd.grad(fun(x).sum(), x)


def accumulated(fun, x):
    (fun(x).sum() + fun(x * 2).sum()).backward()
    found, x.grad = x.grad, None
    if isinstance(fun, nn.Module):
        fun.zero_grad()
    return found


def second(fun, x):
    (g,) = torch.autograd.grad(fun(x).sum(), x, create_graph=True)
    return g, torch.autograd.grad(g.sin().sum(), x, allow_unused=True)


def retained(fun, x):
    y = fun(x).sum()
    return [torch.autograd.grad(y, x, retain_graph=True) for _ in range(3)]


def forward_only(fun, x):
    return fun(x)


def without_grad(fun, x):
    with torch.no_grad():
        return fun(x)


def forward_mode(fun, x):
    return torch.func.jvp(fun, (x.detach(),), (x.detach(),))


def functional(fun, x):
    return torch.func.grad(lambda x: fun(x).sum())(x.detach())


def twice_functional(fun, x):
    return functional(lambda x: torch.func.grad(lambda x: fun(x).sum())(x).sin(), x)


def interrupted(fun, x):
    """A hook raises in the middle of the backward pass."""

    def hook(grad):
        raise ZeroDivisionError

    y = x * 2
    y.register_hook(hook)
    try:
        fun(y).sum().backward()
    except ZeroDivisionError:
        return None
    raise AssertionError("the hook did not run")


USES = [
    first,
    accumulated,
    second,
    retained,
    forward_only,
    without_grad,
    forward_mode,
    functional,
    twice_functional,
    interrupted,
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.sampled(3)
def test_nothing_is_left_of_a_step(use, function, policy):
    if function == "net" and use in (second, forward_mode, functional, twice_functional):
        pytest.skip("torch.func refuses its writes, and a mask is not drawn twice")
    fun, x = FUNCTIONS[function](policy), matrix()
    use(fun, x)
    memory = LiveBytes()
    for _ in range(3):
        with memory:
            result = use(fun, x)
        if use not in (forward_only, second):  # whose results autograd's graph hangs on
            assert memory.live <= sum(t.untyped_storage().nbytes() for t in leaves_of(result))
        del result
        assert memory.live == 0


def test_retained_graphs_keep_what_is_saved_only():
    x = matrix()
    fun = tr.checkpoint(chain)
    fun(x)
    with LiveBytes() as memory:
        loss = fun(x).sum()
        held = memory.live
        for _ in range(3):
            torch.autograd.grad(loss, x, retain_graph=True)
            assert memory.live == held
    del loss
    assert memory.live == 0


def test_what_a_function_returns_beside_lives_no_longer_than_its_readers():
    """A value that is both kept and returned is one tensor; dropped, the backward keeps it."""

    def body(x):
        y = x.sin()
        return y, y.exp()

    fun, x = tr.checkpoint(body, policy="none"), matrix()
    fun(x)
    with LiveBytes() as memory:
        y, z = fun(x)
        assert memory.live == 2 * SIZE
        del y
        loss = z.sum()
        del z
        assert SIZE <= memory.live <= 2 * SIZE + 8
        (grad,) = torch.autograd.grad(loss, x)
        del loss
    assert memory.live == SIZE
    assert_same(grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


# --- many steps, and dropped functions -----------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("select", [None, "*"])
def test_steps_do_not_grow(policy, select):
    model = wrap(Net().double(), policy, select=select)
    optimizer = torch.optim.AdamW(model.parameters())
    x = matrix()

    def step():
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()

    with LiveBytes() as memory:
        counts = []
        for _ in range(4):
            for _ in range(2):
                step()
            live = memory.live
            gc.collect()
            counts.append((live, memory.live, len(gc.get_objects())))
    assert counts[1][:2] == counts[2][:2] == counts[3][:2]
    assert counts[1][0] == counts[1][1], "garbage that only the collector freed"
    assert abs(counts[3][2] - counts[1][2]) < 20


def graphs_alive():
    gc.collect()
    gc.collect()  # what ran inside another is found once that is gone
    return sum(issubclass(type(o), fx.GraphModule) for o in gc.get_objects())


@pytest.mark.parametrize("use", [first, second, functional], ids=lambda use: use.__name__)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.sampled(3)
def test_a_dropped_function_frees_its_graphs(function, use):
    if function == "net" and use in (second, functional):
        pytest.skip("torch.func refuses its writes, and a mask is not drawn twice")
    counts = []
    for _ in range(3):  # the first leaves the traces of functions of this file, which live on
        for policy in POLICIES:
            fun, x = FUNCTIONS[function](policy), matrix()
            use(fun, x)
            del fun
        counts.append(graphs_alive())
    assert counts[0] == counts[1] == counts[2]


def test_traces_that_no_longer_hold_are_no_leak_of_tensors():
    """A weight that was replaced is freed, though a trace was made of it."""
    model = wrap(Net().double())
    x = matrix()
    model(x).sum().backward()
    weight = weakref.ref(model.fc1.weight)
    model.fc1.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=D))
    model(x).sum().backward()
    gc.collect()
    assert weight() is None
