"""Faults that are planted on purpose are seen: so what passes here has none of them."""

import pytest
import torch

import torchremat as tr
from tests.second_device.training import MODELS, assert_trained_alike, make_input
from torchremat.remat.offload import streams
from torchremat.remat.offload.host_pool import HostPool
from torchremat.remat.program import random_replay


class _Noisy(torch.nn.Linear):
    def __init__(self):
        torch.manual_seed(1)
        super().__init__(8, 8)

    def forward(self, x):
        y = super().forward(x)
        return y * torch.rand_like(y)


def _train_offloaded():
    build, shape = MODELS["encoder"]

    def everything(*_args, **_params):
        return tr.Offloadable("device", "pinned_host")

    assert_trained_alike(build, lambda m: tr.nn.wrap(m, everything, select="*"), make_input(shape))


def test_a_copy_that_is_not_waited_for(late, monkeypatch):
    late.show_copies_first(False)
    monkeypatch.setattr(streams.Copy, "wait", lambda self: None)
    with pytest.raises(AssertionError):
        _train_offloaded()


def test_a_copy_that_does_not_wait_for_what_it_reads(late, monkeypatch):
    late.show_copies_first(True)

    def copy_at_once(self, target, source):
        with self.stream:
            target.copy_(source, non_blocking=True)
            event = self.stream.record_event()
        return streams.Copy(event, torch.accelerator.current_stream(self.device))

    monkeypatch.setattr(streams._DeviceStream, "copy", copy_at_once)
    with pytest.raises(AssertionError):
        _train_offloaded()


def test_a_source_that_is_freed_before_it_is_copied(late, monkeypatch):
    late.show_copies_first(False)
    monkeypatch.setattr(HostPool, "keep_source", lambda self, storage, copy, source: None)
    with pytest.raises(AssertionError):
        _train_offloaded()


def test_numbers_that_are_replayed_from_another_devices_generator(late, monkeypatch):
    right = random_replay.generator_state

    def from_the_other(generator, device):
        return right(generator, torch.device("late", 1 - (device.index or 0)))

    monkeypatch.setattr(random_replay, "generator_state", from_the_other)

    def build():
        return _Noisy().to("late")

    with pytest.raises(AssertionError):
        assert_trained_alike(build, lambda m: tr.nn.wrap(m, "full"), make_input((64, 8)))
