"""Plans beside what the allocator of the device lends, and memory that runs out."""

import gc

import pytest
import torch

import torchremat as tr
from tests.second_device.training import MODELS, build_encoder, make_input
from torchremat.core.accelerators import read_allocated_bytes

pytestmark = pytest.mark.parametrize("late", ["copies last"], indirect=True)
"""No copy runs beside the operators here."""


def _measure_peak(run):
    """The bytes that `run` has at its peak beyond those from before it."""
    device = torch.device("late", 0)
    gc.collect()
    torch.accelerator.reset_peak_memory_stats(device)
    before = read_allocated_bytes(device, "current")
    run()
    return read_allocated_bytes(device, "peak") - before


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_the_allocator_sees_the_peak_of_the_plan(late, name, share):
    build, shape = MODELS[name]
    x = make_input(shape)

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = build()

        def forward(self, x):
            return self.model(x).square().mean()

    step = Step()
    least = tr.plan(step, x, budget="least")
    plain = tr.estimate(step, x, policy="none").peak_bytes
    budget = int(least.peak_bytes + share * (plain - least.peak_bytes))
    planned = tr.plan(step, x, budget=budget)
    assert planned.peak_bytes <= budget
    wrapped = tr.nn.wrap(step, tr.checkpoint_policies.from_plan(planned))
    wrapped(x).backward()
    wrapped.zero_grad()
    measured = _measure_peak(lambda: wrapped(x).backward())
    assert measured <= planned.peak_bytes
    assert measured >= 0.8 * planned.peak_bytes


def test_memory_that_runs_out_says_what_is_alive(late):
    model, x = tr.nn.wrap(build_encoder(), "budget:90%"), make_input((4, 16, 32))

    def run():
        model(x).square().mean().backward()
        model.zero_grad()

    run()
    peak = _measure_peak(run)
    late.set_limit(read_allocated_bytes(x.device, "current") + peak // 2)
    with pytest.raises(torch.OutOfMemoryError, match=r"late:0 is out of memory") as caught:
        run()
    assert "memory ran out in the" in "".join(caught.value.__notes__)
