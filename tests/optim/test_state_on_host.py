"""State that lies in the host's memory: the plain loop's bits, and few bytes on the device."""

import copy
import weakref

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_freed
from tests.optim.test_step_in_backward import KINDS, WHOLE, assert_same, loss_of, make, train
from torchremat import config
from torchremat.errors import OffloadWarning
from torchremat.measure import LiveBytes, host_stats, reset_host_counts, resident_bytes
from torchremat.optim import step_in_backward
from torchremat.remat.offload.host_pool import POOL

WIDTH, DEPTH = 64, 6
LAYER = 4 * WIDTH * WIDTH


@pytest.fixture(autouse=True)
def _send_all_but_counts(monkeypatch):
    monkeypatch.setattr(config, "least_offload_nbytes", 16)
    before = host_stats().nbytes
    yield
    assert host_stats().nbytes == before


def count_sent(optimizer):
    tensors = [v for state in optimizer.state.values() for v in state.values()]
    large = [v for v in tensors if isinstance(v, torch.Tensor) and v.numel() > 1]
    return sum(v.numel() * v.element_size() for v in large)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in WHOLE], ids=lambda k: k.__name__)
def test_every_optimizer_gives_the_parameters_and_the_state_of_its_step(kind):
    plain, before = train(*make(kind)), host_stats().nbytes
    model, optimizer = make(kind)
    with step_in_backward(optimizer, offload=True):
        assert_same(train(model, optimizer), plain)
        assert host_stats().nbytes >= before + count_sent(optimizer)
    assert host_stats().nbytes == before
    assert_same((list(model.parameters()), optimizer.state_dict()), plain)


def clip(parameters):
    nn.utils.clip_grad_norm_(list(parameters), 0.5)


def test_gradients_that_are_clipped():
    plain = train(*make(), clip=clip)
    for backward in (torch.Tensor.backward, None):
        model, optimizer = make()
        with step_in_backward(optimizer, max_norm=0.5, offload=True) as stepping:
            assert_same(train(model, optimizer, backward or (stepping.backward)), plain)


def test_gradients_that_are_accumulated():
    plain = train(*make(), passes=2)
    model, optimizer = make()
    with step_in_backward(optimizer, accumulate=2, offload=True):
        assert_same(train(model, optimizer, passes=2), plain)


def test_what_the_backward_pass_did_not_update_is_updated_one_at_a_time():
    plain = train(*make(), passes=2)
    model, optimizer = make()
    with step_in_backward(optimizer, accumulate=3, offload=True):  # the third pass never comes
        assert_same(train(model, optimizer, passes=2), plain)
        assert host_stats().nbytes >= count_sent(optimizer)
        assert type(model[0].weight.grad) is torch.Tensor


def test_a_closure():
    losses = []
    for offload in (None, True):
        model, optimizer = make()
        stepping = step_in_backward(optimizer, offload=True) if offload else None
        for step in range(3):

            def closure(step=step, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        if stepping is not None:
            stepping.remove()
    assert losses[:3] == losses[3:]


class Skipping(nn.Module):
    """Uses other layers in other steps, so that the order of updates is never known."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, order):
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x.square().sum()


def test_other_layers_in_other_steps():
    found = []
    for offload in (False, True):
        model = Skipping()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        stepping = step_in_backward(optimizer, offload=offload)
        for order in ([0, 1, 2], [2, 0], [3, 1], [0], [1, 2, 3, 0], [3]):
            optimizer.zero_grad()
            model(torch.ones(2, 8), order).backward()
            optimizer.step()
        stepping.remove()
        found.append((list(model.parameters()), optimizer.state_dict()))
    assert_same(*found)


def stack():
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]
    return nn.Sequential(*layers), torch.ones(2, WIDTH)


def peak_of_step(model, optimizer, x):
    optimizer.zero_grad()
    with LiveBytes() as memory:
        model(x).square().sum().backward()
        optimizer.step()
    return memory.peak


def test_the_state_of_few_parameters_is_on_the_device():
    peaks = []
    for offload in (False, True):
        model, x = stack()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        there = resident_bytes(model, optimizer, x)
        with step_in_backward(optimizer, offload=offload):
            before = resident_bytes(model, optimizer, x)
            peak_of_step(model, optimizer, x)
            reset_host_counts()
            peaks.append(peak_of_step(model, optimizer, x))
            if not offload:
                continue
            assert before == resident_bytes(model, optimizer, x) == there - 2 * (DEPTH - 3) * LAYER
            assert host_stats().nbytes == 2 * DEPTH * LAYER
            assert host_stats().num_fetched == 2 * DEPTH  # each once
            assert not POOL._arrivals  # nothing is on its way between steps
    assert peaks[1] - peaks[0] == 4 * LAYER


def test_estimates_count_it():
    model, x = stack()
    optimizer = torch.optim.AdamW(model.parameters())
    usual = tr.estimate(model, x, optimizer=optimizer).optimizer_bytes
    with step_in_backward(optimizer, offload=True):
        assert tr.estimate(model, x, optimizer=optimizer).optimizer_bytes == (
            usual - 2 * (DEPTH - 3) * LAYER
        )


def test_states_are_saved_and_loaded_while_they_are_on_the_host():
    plain = train(*make(), passes=1)
    model, optimizer = make()
    with step_in_backward(optimizer, offload=True):
        train(model, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        weights = copy.deepcopy(model.state_dict())
        train(model, optimizer)
        later = [p.detach().clone() for p in model.parameters()]
        optimizer.load_state_dict(copy.deepcopy(saved))
        model.load_state_dict(weights)
        assert_same((list(model.parameters()), optimizer.state_dict()), plain)
        train(model, optimizer)
        assert all(map(torch.equal, model.parameters(), later))
    other, alone = make()
    alone.load_state_dict(saved)
    other.load_state_dict(weights)
    train(other, alone)
    assert all(map(torch.equal, other.parameters(), later))


def test_a_host_without_room(monkeypatch):
    plain = train(*make())
    monkeypatch.setattr(config, "host_pool_nbytes", 300)
    model, optimizer = make()
    with (
        step_in_backward(optimizer, offload=True) as stepping,
        pytest.warns(OffloadWarning, match="stays on its device"),
    ):
        assert_same(train(model, optimizer), plain)
    assert repr(stepping) == "StepInBackward(AdamW, offload=True)"


def test_a_model_is_freed_with_its_state():
    model, optimizer = make()
    stepping = step_in_backward(optimizer, offload=True)
    train(model, optimizer)
    references = [weakref.ref(thing) for thing in (model, optimizer, stepping)]
    del model, optimizer, stepping
    assert_freed(*references)
