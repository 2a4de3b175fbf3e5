"""What a function reads outside of itself and others change: each call sees the value of its time.

The reads are of all kinds of containers and objects, in a function and in the `forward` of a
wrapped module, where a helper reads that runs no operator. The oracle is plain PyTorch.
"""

import array
import collections
import contextvars
import dataclasses
import datetime
import decimal
import enum
import functools
import os
import threading
import weakref
from argparse import Namespace
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import torchremat as tr

FACTOR = 2.0
NESTED = {"a": {"b": {"c": {"d": 2.0}}}}
LOCAL = threading.local()
CONTEXT = contextvars.ContextVar("factor")
OF_A_DESCRIPTOR = [2.0]


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class WithProperty:
    def __init__(self):
        self._value = 2.0

    @property
    def value(self):
        return self._value


class WithGetAttr:
    def __init__(self):
        self.own = {"value": 2.0}

    def __getattr__(self, name):
        try:
            return vars(self)["own"][name]
        except KeyError:
            raise AttributeError(name) from None


class WithGetItem:
    def __init__(self):
        self._own = {"value": 2.0}

    def __getitem__(self, key):
        return self._own[key]


class Scale:
    def __init__(self):
        self.factor = 2.0

    def __call__(self, x):
        return x * self.factor

    def of_global(self, x):
        return x * FACTOR


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


class MyList(list):
    pass


class Descriptor:
    def __get__(self, owner, kind):
        return OF_A_DESCRIPTOR[0]


class Described:
    value = Descriptor()


class Meta(type):
    value = 2.0


class OfMeta(metaclass=Meta):
    pass


class Base:
    value = 2.0


class Derived(Base):
    pass


class Choice(enum.Enum):
    TWO = 1
    THREE = 2


@dataclasses.dataclass
class Config:
    value: float = 2.0


@dataclasses.dataclass(slots=True)
class ConfigInSlots:
    value: float = 2.0


Pair = collections.namedtuple("Pair", ["value", "other"])


def deep(levels):
    holder = Holder(value=2.0)
    for _ in range(levels):
        holder = Holder(inner=holder)
    return holder


def innermost(holder):
    while hasattr(holder, "inner"):
        holder = holder.inner
    return holder


def helper():
    return FACTOR


def with_default(x, factor=[2.0]):  # noqa: B006
    return x * factor[0]


def with_keyword(x, *, factor=[2.0]):  # noqa: B006
    return x * factor[0]


def closes_over(values):
    return Holder(read=lambda: values["v"], values=values)


def with_method():
    scale = Scale()
    return Holder(scale=scale, method=scale.__call__)


def with_weak_reference():
    inner = Holder(value=2.0)
    return Holder(inner=inner, reference=weakref.ref(inner))


def with_proxy():
    values = {"v": 2.0}
    return Holder(values=values, proxy=MappingProxyType(values))


def tensor_with_attribute():
    x = torch.ones(1)
    x.factor = 2.0
    return x


def set_value(held):
    held.value = 3.0


def set_global(_):
    global FACTOR
    FACTOR = 3.0


def attribute(value, other):
    """A value that another replaces, which both are read as numbers."""
    return (
        lambda: Holder(value=value),
        lambda held: float(held.value),
        lambda held: setattr(held, "value", other),
    )


CASES = {
    "attribute": attribute(2, 3),
    "NumPy's scalar": attribute(np.float64(2), np.float64(3)),
    "decimal": attribute(decimal.Decimal(2), decimal.Decimal(3)),
    "fraction": attribute(Fraction(2), Fraction(3)),
    "complex": (
        lambda: Holder(value=2 + 0j),
        lambda held: held.value.real,
        lambda held: setattr(held, "value", 3 + 0j),
    ),
    "bytes": (
        lambda: Holder(value=b"\x02"),
        lambda held: held.value[0],
        lambda held: setattr(held, "value", b"\x03"),
    ),
    "range": (
        lambda: Holder(value=range(2)),
        lambda held: len(held.value),
        lambda held: setattr(held, "value", range(3)),
    ),
    "size": (
        lambda: Holder(value=torch.Size([2])),
        lambda held: held.value[0],
        lambda held: setattr(held, "value", torch.Size([3])),
    ),
    "time": (
        lambda: Holder(value=datetime.timedelta(seconds=2)),
        lambda held: held.value.total_seconds(),
        lambda held: setattr(held, "value", datetime.timedelta(seconds=3)),
    ),
    "enum": (
        lambda: Holder(value=Choice.TWO),
        lambda held: 2.0 if held.value is Choice.TWO else 3.0,
        lambda held: setattr(held, "value", Choice.THREE),
    ),
    "named tuple": (
        lambda: Holder(pair=Pair(2.0, 1)),
        lambda held: held.pair.value,
        lambda held: setattr(held, "pair", Pair(3.0, 1)),
    ),
    "frozen set": (
        lambda: Holder(value=frozenset([2.0])),
        lambda held: sum(held.value),
        lambda held: setattr(held, "value", frozenset([3.0])),
    ),
    "dataclass": (Config, lambda held: held.value, set_value),
    "dataclass in slots": (ConfigInSlots, lambda held: held.value, set_value),
    "namespace": (lambda: SimpleNamespace(value=2.0), lambda held: held.value, set_value),
    "arguments": (lambda: Namespace(value=2.0), lambda held: held.value, set_value),
    "property": (
        WithProperty,
        lambda held: held.value,
        lambda held: setattr(held, "_value", 3.0),
    ),
    "__getattr__": (
        WithGetAttr,
        lambda held: held.value,
        lambda held: held.own.update(value=3.0),
    ),
    "__getitem__": (
        WithGetItem,
        lambda held: held["value"],
        lambda held: held._own.update(value=3.0),
    ),
    "__call__": (Scale, lambda held: held(1.0), lambda held: setattr(held, "factor", 3.0)),
    "method that reads a global": (Scale, lambda held: held.of_global(1.0), set_global),
    "bound method": (
        with_method,
        lambda held: held.method(1.0),
        lambda held: setattr(held.scale, "factor", 3.0),
    ),
    "descriptor": (
        Described,
        lambda held: held.value,
        lambda held: OF_A_DESCRIPTOR.__setitem__(0, 3.0),
    ),
    "metaclass": (lambda: OfMeta, lambda held: held.value, lambda held: set_value(Meta)),
    "base class": (Derived, lambda held: held.value, lambda held: set_value(Base)),
    "getattr": (
        lambda: Holder(value=2.0),
        lambda held: getattr(held, "val" + "ue"),
        set_value,
    ),
    "vars": (lambda: Holder(value=2.0), lambda held: vars(held)["value"], set_value),
    "list": (lambda: [2.0], lambda held: held[0], lambda held: held.__setitem__(0, 3.0)),
    "long list": (
        lambda: [2.0] * 100,
        lambda held: held[90],
        lambda held: held.__setitem__(90, 3.0),
    ),
    "nested list": (
        lambda: [[[[[2.0]]]]],
        lambda held: held[0][0][0][0][0],
        lambda held: held[0][0][0][0].__setitem__(0, 3.0),
    ),
    "list of a class of its own": (
        lambda: MyList([2.0]),
        lambda held: held[0],
        lambda held: held.__setitem__(0, 3.0),
    ),
    "deque": (
        lambda: collections.deque([2.0]),
        lambda held: held[0],
        lambda held: held.__setitem__(0, 3.0),
    ),
    "dict": (lambda: {"v": 2.0}, lambda held: held["v"], lambda held: held.update(v=3.0)),
    "long dict": (
        lambda: dict.fromkeys(range(100), 2.0),
        lambda held: held[90],
        lambda held: held.update({90: 3.0}),
    ),
    "ordered dict": (
        lambda: collections.OrderedDict(v=2.0),
        lambda held: held["v"],
        lambda held: held.update(v=3.0),
    ),
    "default dict": (
        lambda: collections.defaultdict(float, v=2.0),
        lambda held: held["v"],
        lambda held: held.update(v=3.0),
    ),
    "attribute dict": (
        lambda: AttributeDict(value=2.0),
        lambda held: held.value,
        lambda held: held.update(value=3.0),
    ),
    "counter": (
        lambda: collections.Counter(v=2),
        lambda held: held["v"],
        lambda held: held.update(v=1),
    ),
    "user dict": (
        lambda: collections.UserDict(v=2.0),
        lambda held: held["v"],
        lambda held: held.update(v=3.0),
    ),
    "chain map": (
        lambda: collections.ChainMap({"v": 2.0}),
        lambda held: held["v"],
        lambda held: held.update(v=3.0),
    ),
    "proxy": (with_proxy, lambda held: held.proxy["v"], lambda held: held.values.update(v=3.0)),
    "set": (lambda: {2.0}, sum, lambda held: held.add(1.0)),
    "object in a list": (
        lambda: [Holder(value=2.0)],
        lambda held: held[0].value,
        lambda held: set_value(held[0]),
    ),
    "object in a set": (
        lambda: {Holder(value=2.0)},
        lambda held: next(iter(held)).value,
        lambda held: set_value(next(iter(held))),
    ),
    "objects in a set": (
        lambda: {Holder(), Holder()},
        lambda held: float(len(held)),
        lambda held: held.add(Holder()),
    ),
    "dict in a tuple": (
        lambda: ({"v": 2.0},),
        lambda held: held[0]["v"],
        lambda held: held[0].update(v=3.0),
    ),
    "many attributes": (
        lambda: Holder(**{f"a{i}": 2.0 for i in range(100)}),
        lambda held: held.a90,
        lambda held: setattr(held, "a90", 3.0),
    ),
    "weak reference": (
        with_weak_reference,
        lambda held: held.reference().value,
        lambda held: set_value(held.inner),
    ),
    "partial function": (
        lambda: functools.partial(lambda x, factor: x * factor, factor=2.0),
        lambda held: held(1.0),
        lambda held: held.keywords.update(factor=3.0),
    ),
    "closure": (
        lambda: closes_over({"v": 2.0}),
        lambda held: held.read(),
        lambda held: held.values.update(v=3.0),
    ),
    "default": (
        lambda: with_default,
        lambda held: held(1.0),
        lambda held: held.__defaults__[0].__setitem__(0, 3.0),
    ),
    "default of a keyword": (
        lambda: with_keyword,
        lambda held: held(1.0),
        lambda held: held.__kwdefaults__["factor"].__setitem__(0, 3.0),
    ),
    "array of NumPy": (
        lambda: np.array([2.0]),
        lambda held: float(held[0]),
        lambda held: held.__setitem__(0, 3.0),
    ),
    "array": (
        lambda: array.array("d", [2.0]),
        lambda held: held[0],
        lambda held: held.__setitem__(0, 3.0),
    ),
    "bytearray": (
        lambda: bytearray([2]),
        lambda held: held[0],
        lambda held: held.__setitem__(0, 3),
    ),
    "attribute of a tensor": (
        tensor_with_attribute,
        lambda held: held * held.factor,
        lambda held: setattr(held, "factor", 3.0),
    ),
    "thread's variable": (lambda: LOCAL, lambda held: held.value, set_value),
    "context variable": (lambda: CONTEXT, lambda held: held.get(), lambda held: held.set(3.0)),
    "environment": (
        lambda: None,
        lambda held: float(os.environ["TORCHREMAT_TEST_FACTOR"]),
        lambda held: os.environ.__setitem__("TORCHREMAT_TEST_FACTOR", "3"),
    ),
    "environment by getenv": (
        lambda: None,
        lambda held: float(os.getenv("TORCHREMAT_TEST_FACTOR")),
        lambda held: os.environ.__setitem__("TORCHREMAT_TEST_FACTOR", "3"),
    ),
    "global": (lambda: None, lambda held: helper(), set_global),
    "global of globals": (
        lambda: None,
        lambda held: NESTED["a"]["b"]["c"]["d"],
        lambda held: NESTED["a"]["b"]["c"].update(d=3.0),
    ),
    **{
        f"{levels} levels": (
            functools.partial(deep, levels),
            lambda held: innermost(held).value,
            lambda held: set_value(innermost(held)),
        )
        for levels in range(1, 8)
    },
}


@pytest.fixture(autouse=True)
def as_at_first(monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    monkeypatch.setitem(NESTED["a"]["b"]["c"], "d", 2.0)
    monkeypatch.setattr(LOCAL, "value", 2.0, raising=False)
    for kind in (Meta, Base):
        monkeypatch.setattr(kind, "value", 2.0)
    monkeypatch.setenv("TORCHREMAT_TEST_FACTOR", "2")
    token = CONTEXT.set(2.0)
    yield
    CONTEXT.reset(token)
    defaults = with_default.__defaults__[0], with_keyword.__kwdefaults__["factor"]
    for values in (OF_A_DESCRIPTOR, *defaults):
        values[0] = 2.0


class Model(nn.Module):
    def __init__(self, held, read):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held, self.read = held, read

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.read(self.held)


class ModelOfTwo(Model):
    def forward(self, x, held):
        return torch.tanh(self.linear(x)) * self.read(held)


@pytest.mark.parametrize("way", ["function", "module", "argument"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(3)
def test_each_call_reads_what_is_there(name, way):
    make, read, change = CASES[name]
    held = make()
    model = ModelOfTwo(None, read) if way == "argument" else Model(held, read)
    linear = model.linear
    if way == "module":
        ours = tr.nn.wrap(model, "full")
    elif way == "argument":
        ours = functools.partial(tr.nn.wrap(model, "full"), held=held)
    else:
        ours = tr.checkpoint(lambda x: torch.tanh(linear(x)) * read(held))
    x = torch.ones(2, 4, requires_grad=True)
    for factor in (2.0, 2.0, None, 3.0):
        if factor is None:
            change(held)
            continue
        out = ours(x)
        assert torch.equal(out, torch.tanh(linear(x)) * factor)
        out.sum().backward()
    if way == "module":
        assert tr.nn.report(ours).traces == 2


@pytest.mark.parametrize(
    ("module", "read", "change"),
    [
        (nn.Dropout(0.25), lambda m: m.p * 8, lambda m: setattr(m, "p", 0.375)),
        (nn.Identity(), lambda m: 2.0 if m.training else 3.0, nn.Module.eval),
    ],
)
def test_a_module_among_the_arguments(module, read, change):
    wrapped = tr.nn.wrap(ModelOfTwo(None, read), "full")
    x = torch.ones(2, 4, requires_grad=True)
    for factor in (2.0, 3.0, 3.0):
        assert torch.equal(wrapped(x, module), torch.tanh(wrapped.linear(x)) * factor)
        change(module)


def read_by_a_helper(held):
    return read_by_another(held)


def read_by_another(held):
    return held.deeply_hidden


class CallsAHelper(Model):
    def forward(self, x):
        return torch.tanh(self.linear(x)) * read_by_a_helper(self.held)


def test_what_no_code_names_may_change():
    held = Holder(value=2.0, step=0, logs=[Holder(value=1)])
    model = tr.nn.wrap(Model(held, lambda held: held.value), "full")
    for step in range(4):
        held.step = step
        held.logs.append(Holder(value=step))
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert tr.nn.report(model).traces == 1


value, unrelated = 0.0, torch.relu
"""Globals of this file that no code reads, called as attributes that code does read."""


class ReadsAttributes(Model):
    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.held.value * self.held.unrelated


def test_a_global_called_like_an_attribute_may_change(monkeypatch):
    model = tr.nn.wrap(ReadsAttributes(Holder(value=2.0, unrelated=3.0), None), "full")
    for step in range(4):
        monkeypatch.setitem(globals(), "value", float(step))
        monkeypatch.setitem(globals(), "unrelated", torch.relu if step % 2 else torch.tanh)
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert tr.nn.report(model).traces == 1


class ChoosesAMethod(Model):
    mode = "slowly"

    def forward(self, x):
        return getattr(self, f"forward_{self.mode}")(x)

    def forward_slowly(self, x):
        return torch.tanh(self.linear(x)) * self.held.deeply_hidden


@pytest.mark.parametrize("kind", [CallsAHelper, ChoosesAMethod])
def test_code_that_forward_reaches_reads_an_attribute(kind):
    held = Holder(deeply_hidden=2.0)
    wrapped = tr.nn.wrap(kind(held, None), "full")
    x = torch.ones(2, 4, requires_grad=True)
    for factor in (2.0, 3.0):
        held.deeply_hidden = factor
        assert torch.equal(wrapped(x), torch.tanh(wrapped.linear(x)) * factor)


class Progress:
    """As a trainer, which a model of its framework refers to."""

    def __init__(self):
        self.steps, self.loop = 0, Holder(done=0, batches=[])

    def advance(self):
        self.steps += 1
        self.loop.done += 1
        self.loop.batches.append(self.steps)


class OfAFramework(Model):
    def __init__(self, held, read):
        super().__init__(held, read)
        self.progress = Progress()

    def training_step(self, x):
        loss = self(x).square().mean()
        self.progress.advance()
        return loss * (1.0 if self.progress.steps and self.progress.loop.done else 2.0)


def test_what_only_other_methods_read_may_change():
    model = tr.nn.wrap(OfAFramework(Holder(value=2.0), lambda held: held.value), "full")
    for _ in range(5):
        model.training_step(torch.ones(2, 4, requires_grad=True)).backward()
    assert tr.nn.report(model).traces == 1


def test_a_hook_reads_an_attribute():
    held = Holder(of_a_hook=2.0)
    model = Model(None, lambda held: 1.0)
    model.linear.register_forward_hook(lambda module, args, out: out * held.of_a_hook)
    wrapped = tr.nn.wrap(model, "full")
    weight, bias = model.linear.weight, model.linear.bias
    x = torch.ones(2, 4, requires_grad=True)
    for factor in (2.0, 3.0):
        held.of_a_hook = factor
        assert torch.equal(wrapped(x), torch.tanh(torch.addmm(bias, x, weight.t()) * factor))


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_lightning_is_one_graph():
    lightning = pytest.importorskip("lightning")

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.linear(x))

        def training_step(self, batch, index):
            loss = self(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    net = tr.nn.wrap(Net(), "full")
    data = torch.utils.data.TensorDataset(torch.randn(12, 4))
    trainer = lightning.Trainer(
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=4))
    assert {row.way for row in tr.nn.report(net).rows} == {"graph"}
    assert tr.nn.report(net).traces == 1
