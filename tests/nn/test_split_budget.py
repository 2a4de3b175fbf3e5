"""`split_budget`: one budget for layers that are wrapped one by one, judged by what runs."""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same
from tests.planning.models import GPT, Block
from torchremat.errors import BudgetError, NoMatchError, TraceError
from torchremat.measure import LiveBytes


def step(model, x):
    """Loss and gradients of a step, and its peak."""
    torch.manual_seed(1)
    with LiveBytes() as memory:
        loss = model(x).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
    return (loss.detach(), gradients), memory.peak


def layers_and_tokens(layers=3, dropout=0.2):
    torch.manual_seed(0)
    return GPT(layers, dropout=dropout), torch.randint(64, (4, 16))


@functools.cache
def split_of_three(budget):
    return tr.nn.split_budget(*layers_and_tokens(), budget=budget, select="layers.*")


BUDGETS = ["100%", "85%", "65%"]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.sampled(2)
def test_the_measured_peak_keeps_within_the_budget_and_bits_are_plain_pytorchs(budget):
    plain, x = layers_and_tokens()
    split = split_of_three(budget)
    wrapped = tr.nn.wrap(copy.deepcopy(plain), split)
    step(wrapped, x)  # traced and planned
    expected, most = step(plain, x)
    found, peak = step(wrapped, x)
    assert_same(found, expected)
    assert peak <= split.peak_bytes <= split.budget
    assert most <= split.plain_peak_bytes
    assert list(split) == [f"layers.{i}" for i in range(3)]


def test_bytes_that_are_left_are_used():
    assert split_of_three("85%").peak_bytes > 0.95 * split_of_three("85%").budget


def test_less_memory_means_less_kept_and_more_time():
    splits = [split_of_three(budget) for budget in BUDGETS]
    kept = [sum(layer.saved_bytes for layer in split.layers) for split in splits]
    assert kept == sorted(kept, reverse=True)
    times = [split.recompute_seconds for split in splits]
    assert times == sorted(times)


def test_layers_need_not_be_alike():
    torch.manual_seed(0)
    pairs = [(nn.Sequential(Block(16, 2, 0.0), Block(16, 2, 0.0)), Block(16, 1, 0.0))]
    model = nn.Sequential(*itertools.chain(*pairs), nn.Linear(16, 1))
    x = torch.randn(4, 16, 16)
    split = tr.nn.split_budget(model, x, budget="75%", select="first:2")
    wrapped = tr.nn.wrap(copy.deepcopy(model), split)
    step(wrapped, x)
    found, peak = step(wrapped, x)
    assert_same(found, step(model, x)[0])
    assert peak <= split.budget


def test_the_model_stays_as_it_is_and_may_be_on_the_meta_device():
    model, x = layers_and_tokens()
    tr.nn.wrap(model, "dots", select="layers.0")
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    real = tr.nn.split_budget(model, x, budget="85%", select="layers.*")
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before
    with torch.device("meta"):
        abstract = GPT(3, dropout=0.2)
    assert tr.nn.split_budget(abstract, x.to("meta"), budget="85%", select="layers.*") == real


def test_the_least_budget_that_an_error_names_can_be_met():
    model, x = layers_and_tokens(1)
    with pytest.raises(
        BudgetError, match="If the 1 layers save nothing but their inputs"
    ) as caught:
        tr.nn.split_budget(model, x, budget="1KiB", select="layers.*")
    least = caught.value.least_bytes
    assert tr.nn.split_budget(model, x, budget=least, select="layers.*").peak_bytes <= least


def test_what_cannot_be_split_is_refused():
    model, x = layers_and_tokens(1)
    with pytest.raises(NoMatchError, match="matches nothing"):
        tr.nn.split_budget(model, x, budget="50%", select="blocks.*")
    with pytest.raises(TypeError, match="takes an nn.Module"):
        tr.nn.split_budget(model.forward, x, budget="50%", select="layers.*")
    model.aside = nn.Linear(2, 2)
    with pytest.raises(TraceError, match=r"none of the 1 layers \('aside'"):
        tr.nn.split_budget(model, x, budget="50%", select="aside")


def test_a_split_reads_as_a_table():
    split = split_of_three("100%")
    head, columns, *rows = str(split).splitlines()
    assert head.startswith("peak ")
    assert columns.split() == ["layer", "keeps", "without", "policy"]
    assert [row.split()[0] for row in rows] == ["layers.0", "layers.1", "layers.2"]
    assert all(row.endswith("none") for row in rows)
