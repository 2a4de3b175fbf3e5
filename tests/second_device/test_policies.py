"""Every kind of policy, on a device that does everything late: plain PyTorch's bits."""

import pytest
import torch

import torchremat as tr
from tests.second_device.training import MODELS, assert_trained_alike, make_input
from torchremat import checkpoint_policies as cp
from torchremat.measure import host_stats


def _is_product(op, *_args, **_params):
    aten = torch.ops.aten
    return op in (aten.addmm.default, aten.convolution.default, aten.native_layer_norm.default)


POLICIES = {
    "full": "full",
    "dots": "dots",
    "dots without batch": "dots_with_no_batch_dims_saveable",
    "everything": cp.everything_saveable,
    "by operator": _is_product,
    "budget": "budget:85%",
    "least": "budget:least",
    "by time": "budget:time:+10%",
}


NO_COPIES = pytest.mark.parametrize("late", ["copies last"], indirect=True)
"""None runs beside the operators."""


@NO_COPIES
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_training_is_plain_pytorchs(late, name, policy):
    build, shape = MODELS[name]
    x = make_input(shape)
    assert_trained_alike(build, lambda m: tr.nn.wrap(m, policy), x)
    if not str(policy).startswith("budget"):
        assert_trained_alike(build, lambda m: tr.nn.wrap(m, policy, select="*"), x)


@pytest.mark.parametrize("name", MODELS)
def test_a_budget_that_offloads(late, name):
    build, shape = MODELS[name]
    assert_trained_alike(build, lambda m: tr.nn.wrap(m, "budget:80%+offload"), make_input(shape))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("select", [None, "*"])
def test_offloaded_values_come_back(late, name, select):
    build, shape = MODELS[name]

    def everything(*_args, **_params):
        return tr.Offloadable("device", "pinned_host")

    before = host_stats().num_copied
    assert_trained_alike(
        build, lambda m: tr.nn.wrap(m, everything, select=select), make_input(shape)
    )
    assert host_stats().num_copied > before
    assert host_stats().nbytes == 0


@NO_COPIES
@pytest.mark.parametrize("policy", ["full", "dots", "budget:95%"])
def test_tapes_train_alike(late, policy):
    """Routing by values cannot be one graph."""

    class Routed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
            self.drop = torch.nn.Dropout(0.3)

        def forward(self, x):
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                rows = (x.sum(1).long() % 3 == i).nonzero().squeeze(1)
                if rows.tolist():
                    out = out.index_add(0, rows, self.drop(expert(x[rows]).tanh()))
            return out

    def build():
        return Routed().to("late")

    x = make_input((12, 8))
    assert_trained_alike(build, lambda m: tr.nn.wrap(m, policy), x)


@NO_COPIES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", ["full", "dots", "budget:70%"])
def test_autocast_of_the_device(late, policy, dtype):
    build, shape = MODELS["encoder"]
    x = make_input(shape)
    assert_trained_alike(build, lambda m: tr.nn.wrap(m, policy), x, autocast=dtype)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


@NO_COPIES
def test_what_stands_in_a_graph_is_run_under_autocast(late):
    # a name, a nested checkpoint, a block without gradients, a class with its own derivative
    def build():
        torch.manual_seed(1)
        return torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)]).to("late")

    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.checkpoint = build(), lambda f: f

        def forward(self, x):
            first, last = self.layers
            hidden = tr.checkpoint_name(self.checkpoint(lambda y: first(y).sin())(x), "hidden")
            with torch.no_grad():
                scale = last(hidden).abs().amax()
            return Doubled.apply(last(hidden) / scale)

    def wrapped(model):
        model.checkpoint = tr.checkpoint
        return tr.nn.wrap(model, cp.save_only_these_names("hidden"))

    assert_trained_alike(Named, wrapped, make_input((4, 8)), autocast=torch.bfloat16)


def _offload_everything(*_args, **_params):
    return tr.Offloadable("device", "pinned_host")


def _measure_peak(model, x):
    """The peak of the second step's memory, by the allocator of the device."""
    model(x).square().sum().backward()
    model.zero_grad()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    model(x).square().sum().backward()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before


@pytest.mark.parametrize("late", ["copies first"], indirect=True)
def test_copies_that_are_fetched_early_are_held_longer(late, monkeypatch):
    """The bits stay: what reads a copy waits for it, however many are on their way.

    Where copies run last, what is copied to the host is held until they have run.
    """
    build, shape = MODELS["encoder"]
    peaks = []
    for num in (1, 64):
        monkeypatch.setattr(tr.config, "offload_prefetch", num)
        x = make_input(shape)
        assert_trained_alike(build, lambda m: tr.nn.wrap(m, _offload_everything), x)
        peaks.append(_measure_peak(tr.nn.wrap(build(), _offload_everything), x))
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("num", [1, 4, 64])
def test_plans_fetch_where_they_say(late, monkeypatch, num):
    """A plan has its own schedule of copies; the setting is for policies."""
    monkeypatch.setattr(tr.config, "offload_prefetch", num)
    build, shape = MODELS["encoder"]
    assert_trained_alike(build, lambda m: tr.nn.wrap(m, "budget:70%+offload"), make_input(shape))
