"""Objects of any class that a function makes, or had before, among its results."""

import copy
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import torchremat as tr

CLOSED_OVER = SimpleNamespace(unit="metre")


class Entry:
    def __init__(self, keys, length):
        self.keys = keys
        self.length = length
        self.device = keys.device


class Cache:
    """As the caches of language models are: objects in a list, which grow by each call."""

    def __init__(self):
        self.entries = []
        self.kind = Entry
        self.offloads = False

    def add(self, keys):
        self.entries.append(Entry(keys, len(keys)))
        return keys


class Slotted:
    __slots__ = ("__weakref__", "mean", "rest")

    def __init__(self, mean, rest=None):
        self.mean = mean
        if rest is not None:
            self.rest = rest


class WithFinalizer:
    def __init__(self, x):
        self.x = x

    def __del__(self):
        pass


class CopiedItsOwnWay(Entry):
    def __reduce__(self):
        return Entry, (self.keys, self.length)


class Node:
    def __init__(self, x):
        self.x = x
        self.parent = self


@dataclass
class Output:
    x: Tensor
    cache: Cache


def make_cache(lin, x):
    cache = Cache()
    for _ in range(3):
        x = cache.add(lin(x).tanh())
    return x, cache


MADE = {
    "a cache": make_cache,
    "slots": lambda lin, x: Slotted(lin(x).sin(), [Slotted(lin(x).cos(), "text")]),
    "an empty slot": lambda lin, x: (Slotted(lin(x).sin()), x),
    "in a dict in a dataclass": lambda lin, x: {"out": Output(*make_cache(lin, x))},
    "a distribution": lambda lin, x: Normal(lin(x), lin(x).exp(), validate_args=False),
    "one of the closure": lambda lin, x: SimpleNamespace(x=lin(x), of=CLOSED_OVER, lin=lin),
}
REFUSED = {
    "finalizer": lambda lin, x: WithFinalizer(lin(x).sin()),
    "copied its own way": lambda lin, x: CopiedItsOwnWay(lin(x).sin(), 1),
    "leads to itself": lambda lin, x: Node(lin(x).sin()),
    "a set in it": lambda lin, x: Slotted(lin(x).sin(), {1}),
    "twice": lambda lin, x: (entry := Entry(lin(x).sin(), 1), entry),
    "without tensors": lambda lin, x: (lin(x).sin(), SimpleNamespace(of="x")),
}


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(4, 4)
        self.function = function

    def forward(self, *args):
        return self.function(self.lin, *args)


def take_apart(value):
    """The tensors in a value, and the rest of it as a text."""
    tensors = []

    def tell(value):
        if isinstance(value, Tensor):
            tensors.append(value)
            return "tensor"
        if isinstance(value, list | tuple):
            return [type(value), *map(tell, value)]
        if isinstance(value, dict):
            return [(key, tell(item)) for key, item in value.items()]
        if isinstance(value, nn.Module):
            return "module"
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        is_object = isinstance(value, SimpleNamespace) or type(value).__flags__ & 1 << 9
        if is_object and names and not isinstance(value, type):
            attributes = {n: getattr(value, n) for n in names if hasattr(value, n)}
            return type(value), tell({n: v for n, v in attributes.items() if n[:2] != "__"})
        return value

    return tell(value), tensors


def train(model):
    found = []
    for step in range(3):
        torch.manual_seed(step)
        model.zero_grad()
        told, tensors = take_apart(model(torch.randn(2, 4)))
        torch.stack([(t * t).sum() for t in tensors]).sum().backward()
        found.append((told, [t.detach() for t in tensors], [p.grad for p in model.parameters()]))
    return found


@pytest.mark.filterwarnings("ignore:.*cannot be one graph")
@pytest.mark.parametrize("policy", ["full", "none", "dots"])
@pytest.mark.parametrize("name", [*MADE, *(n for n in REFUSED if n != "leads to itself")])
def test_results_are_those_of_plain_pytorch(name, policy):
    function = {**MADE, **REFUSED}[name]
    expected, wrapped = train(Model(function)), tr.nn.wrap(Model(function), policy)
    found = train(wrapped)
    for (told, *tensors), (our_told, *our_tensors) in zip(expected, found, strict=True):
        assert our_told == told
        torch.testing.assert_close(our_tensors, tensors, rtol=0, atol=0)


@pytest.mark.parametrize("name", MADE)
def test_they_are_made_anew_by_one_graph(name):
    wrapped = tr.nn.wrap(Model(MADE[name]))
    first, second = wrapped(torch.ones(2, 4)), wrapped(torch.ones(2, 4))
    assert first is not second
    report = tr.nn.report(wrapped)
    assert (report.traces, {row.way for row in report}) == (1, {"graph"})


@pytest.mark.filterwarnings("ignore:.*cannot be one graph")
@pytest.mark.parametrize("name", REFUSED)
def test_others_are_left_to_a_tape(name):
    wrapped = tr.nn.wrap(Model(REFUSED[name]))
    wrapped(torch.ones(2, 4))
    assert {row.way for row in tr.nn.report(wrapped)} == {"tape"}


def test_a_lazy_attribute_of_a_distribution():
    wrapped = tr.nn.wrap(Model(MADE["a distribution"]))
    torch.manual_seed(0)
    found = wrapped(torch.ones(2, 4)).rsample()
    torch.manual_seed(0)
    expected = MADE["a distribution"](wrapped.lin, torch.ones(2, 4)).rsample()
    assert torch.equal(found, expected)


class Keeps(nn.Module):
    """Returns what it keeps, and what it had."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.kept, self.had, self.config = [], {"a": [1]}, SimpleNamespace(width=4)

    def forward(self, x):
        entry = Entry(self.lin(x).sin(), 2)
        self.last = entry
        self.kept.append(entry)
        self.had["x"] = entry.keys
        self.sizes = [1, 2]
        return entry, self.kept, self.had, (self.had["a"], self.config), self, self.sizes


def test_an_object_that_is_kept_too_is_one_object():
    wrapped = tr.nn.wrap(Keeps())
    for step in range(3):
        x = torch.randn(2, 4)
        entry, kept, had, (a, config), itself, sizes = wrapped(x)
        assert entry is wrapped.last
        assert entry is wrapped.kept[-1]
        assert kept is wrapped.kept
        assert len(kept) == step + 1
        assert had is wrapped.had
        assert a is wrapped.had["a"]
        assert config is wrapped.config
        assert itself is wrapped
        assert sizes == wrapped.sizes
        assert torch.equal(entry.keys, wrapped.lin(x).sin())
        wrapped.zero_grad()
        had["x"].sum().backward()
        assert wrapped.lin.weight.grad is not None
    assert {row.way for row in tr.nn.report(wrapped)} == {"graph"}


def test_another_object_in_its_place_is_returned():
    model = Keeps()
    wrapped = tr.nn.wrap(model)
    wrapped(torch.ones(2, 4))
    model.config = SimpleNamespace(width=4)
    model.kept = []
    _, kept, _, (_, config), *_ = wrapped(torch.ones(2, 4))
    assert kept is model.kept
    assert len(kept) == 1
    assert config is model.config


def test_a_cache_that_is_passed_grows():
    def function(lin, x, cache=None):
        cache = Cache() if cache is None else cache
        return cache.add(lin(x).tanh()), cache

    model = Model(function)
    wrapped = tr.nn.wrap(copy.deepcopy(model), "full")
    cache, our_cache = Cache(), Cache()
    for step in range(3):
        x = torch.full((2, 4), float(step))
        y, returned = model(x, cache)
        our_y, our_returned = wrapped(x, our_cache)
        assert returned is cache
        assert our_returned is our_cache
        assert torch.equal(y, our_y)
        assert [e.length for e in our_cache.entries] == [e.length for e in cache.entries]
    sum(e.keys.sum() for e in cache.entries).backward()
    sum(e.keys.sum() for e in our_cache.entries).backward()
    torch.testing.assert_close(wrapped.lin.weight.grad, model.lin.weight.grad, rtol=0, atol=0)


def test_graphs_and_reports_see_the_tensors():
    def function(x):
        cache = Cache()
        cache.add((x * 2).sin())
        return cache

    x = torch.randn(4)
    graph = tr.make_graph(function)(x)
    assert str(graph.out_avals[0]) == "f32[4]"
    assert tr.estimate(function, x).peak_bytes > 0
    assert "nothing_saveable" in str(tr.compare(function, x, policies=["none", "full"]))


@pytest.mark.parametrize("reads", [True, False])
def test_sizes_are_sizes(reads):
    fun = tr.checkpoint(
        lambda x, size: (x.sin() * (size.numel() if reads else 2), [x.shape, x.stride(), size])
    )
    for rows in (2, 3, 4, 3):
        x = torch.randn(rows, 3)
        y, (shape, stride, given) = fun(x, x.shape)
        assert torch.equal(y, x.sin() * (x.numel() if reads else 2))
        assert (type(shape), shape) == (torch.Size, x.shape)
        assert (type(given), given) == (torch.Size, x.shape)
        assert (type(stride), stride) == (tuple, (3, 1))


COLLECTOR = ContextVar("collector", default=None)


class Captures(nn.Module):
    """As transformers captures hidden states: hooks add to lists of the call, or `None` to them."""

    def __init__(self, wanted):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.wanted = wanted
        for layer in self.layers:
            layer.register_forward_hook(self.capture)

    @staticmethod
    def capture(module, args, output):
        found = COLLECTOR.get()
        if found is not None:
            states = found["states"]
            states.append(output if len(states) in found["wanted"] else None)

    def forward(self, x):
        token = COLLECTOR.set({"states": [], "wanted": self.wanted})
        try:
            for layer in self.layers:
                x = layer(x).tanh()
            states = COLLECTOR.get()["states"]
        finally:
            COLLECTOR.reset(token)
        return x, tuple(states), SimpleNamespace(last=x, states=list(states))


@pytest.mark.parametrize("wanted", [(1,), (0, 3), ()])
def test_hooks_that_capture_some_outputs(wanted):
    plain, wrapped = Captures(wanted), tr.nn.wrap(Captures(wanted), "full")
    for step in range(3):
        x = torch.full((2, 4), step + 1.0)
        (told, tensors), (our_told, our_tensors) = (take_apart(m(x)) for m in (plain, wrapped))
        assert our_told == told
        torch.testing.assert_close(our_tensors, tensors, rtol=0, atol=0)
        for found in (tensors, our_tensors):
            sum((t * t).sum() for t in found).backward()
    for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert {row.way for row in tr.nn.report(wrapped)} == {"graph"}


def test_a_hook_that_adds_none_to_a_list_of_the_module():
    plain, wrapped = Captures(()), tr.nn.wrap(Captures(()), "full")
    for model in (plain, wrapped):
        model.seen = seen = []
        model.layers[0].register_forward_hook(lambda m, a, out, seen=seen: seen.append(None))
        for _ in range(3):
            model(torch.ones(2, 4))
    assert wrapped.seen == plain.seen == [None] * 3
