"""Budgets of compiled graphs, where lengths grow from step to step."""

import pytest
import torch
from torch import nn

from tests.compile.dynamo.steps import WIDTH, Part, peak_of_second, step_of
from tests.helpers import peak_of
from torchremat.checkpoint_policies import memory_budget
from torchremat.errors import BudgetWarning


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Part(depth=4), Part(depth=4)

    def forward(self, x):
        return self.second(self.first(x)).sum()


class Broken(Whole):
    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).sum()


class Training:
    """Steps of a compiled model, each as in plain PyTorch to the bit."""

    def __init__(self, model, limit):
        torch._dynamo.reset()
        self.model = model
        options = {"policy": memory_budget(limit), "codegen": "eager"}
        self.run = torch.compile(model, backend="torchremat", options=options, dynamic=True)

    def peaks_at(self, length):
        """The peak of a step, and plain's."""
        x = torch.randn(length, WIDTH)
        expected, plain = peak_of_second(self.model, self.model, x)
        found, peak = peak_of(step_of(self.model, self.run, x))
        assert all(map(torch.equal, found, expected))
        return peak, plain


@pytest.mark.parametrize("kind", [Whole, Broken])
def test_a_budget_is_kept_at_each_length(kind):
    torch.manual_seed(0)
    limit = 1_500_000
    training = Training(kind(), limit)
    for _ in range(2):  # all fits
        peak, plain = training.peaks_at(128)
    assert plain < limit
    assert peak > 0.9 * plain
    for length in (512, 512, 768, 128, 900, 960, 1000, 960):
        peak, plain = training.peaks_at(length)
        assert peak <= limit < plain or length == 128


def test_what_cannot_be_met_at_a_length_is_said_once():
    torch.manual_seed(0)
    training = Training(Whole(), 1_500_000)
    training.peaks_at(128)
    with pytest.warns(BudgetWarning, match="cannot be met") as warned:
        for length in (4096, 4608, 5120):
            peak, plain = training.peaks_at(length)
            assert peak < 0.5 * plain
    assert sum(issubclass(w.category, BudgetWarning) for w in warned) == 1


def test_lengths_that_grow_in_each_step_are_given_room():
    torch.manual_seed(0)
    reports = []
    options = {"policy": memory_budget(1_500_000), "codegen": "eager", "report": reports.append}
    torch._dynamo.reset()
    model = Whole()
    run = torch.compile(model, backend="torchremat", options=options, dynamic=True)
    for length in range(256, 512, 16):
        run(torch.randn(length, WIDTH)).backward()
    assert 4 <= len(reports) <= 8  # sixteen lengths
