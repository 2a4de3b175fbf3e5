"""Models of which one part is elsewhere: on the CPU, or on another device."""

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.second_device.training import assert_trained_alike, make_input

POLICIES = ["full", "dots", "budget:90%"]


class OnTwo(nn.Module):
    """Two halves, each with dropout, on two devices; what is between them is moved."""

    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(1)

        def half():
            return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))

        self.places = first, second
        self.first, self.second = half().to(first), half().to(second)

    def forward(self, x):
        y = self.first(x.to(self.places[0]))
        return self.second(y.to(self.places[1]))


@pytest.mark.parametrize("places", [("late:0", "late:1"), ("late:1", "late:0"), ("cpu", "late")])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_on_two_devices(late, places, policy):
    x = make_input((128, 16), places[0])
    assert_trained_alike(lambda: OnTwo(*places), lambda m: tr.nn.wrap(m, policy), x)
    if "budget" not in policy:
        both = "first,second"
        assert_trained_alike(
            lambda: OnTwo(*places), lambda m: tr.nn.wrap(m, policy, select=both), x
        )


def test_values_of_two_devices_are_offloaded(late):
    def everything(*_args, **_params):
        return tr.Offloadable("device", "pinned_host")

    x = make_input((8, 16), "late:0")
    assert_trained_alike(lambda: OnTwo("late:0", "late:1"), lambda m: tr.nn.wrap(m, everything), x)


def test_a_module_that_is_moved_after_it_was_wrapped(late):
    def build():
        return OnTwo("late:0", "late:0")

    def move(model):
        model.second.to("late:1")
        model.places = "late:0", "late:1"
        return model

    x = make_input((8, 16), "late:0")
    assert_trained_alike(lambda: move(build()), lambda m: tr.nn.wrap(m, "full"), x)
    wrapped = tr.nn.wrap(build(), "full")
    wrapped(x)
    assert move(wrapped)(x).device == torch.device("late", 1)
