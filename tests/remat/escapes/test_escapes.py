"""Tensors that leave a function by the side: as in plain PyTorch at each call, or an error."""

import contextvars
import functools
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same
from torchremat.errors import EffectError

LOSSES = []
STATE = {}
LAST = None
VARIABLE = contextvars.ContextVar("VARIABLE", default=None)


@dataclass
class Record:
    value: torch.Tensor
    name: str


class Block(nn.Module):
    """A layer that leaves a value in one place; `read` returns the tensors that are there."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        h = self.lin(x)
        self.leave(h.square().mean(), h)
        return h.tanh()


class Attribute(Block):
    def leave(self, loss, h):
        self.aux = loss

    def read(self):
        return [self.aux]


class AttributeOfInput(Block):
    def forward(self, x):
        self.given = x
        return self.lin(x)

    def read(self):
        return [self.given]


class OwnList(Block):
    def __init__(self):
        super().__init__()
        self.seen = []

    def leave(self, loss, h):
        self.seen.append((1, h))

    def read(self):
        return [h for _, h in self.seen]


class Window(OwnList):
    def leave(self, loss, h):
        self.seen.append(loss)
        if len(self.seen) > 2:
            self.seen.pop(0)

    def read(self):
        return self.seen


class OwnDict(Block):
    def __init__(self):
        super().__init__()
        self.kept = {}

    def leave(self, loss, h):
        self.kept["h"] = {"a": h * 2, "b": [h]}

    def read(self):
        return [self.kept["h"]["a"], *self.kept["h"]["b"]]


class OwnTuple(Block):
    kept = ()

    def leave(self, loss, h):
        self.kept += (loss,)

    def read(self):
        return list(self.kept)


class Queue(Block):
    def __init__(self):
        super().__init__()
        self.seen = deque(maxlen=2)

    def leave(self, loss, h):
        self.seen.append(loss)

    def read(self):
        return list(self.seen)


class ModuleList(Block):
    def leave(self, loss, h):
        LOSSES.append(loss)

    def read(self):
        return list(LOSSES)


class ModuleVariable(Block):
    def leave(self, loss, h):
        global LAST
        LAST = loss

    def read(self):
        return [LAST]


class ModuleDict(Block):
    def leave(self, loss, h):
        STATE.setdefault("losses", []).append(Record(loss, "aux"))

    def read(self):
        return [record.value for record in STATE["losses"]]


class PlainObject(Block):
    def __init__(self):
        super().__init__()
        self.log = SimpleNamespace(last=None)

    def leave(self, loss, h):
        self.log.last = loss

    def read(self):
        return [self.log.last]


class ClassAttribute(Block):
    shared = None

    def leave(self, loss, h):
        type(self).shared = loss

    def read(self):
        return [type(self).shared]


class Closure(Block):
    def __init__(self):
        super().__init__()
        last = None

        def leave(loss, h):
            nonlocal last
            last = loss

        self.leave, self.read = leave, lambda: [last]


class ContextVariable(Block):
    def leave(self, loss, h):
        VARIABLE.set(loss)

    def read(self):
        return [VARIABLE.get()]


class Recurrent(Block):
    h = None

    def forward(self, x):
        y = self.lin(x) if self.h is None else self.lin(x) + self.h.detach()
        self.h = y
        return y.tanh()

    def read(self):
        return [self.h]


class Pair(Block):
    pair = None

    def forward(self, x):
        y = self.lin(x)
        old = 0 if self.pair is None else self.pair[1].detach()
        self.pair = (y, y.sin() + old)
        return y + old

    def read(self):
        return list(self.pair)


class Memo(Block):
    grid = None

    def forward(self, x):
        n = x.shape[-1]
        if self.grid is None or self.grid[0].shape[0] != n:
            self.grid = (torch.linspace(0, 1, n), torch.linspace(1, 0, n))
            self.size = n
        return self.lin(x) * self.grid[0] + self.grid[1]

    def read(self):
        return list(self.grid)


class Recorder(Block):
    """Records an inner output by a `forward` that is new at each step, as transformers does."""

    def run(self, fun, x):
        seen = {}
        inner = self.lin.forward

        def forward(x):
            y = inner(x)
            seen["y"] = (*seen.get("y", ()), y)
            return y

        self.lin.forward = forward
        try:
            return fun(x)
        finally:
            del self.lin.forward
            self.seen_outside = seen

    def forward(self, x):
        return self.lin(x).tanh()

    def read(self):
        return list(self.seen_outside["y"])


class HookKeeps(Block):
    def __init__(self):
        super().__init__()
        self.outputs = outputs = []
        self.lin.register_forward_hook(lambda m, args, out: outputs.append(out))

    def forward(self, x):
        return self.lin(x).tanh()

    def read(self):
        return self.outputs


class HookCounts(HookKeeps):
    def __init__(self):
        super().__init__()
        self.shapes, self.means, self.calls = [], [], [0]
        self.lin.register_forward_hook(self.note)
        self.lin.register_forward_pre_hook(lambda m, args: self.shapes.append(args[0].shape))

    def note(self, module, args, out):
        self.means.append(out.mean().item())
        self.calls[0] += 1

    def read(self):
        return [
            *self.outputs,
            torch.tensor(self.means),
            torch.tensor([len(self.shapes), *self.calls]),
        ]


PLACES = [
    Attribute, AttributeOfInput, OwnList, Window, OwnDict, OwnTuple, Queue, ModuleList,
    ModuleVariable, ModuleDict, PlainObject, ClassAttribute, Closure, ContextVariable, Recurrent,
    Pair, Memo, Recorder, HookKeeps, HookCounts,
]  # fmt: skip

WAYS = {
    "checkpoint": lambda net: tr.checkpoint(net),
    "checkpoint of a function": lambda net: tr.checkpoint(lambda x: net(x), policy="dots"),
    "nested": lambda net: tr.checkpoint(tr.nn.wrap(net, select="0")),
    "whole": lambda net: tr.nn.wrap(net),
    "layers": lambda net: tr.nn.wrap(net, "dots", select="0"),
}


def steps(kind, prepare):
    """Three training steps: outputs, what was left, its gradients."""
    global LAST
    LOSSES.clear()
    STATE.clear()
    LAST = None
    VARIABLE.set(None)
    kind.shared = None
    torch.manual_seed(0)
    block = kind()
    fun = prepare(nn.Sequential(block, nn.Linear(3, 3)))
    run = getattr(block, "run", lambda fun, x: fun(x))
    found = []
    for _ in range(3):
        x = torch.randn(2, 3, requires_grad=True)
        out = run(fun, x)
        left = block.read()
        last = left[-1]
        assert all(type(t) is torch.Tensor for t in left)
        loss = out.sum() + (last.sum() if last.requires_grad else 0)
        grads = torch.autograd.grad(loss, [x, *block.parameters()], retain_graph=True)
        found.append((out.detach(), [t.detach() for t in left], grads))
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.sampled(3)
def test_a_tensor_that_leaves_a_function_is_the_one_of_each_call(kind, way):
    assert_same(steps(kind, WAYS[way]), steps(kind, lambda net: net))


def test_traces_do_not_multiply():
    net = tr.nn.wrap(HookKeeps())
    traced = []
    net.register_forward_pre_hook(lambda *_: None)
    net.tanh = lambda y: (traced.append(1), y.tanh())[1]
    losses = []

    @tr.checkpoint
    def fun(x):
        traced.append(1)
        losses.append(x.sum())
        return x.sin()

    for _ in range(8):
        fun(torch.ones(3))
    assert (len(traced), len(losses)) == (1, 8)
    losses = []
    fun(torch.ones(3))
    assert (len(traced), len(losses)) == (1, 1)


class Slots:
    __slots__ = ("value",)


def keep_in_a_generator(slots, y):
    def numbers():
        z = y.sin()
        yield 1
        yield z

    slots.value = numbers()
    next(slots.value)


def test_a_place_that_cannot_be_written_is_an_error():
    slots = Slots()

    def fun(x):
        keep_in_a_generator(slots, x.sin())
        return x.cos()

    with pytest.raises(EffectError, match=r"a tensor made at test_escapes.py:\d+ .* is still in"):
        tr.checkpoint(fun)(torch.ones(3, requires_grad=True) * 1)


def test_a_cache_of_functools_keeps_no_traced_tensor():
    @functools.lru_cache
    def table(n):
        return torch.linspace(0, 1, n)

    def fun(x):
        return x * table(x.shape[-1])

    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        assert_same(tr.checkpoint(fun)(x), x * torch.linspace(0, 1, 3))
    assert type(table(3)) is torch.Tensor


def test_an_error_in_the_function_leaves_nothing_behind():
    kept = []

    def fun(x):
        kept.append(x.sin())
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        tr.checkpoint(fun)(torch.ones(3))
    assert kept == []


@pytest.mark.usefixtures("no_tapes")
def test_a_hook_that_sees_what_is_written_to_later():
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    net[0].register_forward_hook(lambda m, args, out: print(out.sum().item()))
    with pytest.raises(EffectError, match=r"forward hook at test_escapes.py:\d+ .* in place"):
        tr.checkpoint(net)(torch.ones(2, 3))
