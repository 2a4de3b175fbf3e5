"""Alike layers share one trace, and compute bit for bit what they compute without it."""

import copy
import gc
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchremat as tr
from tests.remat.sharing.stacks import Block, Stack, check_bits, count_traces, step
from torchremat.remat.program import region


class Attention(nn.Module):
    def __init__(self, width, heads, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.heads = heads
        self.scaling = (width // heads) ** -0.5
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x, cache=None):
        b, t, _ = x.shape
        shape = b, t, self.heads, -1
        q, k, v = (m(x).view(shape).transpose(1, 2) for m in (self.q, self.k, self.v))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


class LlamaLayer(nn.Module):
    def __init__(self, width, layer_idx):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, 2, layer_idx)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize("count", [2, 8, 16])
@pytest.mark.parametrize("policy", [None, "dots"])
def test_a_llama_is_traced_once(count, policy):
    model = Stack([LlamaLayer(8, i) for i in range(count)])
    check_bits(model, torch.randn(2, 4, 8), policy=policy)
    assert count_traces(model) == 1


class Scaled(Block):
    """Its scale is read by an operator, its index only in a branch that is never taken."""

    def __init__(self, scale, index=0, cache=None):
        super().__init__()
        self.scale = scale
        self.index = index
        self.cache = cache

    def forward(self, x):
        if self.cache is not None:
            x = x * self.index
        return super().forward(x) * self.scale


class Branching(Block):
    def __init__(self, index):
        super().__init__()
        self.index = index

    def forward(self, x):
        return super().forward(x.sin() if self.index % 2 else x)


@pytest.mark.parametrize(
    ("layers", "count"),
    [
        (lambda: [Scaled(2.0, i) for i in range(4)], 1),
        (lambda: [Scaled(float(i)) for i in range(3)], 3),
        (lambda: [Scaled(2), Scaled(2.0)], 2),
        (lambda: [Scaled([2.0, 3.0][i % 2]) for i in range(4)], 2),
        (lambda: [Branching(i) for i in range(3)], 3),
        (lambda: [Branching(2) for i in range(3)], 1),
    ],
    ids=["not read", "read", "of another kind", "two values", "branch", "branch alike"],
)
def test_only_what_is_read_keeps_layers_apart(layers, count):
    model = Stack(layers())
    check_bits(model, torch.randn(3, 4))
    assert count_traces(model) == count


def test_a_change_of_what_is_not_read_costs_no_trace():
    model = Stack([Scaled(2.0, i) for i in range(3)])
    check_bits(model, torch.randn(3, 4))
    for layer in model.layers:
        layer.index += 7
    check_bits(model, torch.randn(3, 4), wrap=False)
    assert count_traces(model) == 1
    model.layers[1].scale = 3.0
    check_bits(model, torch.randn(3, 4), wrap=False)
    assert count_traces(model) == 2
    model.layers[2].scale = 3.0  # which another layer has been traced for
    check_bits(model, torch.randn(3, 4), wrap=False)
    assert count_traces(model) == 2


def test_weights_that_layers_have_in_common():
    model = Stack([Block() for _ in range(3)])
    model.layers[2].up.weight = model.layers[0].up.weight
    check_bits(model, torch.randn(3, 4))
    assert count_traces(model) == 1


class Two(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).sin())


@pytest.mark.parametrize("tied", [(False, True), (True, False)])
def test_weights_that_are_one_in_some_layers_only(tied):
    model = Stack([Two(t) for t in (*tied, *tied)])
    check_bits(model, torch.randn(3, 4))
    assert count_traces(model) == 2


def test_weights_in_one_storage():
    a, b = Two(False), Two(False)
    flat = torch.randn(32)
    b.a.weight = nn.Parameter(flat[:16].view(4, 4))
    b.b.weight = nn.Parameter(flat[16:].view(4, 4))
    model = Stack([a, b])
    check_bits(model, torch.randn(3, 4), is_copied=False)
    assert count_traces(model) == 2


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(self.norm(self.fc(x)))


def test_batch_norm_and_dropout():
    model = Stack([Normed() for _ in range(4)])
    for _ in range(3):
        check_bits(model, torch.randn(6, 4), wrap=not hasattr(model, "ran"))
        model.ran = True
    assert count_traces(model) == 1
    assert [layer.norm.num_batches_tracked.item() for layer in model.layers] == [3] * 4


def test_a_layer_in_eval_mode():
    model = Stack([Normed() for _ in range(4)])
    model.layers[1].eval()
    model.layers[2].norm.eval()
    check_bits(model, torch.randn(6, 4))
    assert count_traces(model) == 3
    model.eval()
    check_bits(model, torch.randn(6, 4), wrap=False)
    assert count_traces(model) == 3  # that of the layer which was in eval mode
    model.train()
    check_bits(model, torch.randn(6, 4), wrap=False)
    assert count_traces(model) == 3


@pytest.mark.parametrize("register", ["forward", "forward_pre", "full_backward"])
def test_hooks_on_one_layer(register):
    model = Stack([Block() for _ in range(3)])
    calls = []

    def hook(module, *values):
        calls.append(module)
        if register == "forward":
            return values[1] * 2
        return tuple(v * 2 for v in values[0]) if register == "forward_pre" else None

    getattr(model.layers[1].up, f"register_{register}_hook")(hook)
    check_bits(model, torch.randn(3, 4))
    assert count_traces(model) == 2
    assert set(calls) >= {model.layers[1].up}


def test_a_hook_that_comes_later():
    model = Stack([Block() for _ in range(3)])
    check_bits(model, torch.randn(3, 4))
    handle = model.layers[2].up.register_forward_hook(lambda m, a, out: out * 3)
    check_bits(model, torch.randn(3, 4), wrap=False)
    handle.remove()
    check_bits(model, torch.randn(3, 4), wrap=False)
    assert count_traces(model) == 2


def test_a_forward_that_an_object_has():
    model = Stack([Block() for _ in range(4)])
    one, two = model.layers[1], model.layers[2].up
    one.forward = lambda x: one.down(one.up(x)) * 5
    two.forward = lambda x: F.linear(x, two.weight) * 7
    check_bits(model, torch.randn(3, 4), is_copied=False)
    assert count_traces(model) == 3


def test_a_method_that_an_object_has():
    class Helped(Block):
        def help(self, x):
            return x

        def forward(self, x):
            return super().forward(self.help(x))

    model = Stack([Helped() for _ in range(3)])
    model.layers[1].help = torch.sin
    check_bits(model, torch.randn(3, 4))
    assert count_traces(model) == 2


def test_a_frozen_layer():
    model = Stack([Block() for _ in range(3)])
    model.layers[1].up.weight.requires_grad_(False)
    check_bits(model, torch.randn(3, 4))
    assert count_traces(model) == 2
    assert model.layers[1].up.weight.grad is None


def test_other_sizes_dtypes_and_buffers():
    class Shifted(Block):
        def __init__(self, width):
            super().__init__(width)
            self.register_buffer("shift", torch.randn(4))
            self.plain = torch.randn(4)

        def forward(self, x):
            return super().forward(x) + self.shift * self.plain

    model = Stack([Shifted(w) for w in (4, 4, 8, 8)])
    check_bits(model, torch.randn(3, 4))
    assert count_traces(model) == 2


def test_a_copy_needs_no_trace():
    model = tr.nn.wrap(Stack([Block() for _ in range(2)]), select="layers.*")
    step(model, torch.randn(3, 4))
    other = copy.deepcopy(model)
    check_bits(other, torch.randn(3, 4), wrap=False)
    assert count_traces(other) == 0


def test_a_copy_does_not_keep_the_first_model_alive():
    model = tr.nn.wrap(Stack([Block() for _ in range(2)]), select="layers.*")
    step(model, torch.randn(3, 4))
    other = copy.deepcopy(model)
    step(other, torch.randn(3, 4))
    alive = [weakref.ref(value) for value in (*model.parameters(), *model.modules())]
    del model
    gc.collect()
    assert not any(ref() is not None for ref in alive)
    check_bits(other, torch.randn(3, 4), wrap=False)
    third = copy.deepcopy(other)
    check_bits(third, torch.randn(3, 4), wrap=False)
    assert count_traces(third) == 0


def test_a_model_that_is_wrapped_again():
    model = tr.nn.wrap(Stack([Block() for _ in range(3)]), select="layers.*")
    step(model, torch.randn(3, 4))
    for policy in (None, "dots"):
        tr.nn.unwrap(model)
        check_bits(model, torch.randn(3, 4), policy=policy)
        assert count_traces(model) <= 1


@dataclass
class Settings:
    scale: float = 2.0
    sizes: list = field(default_factory=lambda: [1, 2])


class Configured(Block):
    def __init__(self, settings):
        super().__init__()
        self.settings = settings

    def forward(self, x):
        return super().forward(x) * self.settings.scale


def test_settings_in_an_object():
    common = Settings()
    model = Stack([Configured(common) for _ in range(3)])
    check_bits(model, torch.randn(3, 4))
    assert count_traces(model) == 1
    common.scale = 5.0
    check_bits(model, torch.randn(3, 4), wrap=False)
    assert count_traces(model) == 2
    own = Stack([Configured(Settings(s)) for s in (2.0, 2.0, 3.0)])
    check_bits(own, torch.randn(3, 4))
    assert count_traces(own) == 2
    own.layers[1].settings.scale = 4.0
    check_bits(own, torch.randn(3, 4), wrap=False)


def test_settings_that_change_between_layers():
    settings = Settings()

    class Changing(Stack):
        def forward(self, x):
            x = 2 * x
            for layer in self.layers:
                settings.scale += 1
                x = layer(x)
            settings.scale = 2.0
            return x

    class Global(Block):
        def forward(self, x):
            return super().forward(x) * settings.scale

    model = Changing([Global() for _ in range(3)])
    check_bits(model, torch.randn(3, 4), is_copied=False)
    assert count_traces(model) == 3


def test_a_module_that_layers_have_in_common():
    class Rotated(Block):
        def __init__(self, rotary):
            super().__init__()
            self.rotary = rotary

        def forward(self, x):
            return super().forward(self.rotary(x))

    rotary = nn.Linear(4, 4)
    model = Stack([Rotated(rotary) for _ in range(3)])
    check_bits(model, torch.randn(3, 4))
    assert count_traces(model) == 1


@pytest.mark.parametrize("policy", [None, "dots"])
def test_sizes_that_change(policy):
    class Alone(LlamaLayer):
        """Of another class, so that it shares nothing with the others."""

    alone = Stack([Alone(8, 0)])
    model = Stack([LlamaLayer(8, i) for i in range(3)])
    for each in (alone, model):
        tr.nn.wrap(each, policy, select="layers.*")
        for length in (4, 5, 7, 4, 6):
            check_bits(each, torch.randn(2, length, 8), wrap=False)
    assert count_traces(model) == count_traces(alone)


def test_derivatives_of_second_order():
    model = Stack([Block() for _ in range(3)])
    plain = copy.deepcopy(model)
    tr.nn.wrap(model, select="layers.*")
    x = torch.randn(3, 4)
    found = []
    for each in (model, plain):
        y = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(each(y).sum(), y, create_graph=True)
        first.square().sum().backward()
        found.append([y.grad, *(p.grad for p in each.parameters() if p.grad is not None)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert count_traces(model) == 1


class Pair(Block):
    def forward(self, x):
        y = super().forward(x)
        return y, y.square().mean()


@pytest.mark.parametrize("policy", [None, "budget:100KiB"])
def test_outputs_without_a_gradient(policy, monkeypatch):
    class Last(Stack):
        def forward(self, x):
            x, total = 2 * x, 0.0
            for i, layer in enumerate(self.layers):
                x, loss = layer(x)
                total = total + (loss if i == len(self.layers) - 1 else 0.0)
            return x + total

    traced = []
    trace = region.trace_joint
    monkeypatch.setattr(region, "trace_joint", lambda *a, **k: traced.append(a) or trace(*a, **k))
    model = Last([Pair() for _ in range(4)])
    check_bits(model, torch.randn(3, 4), policy=policy)
    assert count_traces(model) == 1
    assert len(traced) == 1  # the graph for the first gradient alone is made from that for both


def test_what_a_layer_keeps_is_its_own():
    class Keeping(Block):
        def forward(self, x):
            y = super().forward(x)
            self.kept = y.mean()
            return y

    model = Stack([Keeping() for _ in range(3)])
    plain = copy.deepcopy(model)
    check_bits(model, torch.ones(3, 4))
    plain(torch.ones(3, 4))
    assert [layer.kept for layer in model.layers] == [layer.kept for layer in plain.layers]


def test_in_inference_and_with_gradients_again():
    model = Stack([Block() for _ in range(3)])
    tr.nn.wrap(model, select="layers.*")
    with torch.no_grad():
        model(torch.ones(3, 4))
    check_bits(model, torch.randn(3, 4), wrap=False)
    with torch.autocast("cpu", torch.bfloat16):
        check_bits(model, torch.randn(3, 4), wrap=False)
    assert count_traces(model) == 2


def test_a_late_read_guards_all_attributes():
    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.module = module
            return x * 1, x * 2

        @staticmethod
        def backward(ctx, a, b):
            if ctx.needs_input_grad[0] and torch.count_nonzero is not None:
                return a * ctx.module.slope + b * 3, None
            return None, None

    class Clipped(Block):
        slope = 1.0

        def __init__(self):
            super().__init__()
            self.slope = 2.0

        def forward(self, x):
            return Clip.apply(super().forward(x), self)

    class First(Stack):
        def forward(self, x):
            x = 2 * x
            for layer in self.layers:
                x, _ = layer(x)
            return x

    model = First([Clipped() for _ in range(2)])
    check_bits(model, torch.randn(3, 4))
    for slope in (3.0, 4.0):
        model.layers[1].slope = slope
        check_bits(model, torch.randn(3, 4), wrap=False)
