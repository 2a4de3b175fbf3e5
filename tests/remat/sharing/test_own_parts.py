"""What stays a layer's own though its trace is shared: decisions of policies, names, reports."""

import copy

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import torchremat as tr
from tests.remat.sharing.stacks import Block, Stack, check_bits, count_traces, step


def saved_by_layer(model):
    saved = [row.module for row in tr.nn.report(model) if row.decision == "saved"]
    return {name.split(".")[1] for name in saved}


@pytest.mark.filterwarnings("ignore:.*matches nothing")
def test_a_policy_by_the_names_of_modules():
    model = Stack([Block() for _ in range(4)])
    check_bits(model, torch.randn(3, 4), policy="modules:layers.[13].up")
    assert count_traces(model) == 1
    assert saved_by_layer(model) == {"1", "3"}


def test_policies_by_pattern():
    model = Stack([Block() for _ in range(4)])
    plain = copy.deepcopy(model)
    tr.nn.wrap(model, {"layers.[02]": "none", "layers.*": "full"})
    x = torch.randn(3, 4)
    for ours, theirs in zip(step(model, x), step(plain, x), strict=True):
        assert torch.equal(ours, theirs)
    assert count_traces(model) == 1
    assert saved_by_layer(model) == {"0", "2"}


@pytest.mark.parametrize("policy", [None, "dots", "offload:all"])
def test_reports_name_the_modules_of_each_layer(policy):
    if policy == "offload:all":
        policy = tr.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    models = [Stack([Block() for _ in range(3)]) for _ in range(2)]
    models[1].layers[1].register_buffer("unused", None)  # alone, so that nothing is shared
    models[1].layers[2].register_buffer("other", None)
    reports = []
    for model in models:
        check_bits(model, torch.randn(3, 4), policy=policy)
        reports.append(tr.nn.report(model))
    assert [r.traces for r in reports] == [1, 2]
    rows = [
        [(r.name, r.op, r.module, str(r.source), r.nbytes, r.decision, r.reason) for r in report]
        for report in reports
    ]
    assert rows[0] == rows[1]
    assert reports[0].total == reports[1].total


def test_a_policy_that_counts_is_asked_about_each_layer():
    calls = []

    def policy(ctx, op, *args, **kwargs):
        calls.append(op)
        even = calls.count(torch.ops.aten.addmm.default) % 2 == 0
        return CheckpointPolicy.MUST_SAVE if even else CheckpointPolicy.PREFER_RECOMPUTE

    model = Stack([Block() for _ in range(3)])
    check_bits(model, torch.randn(3, 4), policy=tr.checkpoint_policies.from_selective(policy))
    assert calls.count(torch.ops.aten.addmm.default) == 6
    assert count_traces(model) == 1


def test_warnings_of_each_layer():
    model = Stack([Block() for _ in range(2)])
    with pytest.warns(tr.errors.UnmatchedWarning) as caught:
        check_bits(model, torch.randn(3, 4), policy="names:nowhere")
    assert len(caught) == 2


def test_recomputation_is_verified(monkeypatch):
    monkeypatch.setattr(tr.config, "verify_recomputation", "bitwise")
    model = Stack([Block() for _ in range(3)])
    check_bits(model, torch.randn(3, 4))
    assert count_traces(model) == 1


def test_budgets():
    model = Stack([Block() for _ in range(3)])
    check_bits(model, torch.randn(3, 4), policy="budget:100KiB")
    assert count_traces(model) == 1


def test_compiled_layers():
    model = Stack([Block() for _ in range(3)])
    tr.nn.wrap(model, select="layers.*", compile="aot_eager")
    check_bits(model, torch.randn(3, 4), wrap=False)
    assert count_traces(model) == 1


def test_names_of_residuals():
    class Named(Block):
        def forward(self, x):
            return tr.checkpoint_name(super().forward(x), "out").sin()

    model = Stack([Named() for _ in range(3)])
    check_bits(model, torch.randn(3, 4), policy="names:out")
    assert count_traces(model) == 1
    names = [row.name for row in tr.nn.report(model) if row.decision == "saved"]
    assert names == ["out"] * 3
    text = [str(r) for r in tr.saved_residuals(model, torch.randn(3, 4))]
    assert any("layers.2.up.weight" in line for line in text)


def test_one_layer_changes_and_comes_back():
    model = Stack([Block() for _ in range(3)])
    check_bits(model, torch.randn(3, 4))
    before = model.layers[1].up.weight
    model.layers[1].up.weight = torch.nn.Parameter(torch.randn(8, 4))
    check_bits(model, torch.randn(3, 4), wrap=False)
    model.layers[1].up.weight = before
    check_bits(model, torch.randn(3, 4), wrap=False)
    assert count_traces(model) == 1
