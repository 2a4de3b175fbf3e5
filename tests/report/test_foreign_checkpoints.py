"""Reports count what `torch.utils.checkpoint` inside saves; policies that override it warn."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchremat as tr
from torchremat.errors import OverrideWarning
from torchremat.measure import HeldBytes, LiveBytes

DIM = 32


def save_products(_, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


KINDS = {
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, save_products),
    ),
    "in a context": partial(
        checkpoint, use_reentrant=False, context_fn=lambda: (torch.enable_grad(),) * 2
    ),
}


class Model(nn.Module):
    def __init__(self, run=None):
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM), nn.Tanh())
            for _ in range(4)
        )
        self.run = run

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + (self.run(block, x) if self.run else block(x))
        return x.square().mean()


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(64, DIM)


def measure(model, x):
    with LiveBytes() as live:
        with HeldBytes(model, x) as held:
            loss = model(x)
        loss.backward()
    return held.total, live.peak


@pytest.mark.parametrize("kind", ["not reentrant", "reentrant", "in a context"])
@pytest.mark.sampled(2)
def test_bytes_are_those_that_the_checkpoints_save(kind, x):
    model = Model(KINDS[kind])
    held, peak = measure(model, x)
    plain_held, _ = measure(Model(), x)
    assert held < plain_held / 4
    report = tr.explain(model, x)
    assert report.total == held
    assert any("torch.utils.checkpoint" in row.reason for row in report)
    estimate = tr.estimate(model, x)
    assert estimate.saved_bytes == held
    assert abs(estimate.peak_bytes - peak) < 0.04 * peak
    (as_it_is,) = tr.compare(model.to("meta"), x.to("meta"), policies=[])
    assert as_it_is.held == held


def test_what_a_selective_policy_saves_is_counted(x):
    report = tr.explain(Model(KINDS["selective"]), x)
    saved = {row.op for row in report if row.decision == "saved" and "blocks" in row.module}
    assert any("mm" in op for op in saved)
    recomputed = {row.op for row in report if row.decision == "recomputed"}
    assert any("gelu" in op for op in recomputed)
    assert not any("mm" in op for op in recomputed)
    assert tr.explain(Model(KINDS["not reentrant"]), x).total < report.total
    assert report.total < tr.explain(Model(), x).total


def test_a_checkpoint_in_a_checkpoint_saves_what_the_outer_one_does(x):
    run = KINDS["not reentrant"]

    class Nested(Model):
        def forward(self, x):
            return run(super().forward, x)

    assert tr.explain(Nested(run), x).total == measure(Nested(run), x)[0]


@pytest.mark.parametrize(
    "act",
    [
        lambda m, x: tr.nn.wrap(m, "none")(x).backward(),
        lambda m, x: tr.explain(m, x, policy="dots"),
        lambda m, x: tr.estimate(m, x, policy="dots"),
        lambda m, x: tr.plan(m, x, budget="90%"),
    ],
    ids=["wrap", "explain", "estimate", "plan"],
)
def test_a_policy_that_overrides_them_says_so_once(act, x):
    model = Model(KINDS["not reentrant"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act(model, x)
    messages = [str(w.message) for w in caught if w.category is OverrideWarning]
    assert len(messages) == 1, messages
    assert "the policy around it decides" in messages[0]


def test_overridden_they_train_as_plain(x):
    model = Model(KINDS["not reentrant"])
    plain = copy.deepcopy(model)
    plain(x).backward()
    with pytest.warns(OverrideWarning):
        tr.nn.wrap(model, "full")(x).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
