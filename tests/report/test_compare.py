import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchremat as tr
from torchremat.measure import LiveBytes

policies = tr.checkpoint_policies


def deep(x, w):
    for _ in range(8):
        x = torch.sin(torch.sin(x @ w))
    return x.sum()


def arguments(device="cpu"):
    return torch.ones(16, 32, device=device), torch.ones(32, 32, device=device)


def test_bytes_peak_and_time_side_by_side():
    found = tr.compare(deep, *arguments(), policies=["full", policies.dots_saveable])
    plain, full, dots = found
    assert [row.name for row in found] == ["plain", "nothing_saveable", "dots_saveable"]
    assert [row.held for row in found] == [
        tr.explain(deep, *arguments(), policy=p).total for p in (None, "full", "dots")
    ]
    assert (plain.recomputed, full.held) == (0, 0)
    assert full.recomputed == plain.held
    assert dots.peak < plain.peak
    assert plain.added_seconds == 0
    for row in found:
        assert row.seconds > 0
        assert row.added_seconds == pytest.approx(row.seconds - plain.seconds)


def test_the_peak_is_that_of_a_step():
    x, w = arguments()
    w.requires_grad_()
    deep(x, w).backward()
    with LiveBytes() as memory:
        loss = deep(x, w)
        torch.autograd.grad(loss, w)
    (plain,) = tr.compare(deep, x, w, policies=[])
    assert abs(plain.peak - memory.peak) <= 16  # the loss and its gradient


def test_peaks_are_those_of_plans():
    """Also of a model that returns its logits, which are alive with their gradients."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Tanh()) for _ in range(4)]
    model, x = nn.Sequential(*layers, nn.Linear(16, 32)), torch.randn(256, 16)
    plan = tr.plan(model, x, budget="70%")
    plain, planned = tr.compare(model, x, policies=["budget:70%"])
    assert (plain.peak, planned.peak) == (plan.baseline.peak_bytes, plan.peak_bytes)


@pytest.mark.parametrize("device", ["meta"])
def test_nothing_runs_on_meta(device):
    found = tr.compare(deep, *arguments(device), policies=["full"])
    assert [(row.peak, row.seconds, row.added_seconds) for row in found] == [(None,) * 3] * 2
    assert found.rows[0].held > 0


def test_table():
    text = str(tr.compare(deep, *arguments("meta"), policies=["full", "dots|ops:aten.sin"]))
    lines = text.splitlines()
    assert lines[0].split() == ["policy", "saved", "recomputed", "peak", "time", "added"]
    assert lines[1].split() == ["plain", "46.0", "KiB", "0", "B", "-", "-", "-"]
    assert lines[3].startswith("dots_saveable | save_ops('aten.sin')")
    real = str(tr.compare(deep, *arguments(), policies=["full"])).splitlines()
    assert real[1].endswith("+0.00 ms")
    assert max(map(len, [*lines, *real])) <= 100


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return F.dropout(self.norm(self.fc(x)), 0.5).sin()


def test_nothing_is_disturbed():
    net = Net()
    net(torch.randn(4, 8)).sum().backward()
    grads = {name: p.grad.clone() for name, p in net.named_parameters()}
    state = {name: value.clone() for name, value in net.state_dict().items()}
    rng = torch.get_rng_state()

    tr.compare(net, torch.ones(4, 8), policies=["full", "dots"])

    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in state.items())
    assert all(torch.equal(p.grad, grads[name]) for name, p in net.named_parameters())


def test_arguments_that_are_written_to_are_as_they_were():
    def f(x, w, counter, mean, var):
        counter.add_(1)
        x.mul_(2)
        return F.batch_norm(x * w, mean, var, training=True), counter

    x, w = torch.ones(2, 3), torch.ones(3, requires_grad=True)
    counter, mean, var = torch.zeros((), dtype=torch.int64), torch.zeros(3), torch.ones(3)
    tr.compare(f, x, w, counter, mean, var, policies=["full"])
    assert torch.equal(x, torch.ones(2, 3))
    assert counter == 0
    assert torch.equal(mean, torch.zeros(3))
    assert torch.equal(var, torch.ones(3))


def test_a_pending_backward_pass_still_runs():
    x, w = (t.requires_grad_() for t in arguments())
    loss = deep(x, w)
    tr.compare(deep, x, w, policies=["full"])
    loss.backward()
    assert w.grad is not None


def test_restored_after_an_error():
    calls = []
    counter = torch.zeros(())

    def f(x):
        counter.add_(1)
        if not isinstance(x, torch.nn.Parameter):
            calls.append(x)
        if len(calls) > 2:  # traced, then run
            raise KeyError("mine")
        return x.exp() * counter

    rng = torch.get_rng_state()
    with pytest.raises(KeyError, match="mine"):
        tr.compare(f, torch.ones(3), policies=[])
    assert counter == 0
    assert torch.equal(torch.get_rng_state(), rng)


def test_complex_and_unused_outputs():
    def f(x):
        return {"a": torch.fft.fft(x), "b": x.argmax(), "c": x.detach(), "d": x.exp()}

    found = tr.compare(f, torch.ones(4), policies=["full"])
    assert found.rows[1].held == 0


@pytest.mark.parametrize("policies", ["dots", None, 3, {"a": "dots"}])
def test_policies_must_be_a_list(policies):
    with pytest.raises(TypeError, match=r"policies=\[\.\.\.\]"):
        tr.compare(deep, *arguments(), policies=policies)


def test_bad_input():
    with pytest.raises(TypeError, match="unknown policy"):
        tr.compare(deep, *arguments(), policies=[3])
    with pytest.raises(TypeError, match="function of tensors"):
        tr.compare(3, *arguments(), policies=["dots"])
    with pytest.raises(TypeError, match="nothing to differentiate"):
        tr.compare(torch.sin, torch.tensor(1), policies=["dots"])
