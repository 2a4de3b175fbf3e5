"""Dataclasses and namespaces among arguments and results, against plain PyTorch."""

import dataclasses
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchremat as tr
from torchremat.core.open_objects import OpenObject, close_objects, open_objects


@dataclass
class Batch:
    x: Any
    scale: float = 2.0
    extra: Any = None
    name: str = field(default="a batch", compare=False)

    def __post_init__(self):
        self.made_by_init = True


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    width: int = 4


@dataclass(slots=True)
class InSlots:
    x: Any


@dataclass
class Derived(Batch):
    more: Any = None

    @property
    def double(self):
        return self.x * 2


class OfOwnMaking:
    def __init__(self, x):
        self.x = x


class Layer(nn.Module):
    """Any function of a linear layer and a tree."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(self.linear, *args, **kwargs)


def tensors_of(value):
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_of(item)]
    if isinstance(value, dict):
        return tensors_of(list(value.values()))
    if isinstance(value, Frozen | InSlots):
        return tensors_of(value.x)
    return tensors_of(vars(value)) if hasattr(value, "__dict__") else []


def train(layer, make_arguments):
    """The results of three steps, what became of their arguments, and all gradients."""
    found = []
    for step in range(3):
        torch.manual_seed(step)
        args = make_arguments()
        inputs = tensors_of(args)
        out = layer(*args)
        outputs = tensors_of(out)
        sum(t.square().sum() for t in outputs if t.requires_grad).backward()
        grads = [t.grad for t in inputs if t.is_leaf] + [p.grad for p in layer.parameters()]
        found.append((out, args, outputs, tensors_of(args), grads))
        layer.zero_grad()
    return found


def x(rows=2):
    return torch.randn(rows, 4, requires_grad=True)


def put_in(linear, batch):
    batch.x = torch.tanh(linear(batch.x)) * batch.scale
    return batch


def swap_parts(linear, batch):
    inner, batch.extra = batch.extra, [linear(batch.x).sin()]
    return inner, batch


CASES = {
    "fields": (lambda lin, b: torch.tanh(lin(b.x)).sin() * b.scale, lambda: (Batch(x()),)),
    "nested": (
        lambda lin, b: [lin(b.extra.x).sin(), b.extra.width, b.extra],
        lambda: (Batch(x(), extra=Frozen(x())),),
    ),
    "in trees": (
        lambda lin, bs: {"y": [lin(b.x).cos() for b in bs["all"]]},
        lambda: ({"all": [Batch(x()), Frozen(x()), SimpleNamespace(x=x())]},),
    ),
    "results": (
        lambda lin, t: Batch(lin(t).sin(), 3.0, [Frozen(lin(t).cos(), 7), SimpleNamespace(t=t)]),
        lambda: (x(),),
    ),
    "derived": (
        lambda lin, b: Derived(lin(b.double), more=b.more),
        lambda: (Derived(x(), more=x()),),
    ),
    "written": (put_in, lambda: (Batch(x()),)),
    "replaced": (swap_parts, lambda: (Batch(x(), extra=[x()]),)),
    "written in slots": (
        lambda lin, b: (setattr(b, "x", lin(b.x).sin()), b, b.x.cos())[1:],
        lambda: (InSlots(x()),),
    ),
    "added": (
        lambda lin, b: (setattr(b, "cache", [lin(b.x).tanh()]), b.cache[0] * 2)[1],
        lambda: (Batch(x()),),
    ),
    "replaced whole": (
        lambda lin, b: dataclasses.replace(b, x=lin(b.x).tanh()),
        lambda: (Batch(x(), extra={"m": x()}),),
    ),
    "list": (lambda lin, ts: (ts.append(lin(ts[0]).tanh()), ts)[1], lambda: ([x()],)),
    "dict in dict": (
        lambda lin, d: (d["a"].update(y=lin(d["a"]["x"]).tanh()), d)[1],
        lambda: ({"a": {"x": x()}},),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_plain_pytorch(name):
    function, make_arguments = CASES[name]
    plain = train(Layer(function), make_arguments)
    wrapped = tr.nn.wrap(Layer(function), tr.checkpoint_policies.nothing_saveable)
    ours = train(wrapped, make_arguments)
    for (out, args, *tensors), (our_out, our_args, *our_tensors) in zip(plain, ours, strict=True):
        torch.testing.assert_close(our_tensors, tensors, rtol=0, atol=0)
        assert type(our_out) is type(out)
        assert [out is a for a in args] == [our_out is a for a in our_args]
        if isinstance(out, Batch):
            assert list(vars(out)) == list(vars(our_out))
    report = tr.nn.report(wrapped)
    assert {row.way for row in report.rows} == {"graph"}
    assert report.traces == 1


def test_parts_of_arguments_are_passed_on():
    wrapped = tr.nn.wrap(Layer(lambda lin, b: SimpleNamespace(y=lin(b.x), parts=[b, b.extra])))
    for _ in range(2):
        batch = Batch(x(), extra={"k": [1]})
        out = wrapped(batch)
        assert out.parts[0] is batch
        assert out.parts[1] is batch.extra


ON_A_TAPE = {
    "of own making": lambda: (OfOwnMaking(x()),),
    "holds one of own making": lambda: (Batch(x(), extra=OfOwnMaking(x())),),
    "twice": lambda: (batch := Batch(x()), batch)[:1] * 2,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*cannot be one graph")
@pytest.mark.parametrize("name", ON_A_TAPE)
def test_other_objects_are_not_opened(name):
    def function(linear, first, second=None):
        first.x = linear(first.x).tanh()
        return first.x if second is None else first.x + second.x

    plain = train(Layer(function), ON_A_TAPE[name])
    wrapped = tr.nn.wrap(Layer(function), tr.checkpoint_policies.nothing_saveable)
    ours = train(wrapped, ON_A_TAPE[name])
    for (*_, outputs, _, grads), (*_, our_outputs, _, our_grads) in zip(plain, ours, strict=True):
        torch.testing.assert_close([our_outputs, our_grads], [outputs, grads], rtol=0, atol=0)
    assert {row.way for row in tr.nn.report(wrapped).rows} == {"tape"}


def test_an_object_without_tensors_is_a_static_value():
    @dataclass(frozen=True)
    class Config:
        times: int
        function: Any = torch.tanh

    wrapped = tr.nn.wrap(Layer(lambda lin, t, config: config.function(lin(t)) * config.times))
    for times in (2, 2, 3):
        t = x()
        assert torch.equal(wrapped(t, Config(times)), torch.tanh(wrapped.linear(t)) * times)
    assert tr.nn.report(wrapped).traces == 2


def test_other_fields_are_other_calls():
    wrapped = tr.nn.wrap(Layer(lambda lin, b: lin(b.x) if b.extra is None else lin(b.extra)))
    t, u = x(), x()
    for extra in (None, u, None):
        expected = wrapped.linear(t if extra is None else extra)
        assert torch.equal(wrapped(Batch(t, extra=extra)), expected)


def test_explain_names_fields():
    def loss(batch):
        return (torch.sin(batch.x) * batch.extra["mask"]).sum()

    report = tr.explain(loss, Batch(x(), extra={"mask": torch.ones(2, 4)}), policy="none")
    assert {"batch.x", "batch.extra['mask']"} <= {row.name for row in report.rows}


def test_estimates_and_comparisons_see_results():
    fun = Layer(lambda lin, b: Batch(lin(b.x).sin().cos()))
    batch = Batch(x(64))
    assert tr.estimate(fun, batch).peak_bytes > batch.x.nbytes
    assert "nothing_saveable" in str(tr.compare(fun, batch, policies=["none", "full"]))


def test_functions_of_objects_have_derivatives_under_torch_func():
    policy = tr.checkpoint_policies.nothing_saveable
    inner = tr.checkpoint(lambda b: Batch((b.x * b.scale).sin()), policy=policy)

    def loss(t):
        return inner(Batch(t)).x.sum()

    t = torch.randn(3, 4)
    assert torch.equal(torch.func.grad(loss)(t), (t * 2.0).cos() * 2.0)
    each = torch.func.vmap(torch.func.grad(loss))(t)
    assert torch.equal(each, (t * 2.0).cos() * 2.0)


def test_opened_and_closed_objects_are_as_before():
    cyclic = Batch(torch.ones(1))
    cyclic.extra = cyclic
    opened = open_objects(cyclic)
    assert isinstance(opened, OpenObject)
    assert opened.attributes["extra"] is cyclic
    batch = Derived(torch.ones(2), extra=[Frozen(torch.zeros(1))], more=(1, "a"))
    again = close_objects(open_objects(batch))
    assert type(again) is Derived
    assert list(vars(again)) == list(vars(batch))
    assert again.extra[0] == batch.extra[0]
    assert open_objects([1, "a", None]) == [1, "a", None]
